"""Backpropagation for bounds: the rule table, the walk over a traced model, the report."""

from clipless.bounds import (  # noqa: F401  (fill the table)
    _arithmetic_rules,
    _feature_rules,
    _layer_rules,
    _module_rules,
)
from clipless.bounds._clipping import clip_products
from clipless.bounds._report import NodeBound, ParameterBound, SensitivityReport
from clipless.bounds._rule import Bound, Signal, Site, register, unregister
from clipless.bounds._sensitivity import sensitivity

__all__ = [
    "sensitivity",
    "clip_products",
    "SensitivityReport",
    "NodeBound",
    "ParameterBound",
    "register",
    "unregister",
    "Bound",
    "Signal",
    "Site",
]
