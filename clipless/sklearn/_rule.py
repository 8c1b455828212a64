"""`TabularRule`: hyper-parameters for tables, chosen from public numbers.

Nothing here sees a value of the data. The constants were found on public benchmark tables (see
`benchmarks/tabular.py`); the plateaus around them are wide, so that one setting serves all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from clipless.common import require_positive
from clipless.statistics import noise_radius, noise_scale, query_noise

_MOST_DECORRELATED = 1024
"""Features whose covariance is asked for: a matrix of 8 MiB."""

_WIDE, _ROWS_FOR_COLUMN = 128, 50
"""Tables of so many columns are treated as vectors unless they have so many rows for each."""
_MANY_ROWS = 100_000
"""From so many rows on, the noise has room for a wide hidden layer, which then learns
the features that smaller tables are given."""
_ROWS_FOR_KNOTS = 2000
"""Rows, at epsilon 1, from which on numbers are bent at knots."""
_KNOT_STEP = 0.75
_MOST_DIRECTIONS = 24
_ROWS_FOR_PRODUCTS = 0.2
"""Rows, at epsilon 1, over the cube of the features, from which on there are products of two."""
_MOST_ENTRIES = 1 << 27
"""Of all products of all rows: half a gigabyte."""


@dataclass(frozen=True, kw_only=True)
class TabularRule:
    """Everything that training on a table needs to know beforehand.

    Example:
        >>> rule = TabularRule.choose(rows=40_000, columns=10, epsilon=1.0)
        >>> rule.batch_size, rule.steps, rule.query_noise
        (4096, 250, 20.0)
    """

    hidden: int
    """Least width of the hidden layer, which has at least two units for each output; 0 for none."""
    temperature: float
    """Steepness of the loss: it costs no noise."""
    steps: int
    batch_size: int
    """Expected batch size; that of the whole table if `full_batch`."""
    full_batch: bool
    learning_rate: float
    average: float
    """Decay of the averaged weights."""
    product_clip: float
    """Weight gradients are clipped at this fraction of their bounds."""
    query_noise: float
    """Noise multiplier of each of the three queries that scale the columns."""
    label_noise: float
    """Noise multiplier of the class counts, which set the initial bias."""
    covariance_noise: float
    """Noise multiplier of the features' covariance, which decorrelates them."""
    class_noise: float
    """Noise multiplier of the counts that tell which classes there are, if they are not given."""
    knot_step: float = 0.0
    """Distance of the knots at which numbers are bent, in spreads of their column; 0 for none."""
    directions: int = 0
    """Most decorrelated features of which products are taken; 0 for none."""
    rows_for_products: float = math.inf
    """Products are taken if there are so many rows for the cube of the number of features."""

    @classmethod
    def choose(cls, *, rows: int, columns: int, epsilon: float) -> TabularRule:
        """Return the rule's choice for a table of public size under a total budget.

        Batches hold 4,096 rows or 4% of the table, whichever is more; where that is more than half
        of it, all rows, since sampling would save little. Queries cost a constant part of the
        budget, whatever it is. The model is one linear layer, on features of which there are
        more in larger tables; in the largest, a network finds its own. Tables of many columns and
        few rows are treated as vectors.
        """
        require_positive("epsilon", epsilon)
        noise = query_noise(rows=rows, columns=columns, epsilon=epsilon)
        if columns >= _WIDE and rows < _ROWS_FOR_COLUMN * columns:
            return replace(cls.choose_for_vectors(rows=rows, epsilon=epsilon), query_noise=noise)
        batch_size = max(4096, round(0.04 * rows))
        full_batch = batch_size > rows / 2
        many = rows >= _MANY_ROWS
        return cls(
            hidden=128 if many else 0,
            temperature=20.0,
            steps=250,
            batch_size=rows if full_batch else batch_size,
            full_batch=full_batch,
            learning_rate=0.01,
            average=0.98,
            product_clip=0.5,
            query_noise=noise,
            label_noise=30.0 * noise_scale(epsilon),
            covariance_noise=25.0 * noise_scale(epsilon),
            class_noise=min(max(rows / 30, 8.0), 30.0) * noise_scale(epsilon),
            knot_step=_KNOT_STEP if rows * epsilon >= _ROWS_FOR_KNOTS and not many else 0.0,
            directions=0 if many else _MOST_DIRECTIONS,
            rows_for_products=_ROWS_FOR_PRODUCTS / epsilon,
        )

    @classmethod
    def choose_for_vectors(cls, *, rows: int, epsilon: float) -> TabularRule:
        """Return the choice for vectors of one norm, such as those of texts: one linear layer.

        There are many more inputs than in a table, each of which says little: without a hidden
        layer the noise has few parameters to spoil, and gradients are clipped at a smaller part of
        their bound. All rows make a batch up to 16,384, since a step costs little.
        """
        chosen = cls.choose(rows=rows, columns=1, epsilon=epsilon)  # of a table that is not wide
        full_batch = rows <= 16_384
        return replace(
            chosen,
            hidden=0,
            steps=120,
            batch_size=rows if full_batch else max(8192, round(0.04 * rows)),
            full_batch=full_batch,
            learning_rate=0.02,
            product_clip=0.1,
            query_noise=25.0 * noise_scale(epsilon),
            knot_step=0.0,
            directions=0,
        )

    def decorrelates(self, *, rows: int, features: int) -> bool:
        """Whether a covariance of so many features is worth its price; all numbers are public.

        Not if noise would make up a tenth of it or more, and not for so many features that the
        matrix itself would be a burden.
        """
        noise = noise_radius(self.covariance_noise / max(rows, 1), features)
        return features <= _MOST_DECORRELATED and noise < 0.1

    def product_directions(self, *, rows: int, features: int) -> int:
        """Return of how many directions products are taken in a table of so many base features.

        Of none if rows are too few for their number; of fewer in tables so large that the products
        would fill the memory.
        """
        if rows < self.rows_for_products * features**3:
            return 0
        room = math.isqrt(2 * _MOST_ENTRIES // max(rows, 1))
        return min(self.directions, features, room)
