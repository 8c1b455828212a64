"""The rule table: one rule for each layer and each torch function, by families.

Importing this package fills the table.
"""

from clipless.bounds.rules import (
    _activation,
    _arithmetic,
    _features,
    _layers,
    _modules,
    _reductions,
    _shapes,
)
from clipless.bounds.rules._layers import weight_product as weight_product

RULE_FILES = (_activation, _arithmetic, _features, _layers, _modules, _reductions, _shapes)
"""The modules that register rules."""
