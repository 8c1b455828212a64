"""`TabularRule`: hyper-parameters for tables, chosen from public numbers.

Nothing here sees a value of the data. The constants were found on public benchmark tables (see
`benchmarks/tabular.py`); the plateaus around them are wide, so that one setting serves all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from clipless.common import require_positive
from clipless.statistics import noise_radius, noise_scale, query_noise

_MOST_DECORRELATED = 1024
"""Features whose covariance is asked for: a matrix of 8 MiB."""

_MANY_ROWS = 100_000
"""From so many rows on, the noise has room for a wide hidden layer."""
_WIDE, _ROWS_FOR_HIDDEN = 128, 50
"""Tables of so many columns have a hidden layer if they have so many rows for each of them."""


@dataclass(frozen=True, kw_only=True)
class TabularRule:
    """Everything that training on a table needs to know beforehand.

    Example:
        >>> rule = TabularRule.choose(rows=40_000, columns=10, epsilon=1.0)
        >>> rule.batch_size, rule.steps, rule.query_noise
        (4096, 250, 50.0)
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

    @classmethod
    def choose(cls, *, rows: int, columns: int, epsilon: float) -> TabularRule:
        """Return the rule's choice for a table of public size under a total budget.

        Batches hold 4,096 rows or 4% of the table, whichever is more; where that is more than half
        of it, all rows, since sampling would save little. Queries cost a constant part of the
        budget, whatever it is. Tables of many columns and few rows are treated as vectors: a hidden
        layer would be noise.
        """
        require_positive("epsilon", epsilon)
        noise = query_noise(rows=rows, columns=columns, epsilon=epsilon)
        if columns >= _WIDE and rows < _ROWS_FOR_HIDDEN * columns:
            return replace(cls.choose_for_vectors(rows=rows, epsilon=epsilon), query_noise=noise)
        batch_size = max(4096, round(0.04 * rows))
        full_batch = batch_size > rows / 2
        return cls(
            hidden=32 if rows < _MANY_ROWS else 128,
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
        )

    def decorrelates(self, *, rows: int, features: int) -> bool:
        """Whether a covariance of so many features is worth its price; all numbers are public.

        Not if noise would make up a tenth of it or more, and not for so many features that the
        matrix itself would be a burden.
        """
        noise = noise_radius(self.covariance_noise / max(rows, 1), features)
        return features <= _MOST_DECORRELATED and noise < 0.1
