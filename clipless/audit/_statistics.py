"""Confidence intervals that the audits rest on."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]


@dataclass(frozen=True)
class Estimate:
    """A measured value with the ends of its confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def to_dict(self) -> dict[str, float]:
        """Return plain data."""
        return asdict(self)


def require_confidence(confidence: float) -> float:
    """Return a confidence as given, or refuse what is none."""
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must lie strictly between 0 and 1, got {confidence!r}")
    return float(confidence)


def clopper_pearson(*, successes: int, trials: int, confidence: float) -> Estimate:
    """Return a probability estimated from independent trials, with its two-sided exact interval.

    Each end on its own holds with probability at least `1 - (1 - confidence) / 2`, whatever the
    true probability is.

    Example:
        >>> print(clopper_pearson(successes=0, trials=100, confidence=0.95))
        0.000 [0.000, 0.036]
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"{successes} of {trials} trials cannot have succeeded")
    low, high = exact_ends(np.array([successes]), trials, confidence)
    return Estimate(successes / trials, float(low[0]), float(high[0]))


def exact_ends(successes: Array, trials: int, confidence: float) -> tuple[Array, Array]:
    """Return the ends of the Clopper-Pearson interval for each number of successes."""
    from scipy import stats

    tail = (1 - require_confidence(confidence)) / 2
    # Where an end is 0 or 1 the distribution has no second parameter; any will do there.
    low = stats.beta.ppf(tail, np.maximum(successes, 1), trials - successes + 1)
    high = stats.beta.ppf(1 - tail, successes + 1, np.maximum(trials - successes, 1))
    return np.where(successes > 0, low, 0.0), np.where(successes < trials, high, 1.0)


def auroc(*, positives: Tensor, negatives: Tensor, confidence: float) -> Estimate:
    """Return the probability that a positive scores above a negative (ties count half).

    The interval is that of DeLong et al. (1988), which is asymptotic. Where it has no width,
    because the two kinds are told apart perfectly, the exact interval of as many disjoint pairs as
    there are takes its place.

    Example:
        >>> print(auroc(positives=torch.tensor([2.0, 3.0, 5.0]),
        ...             negatives=torch.tensor([1.0, 4.0]), confidence=0.95))
        0.667 [0.000, 1.000]
    """
    from scipy import stats

    tail = (1 - require_confidence(confidence)) / 2
    high, low = positives.double().flatten(), negatives.double().flatten()
    if min(len(high), len(low)) < 2:
        raise ValueError(f"{len(high)} positives and {len(low)} negatives: two of each are needed")
    # How many of the other kind each score exceeds, as fractions: DeLong's placements.
    of_high, of_low = _exceeded(high, low), 1 - _exceeded(low, high)
    value = float(of_high.mean())
    variance = float(of_high.var() / len(high) + of_low.var() / len(low))
    if variance <= 1e-30:
        pairs = min(len(high), len(low))
        exact = clopper_pearson(successes=round(value * pairs), trials=pairs, confidence=confidence)
        return Estimate(value, min(value, exact.low), max(value, exact.high))
    width = float(stats.norm.ppf(1 - tail)) * math.sqrt(variance)
    return Estimate(value, max(0.0, value - width), min(1.0, value + width))


def _exceeded(scores: Tensor, others: Tensor) -> Tensor:
    """The fraction of `others` below each score, ties counted half."""
    ordered = others.sort().values
    below = torch.searchsorted(ordered, scores, right=False)
    up_to = torch.searchsorted(ordered, scores, right=True)
    return (below + up_to).double() / (2 * len(others))
