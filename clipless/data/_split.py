"""Random splits into training and test rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def split_rows(count: int, *, test_fraction: float = 0.2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the row numbers of a training and of a test set, drawn at random.

    Each row is drawn by itself: a keyed function of its number alone, with the public key `seed`,
    decides which set it is in. So no row can move another one: neither what a row holds nor how
    many rows come after it changes where others go. The sizes of the sets are random for that
    reason; about `test_fraction * count` rows are in the test set. There is no stratification,
    because that looks at labels. Rows come in the order of their draws, not of the file.

    The privacy guarantee of a training run is about its training rows. Rows of the test set are
    not covered by it: what is printed about them is as public as you make it.

    Example:
        >>> train, test = split_rows(100, test_fraction=0.2, seed=0)
        >>> len(train), len(test), sorted(torch.cat([train, test]).tolist()) == list(range(100))
        (85, 15, True)
        >>> longer, _ = split_rows(101, test_fraction=0.2, seed=0)
        >>> set(train.tolist()) == set(longer.tolist()) - {100}
        True
    """
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must be between 0 and 1, got {test_fraction}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    draws = _draws(count, seed)
    test_count = _below(draws, test_fraction)
    if not 0 < test_count < count:
        raise ValueError(f"{count} rows cannot be split with seed {seed}: a part would be empty")
    order = torch.from_numpy(np.argsort(draws, kind="stable"))
    return order[test_count:], order[:test_count]


def split_sizes(count: int) -> tuple[int, int]:
    """Return how many rows `split_rows` puts into training and test set by default."""
    test_count = _below(_draws(count, 0), 0.2)
    return count - test_count, test_count


def _draws(count: int, seed: int) -> np.ndarray[Any, Any]:
    """A number of 64 bits for each row, of a counter-based generator: a function of key and i."""
    return np.asarray(np.random.Philox(key=seed).random_raw(max(count, 0)))


def _below(draws: np.ndarray[Any, Any], fraction: float) -> int:
    return int((draws < np.uint64(fraction * 2.0**64)).sum())
