"""Privacy loss distributions of a history: the tight accountant, on top of `dp_accounting.pld`.

Every distribution here is *pessimistic*: rounded so that the epsilon read from it is an upper bound
of the true one, whatever the width of the grid. The width only decides how close the bound is, and
how long it takes.

The library's own `PLDAccountant` is not used because it rebuilds the distribution of a step for
every question; here it is built once per distinct mechanism and composed by count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from clipless.accounting._history import Runs
from clipless.accounting._mechanism import (
    CyclicPoissonSampling,
    FixedSizeSampling,
    Mechanism,
    PoissonSampling,
    Relation,
    Sampling,
)

_COARSEST_GRID = 1e-3
_FINEST_GRID = 1e-5
_GRID_PER_STEP_LOSS = 0.1
"""A grid this fine, relative to the spread of one step's loss, costs about 0.1% of epsilon."""
_LARGEST_STEP_GRID = 200_000
_LARGEST_COMPOSED_GRID = 2_000_000

_LARGEST_LOSS = 1e5
"""Noise so small that a single release may lose more than this counts as no noise at all."""
_LONGEST_RUN = 1_000_000
"""Longer runs are composed in two stages, for which the library is much faster."""

_ROUNDING_PER_RUN = 1e-12
_ROUNDING_PER_STEP = 1e-15
"""Allowance for float64 arithmetic, in delta. Against 40-digit arithmetic the profile of one step
was found low by at most 1.4e-16 and its composition by at most 1e-16 a step."""

_NEGLIGIBLE_TRUNCATION = 1e-20
_TAIL_LOG_MASS = -50.0
"""Log of the noise tail that is treated as an infinite loss (the library's own default)."""
_TAIL_DEVIATIONS = 9.9
"""How many standard deviations from the mean that tail begins."""


def epsilon(runs: Runs, delta: float) -> float:
    """Upper bound of epsilon at `delta`, or NaN where float64 cannot resolve a delta so small."""
    if max(_loss_range(mechanism) for mechanism, _ in runs) > _LARGEST_LOSS:
        return math.inf
    allowance = rounding_allowance(runs)
    if delta <= 2 * allowance:
        return math.nan
    distribution = _composed(runs, grid_width(runs))
    return float(distribution.get_epsilon_for_delta(delta - allowance))


def delta(runs: Runs, epsilon: float) -> float:
    """Upper bound of delta at `epsilon`."""
    if max(_loss_range(mechanism) for mechanism, _ in runs) > _LARGEST_LOSS:
        return 1.0
    distribution = _composed(runs, grid_width(runs))
    return float(distribution.get_delta_for_epsilon(epsilon)) + rounding_allowance(runs)


def rounding_allowance(runs: Runs) -> float:
    """How much of delta is set aside for the rounding errors of the computation itself.

    An error of eta in the profile of one step moves the delta of the composition by at most eta,
    so errors add up over steps.
    """
    steps = sum(count for _, count in runs)
    return _ROUNDING_PER_RUN * len(runs) + _ROUNDING_PER_STEP * steps


def grid_width(runs: Runs) -> float:
    """Choose the distance of grid points: a round number between 1e-5 and, usually, 1e-3.

    1e-3 is right for most trainings (0.1% above the limit, 8 times faster than 1e-4), but when the
    loss of one step is far below the grid, as at sampling rates of 1e-4, it can be 50% above. So
    the grid follows the root mean square loss of a step. It is made coarser again where very
    small noise or very many steps would need arrays too large to handle.
    """
    mean_square, smallest = 0.0, _FINEST_GRID
    steps = sum(count for _, count in runs)
    for mechanism, count in runs:
        square = mean_square_loss(mechanism)
        mean_square += square * count / steps
        spread = _loss_range(mechanism)
        smallest = max(
            smallest,
            spread / _LARGEST_STEP_GRID,
            count * square / (spread * _LARGEST_COMPOSED_GRID),
        )
    wanted = min(_COARSEST_GRID, _GRID_PER_STEP_LOSS * math.sqrt(mean_square))
    return _round_down(max(wanted, smallest))


def _round_down(width: float) -> float:
    """Round to 1, 2 or 5 times a power of ten, so that growing histories share their grid."""
    power = math.floor(math.log10(width) + 1e-9)
    digit = next(d for d in (5, 2, 1) if d * 10.0**power <= width * (1 + 1e-9))
    return float(f"{digit}e{power}")


def inclusion_rate(sampling: Sampling) -> float:
    """Probability that a given example takes part in a step, not counting truncation."""
    match sampling:
        case PoissonSampling(rate=rate):
            return rate
        case FixedSizeSampling(dataset_size=size, batch_size=batch_size):
            return batch_size / size
        case CyclicPoissonSampling(rate=rate, groups=groups):
            return rate * groups
    return 1.0


def mean_square_loss(mechanism: Mechanism) -> float:
    """Size of the squared loss of one step, of the right order of magnitude only."""
    rate = inclusion_rate(mechanism.sampling)
    distance = 2.0 if mechanism.relation is Relation.REPLACE_ONE else 1.0
    precision = (distance / mechanism.noise_multiplier) ** 2
    return min(rate**2 * math.expm1(min(precision, 50.0)), rate * (precision + precision**2 / 4.0))


def _loss_range(mechanism: Mechanism) -> float:
    """Width of the interval on which the loss of one step is tabulated, or a little more."""
    plain = isinstance(mechanism.sampling, PoissonSampling) and _truncation(mechanism) == 0.0
    distance = 1.0 if plain else 2.0
    sigma = mechanism.noise_multiplier / distance
    rate = inclusion_rate(mechanism.sampling)
    highest = math.log(rate) + (0.5 + _TAIL_DEVIATIONS * sigma) / sigma**2
    upward = highest if highest > 30.0 else math.log1p(math.exp(highest) - rate)
    return 2.0 * max(upward, 1e-12)


def _truncation(mechanism: Mechanism) -> float:
    """Probability that the other examples alone fill a Poisson batch; 0 where it is negligible."""
    sampling = mechanism.sampling
    if not isinstance(sampling, PoissonSampling) or sampling.max_batch_size is None:
        return 0.0
    from scipy import stats

    others = sampling.dataset_size - 1
    probability = float(stats.binom.sf(sampling.max_batch_size - 1, others, sampling.rate))
    return probability if probability > _NEGLIGIBLE_TRUNCATION else 0.0


@lru_cache(maxsize=8)
def _composed(runs: Runs, width: float) -> Any:
    """Compose all runs; the composition of a prefix is kept, for histories that only grow."""
    *earlier, (mechanism, count) = runs
    last = _run(mechanism, count, width)
    return _composed(tuple(earlier), width).compose(last) if earlier else last


def _run(mechanism: Mechanism, count: int, width: float) -> Any:
    """Return `count` repetitions of one mechanism."""
    step = _step(mechanism, width)
    blocks, rest = divmod(count, _LONGEST_RUN)
    if blocks == 0:
        return step.self_compose(count)
    run = step.self_compose(_LONGEST_RUN).self_compose(blocks)
    return run.compose(step.self_compose(rest)) if rest else run


def _gaussian(sigma: float, relation: Relation, width: float, rate: float = 1.0) -> Any:
    """Return a Poisson-sampled Gaussian; the library doubles the distance under replace-one."""
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=sigma,
        value_discretization_interval=width,
        log_mass_truncation_bound=_TAIL_LOG_MASS,
        sampling_prob=rate,
        neighboring_relation=neighbouring(relation),
    )


@lru_cache(maxsize=16)
def _step(mechanism: Mechanism, width: float) -> Any:
    """Return one release."""
    from dp_accounting.pld import privacy_loss_distribution

    sigma = mechanism.noise_multiplier
    match mechanism.sampling:
        case FixedSizeSampling():
            return _fixed_size(inclusion_rate(mechanism.sampling), sigma, width)
        case PoissonSampling(dataset_size=size, rate=rate, max_batch_size=limit):
            if _truncation(mechanism) == 0.0:
                return _gaussian(sigma, mechanism.relation, width, rate)
            # For zero-out (the library speaks of the other relations): indices are drawn alike from
            # both data sets, the empty record's included. Unless the other examples alone fill the
            # batch, theirs is a plain Poisson sample. If they do, let T be a uniform subset of
            # `limit` of them, which is independent of how many were drawn: with probability 1 - p
            # the batch is T, with p the example takes the place of a random member of T. The two
            # outputs are (1-p) N(0) + p N(u) and (1-p) N(0) + p N(v), |u| <= 2, |v| <= 1,
            # |u - v| <= 1 in units of D. By advanced joint convexity (see `_fixed_size`) they are
            # dominated by (1-p) N(0) + p N(2) and N(0); and those, since a threshold is the best
            # test of them, by the library's (1-p) N(0) + p N(2) and (1-p) N(0) + p N(-2).
            return privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(
                dataset_size=size,
                sampling_probability=rate,
                truncated_batch_size=limit,
                noise_multiplier=sigma,
                value_discretization_interval=width,
                log_mass_truncation_bound=_TAIL_LOG_MASS,
                neighboring_relation=neighbouring(mechanism.relation),
            )
    return _gaussian(sigma, mechanism.relation, width)


def _fixed_size(rate: float, sigma: float, width: float) -> Any:
    """Return one step on a uniformly random subset of fixed size, under replace-one.

    Write `A` for the output when the differing example is not drawn and `B`, `B'` when it is: the
    two outputs are `(1 - q) A + q B` and `(1 - q) A + q B'`. By symmetry `A` is also `B` with the
    example exchanged for another one, so `A`, `B` and `B'` are pairwise mixtures of Gaussians at a
    distance of at most 2 D. Advanced joint convexity (Balle, Barthe and Gaboardi 2018) then bounds
    their hockey-stick divergence, for every epsilon >= 0, by that of `(1 - q) N(0) + q N(2 D)` from
    `N(0)`; exchanging the two outputs gives epsilon < 0. The distribution is built from the larger
    of the two profiles at every grid point.
    """
    import numpy as np
    from dp_accounting.pld import (
        pld_pmf,
        privacy_loss_distribution,
        privacy_loss_mechanism,
    )

    adjacencies = privacy_loss_mechanism.AdjacencyType
    losses: Sequence[Any] = [
        privacy_loss_mechanism.GaussianPrivacyLoss(
            sigma / 2.0,
            log_mass_truncation_bound=_TAIL_LOG_MASS,
            sampling_prob=rate,
            adjacency_type=adjacency,
        )
        for adjacency in (adjacencies.REMOVE, adjacencies.ADD)
    ]
    highest = math.ceil(losses[0].connect_dots_bounds().epsilon_upper / width)
    grid = np.arange(-highest, highest + 1)
    profile = np.maximum(*(loss.get_delta_for_epsilon(grid * width) for loss in losses))
    return privacy_loss_distribution.PrivacyLossDistribution(
        pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(width, -highest, highest, profile)
    )


def neighbouring(relation: Relation) -> Any:
    """Return the library's name; its REPLACE_SPECIAL has the distributions of add/remove."""
    from dp_accounting import NeighboringRelation

    return {
        Relation.ZERO_OUT: NeighboringRelation.REPLACE_SPECIAL,
        Relation.ADD_REMOVE: NeighboringRelation.ADD_OR_REMOVE_ONE,
        Relation.REPLACE_ONE: NeighboringRelation.REPLACE_ONE,
    }[relation]
