"""Backpropagation for bounds: the rule table, the walk over a traced model, the report."""

from clipless.bounds._clipping import clip_products
from clipless.bounds._report import NodeBound, ParameterBound, SensitivityReport
from clipless.bounds._rule import Bound, Product, Signal, Site, register, unregister
from clipless.bounds._sensitivity import sensitivity
from clipless.bounds.rules import RULE_FILES as RULE_FILES
from clipless.bounds.rules import weight_product

__all__ = [
    "sensitivity",
    "clip_products",
    "SensitivityReport",
    "NodeBound",
    "ParameterBound",
    "register",
    "unregister",
    "Bound",
    "Product",
    "weight_product",
    "Signal",
    "Site",
]
