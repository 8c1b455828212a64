"""Epsilon of a person with several records: by the privacy loss of the mixture, not k times it.

Of k records, a Poisson sample at rate q draws Bin(k, q) of them, so that a step is a mixture of
Gaussian mechanisms at distances 0 to k, against one at distance 0. Which records are drawn decides
where the sum moves; the mixture of equal norms along one line dominates (Choquette-Choo, Ganesh,
Steinke and Thakurta 2024, corollary 4.7). Nothing about the training changes: this says what it
costs somebody whose records were treated as k people's.
"""

from __future__ import annotations

import math
import operator
from functools import lru_cache
from typing import Any

from clipless.accounting._history import History, Runs, merge_releases, without_failures
from clipless.accounting._mechanism import FullBatch, Mechanism, PoissonSampling, Relation
from clipless.accounting._pld import rounding_allowance
from clipless.errors import PrivacyError

_TAIL = 1e-18
"""Numbers of drawn records that are rarer than this count as all of them."""
_FINEST_GRID, _GRID_POINTS = 2e-4, 4_000
_LARGEST_LOSS = 1e4


def group_epsilon(history: History, delta: float, *, records: int) -> float:
    """Return an epsilon for the zeroing out of up to so many records at once, at `delta`.

    At the same delta that can be more than `records` times the epsilon of one record: the textbook
    bound of k epsilon is at a delta of `(e^(k epsilon) - 1) / (e^epsilon - 1)` times that of one.
    For full batches and Poisson sampling that is not cut, under zero-out; anything else is refused.
    delta is for the whole group.

    Example:
        >>> from clipless.accounting import epsilon
        >>> sampling = PoissonSampling(dataset_size=60_000, rate=0.01)
        >>> run = [(Mechanism(noise_multiplier=1.0, sampling=sampling), 200)]
        >>> 4 < group_epsilon(run, 1e-6, records=4) / epsilon(run, 1e-6) < 4.5
        True
    """
    if operator.index(records) < 1:
        raise ValueError(f"records must be at least 1, got {records}")
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must lie strictly between 0 and 1, got {delta!r}")
    runs, failure = without_failures(merge_releases(history))
    # A release that fails may do so for each of the records.
    left = delta - records * failure - rounding_allowance(runs)
    for mechanism, _ in runs:
        _require_supported(mechanism)
    if not runs:
        return 0.0
    if left <= 0 or any(mechanism.noise_multiplier == 0 for mechanism, _ in runs):
        return math.inf
    width = max(_width(mechanism, records) for mechanism, _ in runs)
    if width * _GRID_POINTS > _LARGEST_LOSS:
        return math.inf
    return max(0.0, float(_composed(runs, records, width).get_epsilon_for_delta(left)))


def _require_supported(mechanism: Mechanism) -> None:
    sampling = mechanism.sampling
    plain = isinstance(sampling, FullBatch) or (
        isinstance(sampling, PoissonSampling) and sampling.max_batch_size is None
    )
    if mechanism.relation is Relation.REPLACE_ONE or not plain:
        raise PrivacyError(
            "group privacy is computed under zero-out, for full batches and Poisson samples that "
            f"are not cut at a maximum size; not for {sampling} under {mechanism.relation}"
        )


def _drawn(mechanism: Mechanism, records: int) -> tuple[list[float], list[float]]:
    """Return how many of the records are drawn, and how probably: rare numbers rounded up."""
    from scipy import stats

    if not isinstance(mechanism.sampling, PoissonSampling) or mechanism.sampling.rate == 1.0:
        return [float(records)], [1.0]
    found = stats.binom(records, mechanism.sampling.rate)
    low, high = int(found.ppf(_TAIL)), int(found.isf(_TAIL))
    high = min(max(high, low + 1), records)
    numbers = [float(number) for number in range(low, high + 1)]
    probabilities = [float(found.pmf(number)) for number in range(low, high + 1)]
    probabilities[0] += float(found.cdf(low - 1)) if low else 0.0  # rounded up to `low`
    beyond = float(found.sf(high))
    if beyond > 0.0 and high < records:
        numbers.append(float(records))
        probabilities.append(beyond)
    total = math.fsum(probabilities)
    return numbers, [each / total for each in probabilities]


def _width(mechanism: Mechanism, records: int) -> float:
    """Return a distance of grid points: fine for one record, and never too many of them."""
    numbers, probabilities = _drawn(mechanism, records)
    likely = max(n for n, p in zip(numbers, probabilities, strict=True) if p > 1e-12)
    shift = likely / mechanism.noise_multiplier
    return max(_FINEST_GRID, (0.5 * shift**2 + 10.0 * shift) / _GRID_POINTS)


@lru_cache(maxsize=8)
def _composed(runs: Runs, records: int, width: float) -> Any:
    from dp_accounting.pld import privacy_loss_distribution

    total: Any = None
    for mechanism, count in runs:
        numbers, probabilities = _drawn(mechanism, records)
        if len(numbers) == 1:
            step = privacy_loss_distribution.from_gaussian_mechanism(
                standard_deviation=mechanism.noise_multiplier / numbers[0],
                value_discretization_interval=width,
            )
        else:
            step = privacy_loss_distribution.from_mixture_gaussian_mechanism(
                standard_deviation=mechanism.noise_multiplier,
                sensitivities=numbers,
                sampling_probs=probabilities,
                value_discretization_interval=width,
            )
        step = step.self_compose(count)
        total = step if total is None else total.compose(step)
    return total
