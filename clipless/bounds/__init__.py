"""Backpropagation for bounds: the rule table, the walk over a traced model, the report."""

from clipless.bounds._clipping import clip_products
from clipless.bounds._refusal import hooks_of, refuse_global_hooks
from clipless.bounds._report import NodeBound, ParameterBound, SensitivityReport
from clipless.bounds._rule import (
    Bound,
    CallSite,
    Product,
    Rule,
    Signal,
    find_rule,
    register,
    unregister,
)
from clipless.bounds._sensitivity import (
    Shape,
    input_shapes,
    prove_bounds,
    sensitivity,
    traced_model,
    unwrap_module,
)
from clipless.bounds._shapes import TracedModel
from clipless.bounds._structure import ModelSnapshot, WeightSeal
from clipless.bounds._trace import check_rules, unsupported_operations
from clipless.bounds._trial_run import TRIAL_RUN, seed_generators
from clipless.bounds.rows import (
    RowCall,
    Rows,
    RowTrace,
    compare_passes,
    register_rows,
    trace_rows,
    unregister_rows,
    without_shortcuts,
)
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
    "CallSite",
    "Rule",
    "Shape",
    "ModelSnapshot",
    "WeightSeal",
    "TracedModel",
    "check_rules",
    "unsupported_operations",
    "find_rule",
    "refuse_global_hooks",
    "hooks_of",
    "input_shapes",
    "TRIAL_RUN",
    "prove_bounds",
    "seed_generators",
    "traced_model",
    "unwrap_module",
    "register_rows",
    "unregister_rows",
    "Rows",
    "RowCall",
    "RowTrace",
    "compare_passes",
    "trace_rows",
    "without_shortcuts",
]
