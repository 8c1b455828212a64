"""Lipschitz layers: plain `nn.Module`s with ordinary parameters and proved norms."""

from clipless.nn._activation import Absolute, FullSort, GroupSort, Householder, MaxMin
from clipless.nn._adaptive import FollowQuantile
from clipless.nn._base import ConstrainedModule, certify, project
from clipless.nn._conv import SpectralConv1d, SpectralConv2d
from clipless.nn._embedding import Embedding
from clipless.nn._export import to_torch
from clipless.nn._gradient import ClipGradient
from clipless.nn._input import BoundedInput
from clipless.nn._linear import FrobeniusLinear, SpectralLinear
from clipless.nn._normalization import BallProjection, LayerCentering
from clipless.nn._pooling import (
    ScaledAvgPool1d,
    ScaledAvgPool2d,
    ScaledGlobalAvgPool1d,
    ScaledGlobalAvgPool2d,
    ScaledGlobalL2NormPool1d,
    ScaledGlobalL2NormPool2d,
    ScaledL2NormPool1d,
    ScaledL2NormPool2d,
)
from clipless.nn._residual import Residual

__all__ = [
    "SpectralLinear",
    "FrobeniusLinear",
    "SpectralConv1d",
    "SpectralConv2d",
    "Embedding",
    "GroupSort",
    "MaxMin",
    "FullSort",
    "Householder",
    "Absolute",
    "ScaledAvgPool1d",
    "ScaledAvgPool2d",
    "ScaledL2NormPool1d",
    "ScaledL2NormPool2d",
    "ScaledGlobalAvgPool1d",
    "ScaledGlobalAvgPool2d",
    "ScaledGlobalL2NormPool1d",
    "ScaledGlobalL2NormPool2d",
    "LayerCentering",
    "BallProjection",
    "BoundedInput",
    "ClipGradient",
    "FollowQuantile",
    "Residual",
    "ConstrainedModule",
    "project",
    "certify",
    "to_torch",
]
