"""Frequent values of a private column, by noisy counts above a threshold.

Names are hashed into a fixed number of buckets. Of each bucket, by how many rows its most frequent
name leads over the next one (ties: the name that sorts first) is released with Gaussian noise. The
name of a bucket is told, with its noisy lead, if that is above a threshold T.

Proof, for D and D' that differ by one empty row, which holds the name a. Only the bucket of a
differs, and in it one count by one, so that the largest and the second largest count, and the lead,
move by one at most: the leads are a query of sensitivity 1.
1. The same name leads that bucket in D and D'. Then one function makes both answers from the noisy
   leads: post-processing of a Gaussian mechanism, whose curve is delta_G(epsilon).
2. Another name, or none, leads without the row. Then it is a that leads in D, by c_a - c_b <= 1
   over the name b that leads in D', where c_b - (c_a - 1) <= 1: both leads are one at most, and
   what the bucket tells, it tells with probability f = P(1 + noise > T) at most, independently of
   all other buckets, whose answers are distributed alike in D and D'. They are (0, f)-close.
Either way P(S) - e^epsilon P'(S) <= (1 - f) delta_G(epsilon) + f: the curve of a Gaussian mechanism
that, with probability f, tells everything. So a pair of such mechanisms dominates the answer, pairs
compose, also of queries chosen by earlier answers, and k queries together cost at most
delta_G(epsilon) of their Gaussian parts plus the sum of their f: what is left of delta after these
is what the accountant may spend.

Where one row is replaced by another, there are two such steps. Names may change in two buckets,
whose leads are one at most, or in one, whose leads are two at most; all others move the query as
the accountant supposes. T is chosen for the worse: `failure / 2` for a lead of two.

Names that share a bucket only hide each other: collisions cost utility, never privacy.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import torch
from torch import Tensor

from clipless.data import hash_bucket

_BUCKETS = 1 << 20
"""A hundred values share none with a chance of 99.5%; those that do can be lost."""


def value_threshold(*, noise_multiplier: float, failure: float, changes: int = 1) -> float:
    """Return the noisy lead above which a value is told.

    Names that one record decides about are told with probability `failure` at most, by noise of
    deviation `noise_multiplier`; `changes` is 2 if a record is not emptied, but replaced.

    Example:
        >>> round(value_threshold(noise_multiplier=10.0, failure=1e-6), 1)
        48.5
    """
    if not 0 < failure < 1:
        raise ValueError(f"failure must be a probability between 0 and 1, got {failure!r}")
    return changes - noise_multiplier * NormalDist().inv_cdf(failure / changes)


def leading_values(values: Sequence[str], counts: Tensor) -> tuple[Tensor, dict[int, str]]:
    """Return by how much the most frequent name of every bucket leads, and those names: private.

    `counts` has the number of rows of each of `values`, in which a name may come several times.
    """
    totals: dict[int, dict[str, float]] = {}
    for name, count in zip(values, counts.tolist(), strict=True):
        bucket = totals.setdefault(hash_bucket(name, _BUCKETS), {})
        bucket[name] = bucket.get(name, 0.0) + count
    leads = torch.zeros(_BUCKETS, dtype=torch.float64)
    leaders: dict[int, str] = {}
    for place, bucket in totals.items():
        first, *others = sorted(bucket.items(), key=lambda each: (-each[1], each[0]))
        leads[place] = first[1] - (others[0][1] if others else 0.0)
        leaders[place] = first[0]
    return leads, leaders
