"""Lipschitz layers: plain `nn.Module`s with ordinary parameters and proved norms."""

from clipless.nn._activation import Absolute, FullSort, GroupSort, Householder, MaxMin
from clipless.nn._base import (
    BoundedModule,
    ConstrainedModule,
    certify,
    clipping_modules,
    constrained_modules,
    prepare_projection,
    project,
    set_loss_scale,
)
from clipless.nn._conv import SpectralConv1d, SpectralConv2d
from clipless.nn._convert import Conversion, convert
from clipless.nn._embedding import Embedding
from clipless.nn._export import to_torch
from clipless.nn._gradient import ClipGradient, FollowQuantile, clip_cotangent
from clipless.nn._input import BoundedInput
from clipless.nn._linear import AffineModule, FrobeniusLinear, SpectralLinear
from clipless.nn._normalization import BallProjection, LayerCentering
from clipless.nn._pooling import (
    GlobalAvgPoolBase,
    GlobalL2NormPoolBase,
    L2NormPoolBase,
    ScaledAvgPool1d,
    ScaledAvgPool2d,
    ScaledGlobalAvgPool1d,
    ScaledGlobalAvgPool2d,
    ScaledGlobalL2NormPool1d,
    ScaledGlobalL2NormPool2d,
    ScaledL2NormPool1d,
    ScaledL2NormPool2d,
    WindowPoolBase,
)
from clipless.nn._residual import Residual
from clipless.nn._standardize import ChannelMix, ChannelStandardize, GroupNormalize
from clipless.nn.scattering._scattering import Scattering2d

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
    "GroupNormalize",
    "ChannelMix",
    "ChannelStandardize",
    "Scattering2d",
    "BoundedInput",
    "ClipGradient",
    "FollowQuantile",
    "Residual",
    "ConstrainedModule",
    "project",
    "prepare_projection",
    "certify",
    "to_torch",
    "convert",
    "Conversion",
    "AffineModule",
    "BoundedModule",
    "clip_cotangent",
    "constrained_modules",
    "clipping_modules",
    "set_loss_scale",
    "GlobalAvgPoolBase",
    "GlobalL2NormPoolBase",
    "L2NormPoolBase",
    "WindowPoolBase",
]
