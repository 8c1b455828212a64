"""One public order of all examples, the same in every pass, and the batches it is cut into."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np

from clipless.accounting import CyclicPoissonSampling, FixedOrder
from clipless.kernels import KeyStream


def batch_in_order(sampling: FixedOrder, step: int) -> Any:
    """Return the examples of a step, int64 of shape (n,): a function of public numbers alone.

    Example:
        >>> order = FixedOrder(dataset_size=5, batch_size=2)
        >>> [batch_in_order(order, step).tolist() for step in range(4)]
        [[0, 1], [2, 3], [4], [0, 1]]
    """
    first, last = places_of(sampling, step)
    if sampling.shuffle_seed is None:
        return np.arange(first, last)
    return _shuffled(sampling.dataset_size, sampling.shuffle_seed)[first:last]


def places_of(sampling: FixedOrder, step: int) -> tuple[int, int]:
    """Return where in the order the batch of a step begins, and where it ends."""
    first = step % sampling.steps_per_pass * sampling.batch_size
    return first, min(first + sampling.batch_size, sampling.dataset_size)


def group_of_step(sampling: CyclicPoissonSampling, step: int) -> Any:
    """Return the examples that a step may sample, int64 in order: a function of public numbers.

    Example:
        >>> cyclic = CyclicPoissonSampling(dataset_size=7, rate=0.1, groups=3)
        >>> groups = [group_of_step(cyclic, step).tolist() for step in range(4)]
        >>> sorted(sum(groups[:3], [])), groups[0] == groups[3]
        ([0, 1, 2, 3, 4, 5, 6], True)
    """
    return _group(sampling, step % sampling.groups)


@lru_cache(maxsize=128)
def _group(sampling: CyclicPoissonSampling, number: int) -> Any:
    order = _shuffled(sampling.dataset_size, sampling.shuffle_seed)
    return np.sort(order[number :: sampling.groups])


@lru_cache(maxsize=2)
def _shuffled(size: int, seed: int) -> Any:
    """Return a permutation that everybody may know."""
    key = hashlib.sha256(f"clipless/public order/{seed}".encode()).digest()
    words = KeyStream(key).words(size, purpose=0)
    return np.argsort(words, kind="stable").astype(np.int64)
