"""The rule table: one rule for each layer and each torch function, by families.

Importing this package fills the table.
"""

from clipless.bounds.rules import (
    activation,
    arithmetic,
    features,
    layers,
    modules,
    reductions,
    shapes,
)
from clipless.bounds.rules.layers import weight_product as weight_product

RULE_FILES = (activation, arithmetic, features, layers, modules, reductions, shapes)
"""The modules that register rules."""
