"""A test set for tables that come without one."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor


def split_rows(count: int, *, test_fraction: float = 0.2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the row numbers of a training and of a test set, drawn at random.

    The draw depends on its arguments only, all of them public: it never sees the data. There is no
    stratification, because that looks at labels; with rare classes the share of each in the two
    sets is random. The test set has `test_fraction * count` rows, rounded up.

    The privacy guarantee of a training run is about its training rows. Rows of the test set are
    not covered by it: what is printed about them is as public as you make it.

    Example:
        >>> train, test = split_rows(10, test_fraction=0.2, seed=0)
        >>> len(train), len(test), sorted(torch.cat([train, test]).tolist()) == list(range(10))
        (8, 2, True)
    """
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must be between 0 and 1, got {test_fraction}")
    # Exact, for 0.2 * 19020 rows are 3804 and not one more for rounding.
    test_count = math.ceil(Fraction(str(test_fraction)) * count)
    if not 0 < test_count < count:
        raise ValueError(f"{count} rows cannot be split: a part would be empty")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[test_count:], order[:test_count]
