"""Rules about rows for aten operators, one family a file."""

from clipless.bounds.rows.rules import (
    attention,
    lookups,
    pointwise,
    products,
    reductions,
    views,
    windows,
)

RULE_FILES = (pointwise, views, reductions, products, lookups, windows, attention)
