"""Calibration: the noise for a target epsilon, and the steps that a target epsilon allows.

Every answer is checked with the accountant before it is returned: what is promised to fit, fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from clipless.accounting._epsilon import delta, epsilon
from clipless.accounting._history import Accountant, History
from clipless.accounting._mechanism import Mechanism, Relation, Sampling
from clipless.accounting._pld import inclusion_rate, mean_square_loss
from clipless.errors import BudgetExhaustedError

_TOLERANCE = 1e-4
_SIGNIFICANT_DIGITS = 5
_NOISE_MULTIPLIERS = (1e-3, 1e7)


def noise_multiplier_for(
    *,
    target_epsilon: float,
    target_delta: float,
    steps: int,
    sampling: Sampling,
    relation: Relation = Relation.ZERO_OUT,
    accountant: Accountant = "pld",
    history: History = (),
) -> float:
    """Return the smallest noise multiplier with which `steps` releases keep the budget.

    `history` is what the same budget has already paid for. The result is rounded up, by less than
    0.1%, never down: `history` and the new steps together are (target_epsilon, target_delta)-
    differentially private. Raises `BudgetExhaustedError` if no amount of noise is enough.

    Example:
        >>> from clipless.accounting._mechanism import PoissonSampling
        >>> sampling = PoissonSampling(dataset_size=60_000, rate=0.01)
        >>> sigma = noise_multiplier_for(
        ...     target_epsilon=3.0, target_delta=1e-5, steps=2000, sampling=sampling
        ... )
        >>> round(sigma, 2)
        0.93
    """
    _require_target(target_epsilon)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")

    @cache
    def excess(sigma: float) -> float:
        step = Mechanism(noise_multiplier=sigma, sampling=sampling, relation=relation)
        cost = epsilon((*history, (step, steps)), target_delta, accountant=accountant)
        return _excess(cost, target_epsilon)

    spent = epsilon(history, target_delta, accountant=accountant)
    if spent >= target_epsilon:
        raise _exhausted(spent, target_epsilon)
    guess = _guess_noise(target_epsilon, target_delta, steps, sampling, relation)
    return _least_noise(excess, guess, unreachable=_exhausted(spent, target_epsilon))


def noise_multiplier_for_accuracy(
    *,
    max_attack_accuracy: float,
    base_rate: float = 0.5,
    steps: int,
    sampling: Sampling,
    relation: Relation = Relation.ZERO_OUT,
    accountant: Accountant = "pld",
    history: History = (),
) -> float:
    """Return the smallest noise multiplier with which no membership attack is right more often.

    The attack knows everything but whether the record is there, which it is with probability
    `base_rate`; guessing blindly is right with probability `max(base_rate, 1 - base_rate)`, and
    `max_attack_accuracy` must lie above that. That is a limit of delta at epsilon
    `log((1 - r) / r)`, for the rarer of the two answers r: at 1/2, of delta at epsilon 0. The
    result is rounded up, by less than 0.1%, never down.

    Example:
        >>> from clipless.accounting import FullBatch
        >>> noise_multiplier_for_accuracy(
        ...     max_attack_accuracy=0.6, steps=4, sampling=FullBatch(dataset_size=1000))
        3.9472
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    target_epsilon, target_delta = _accuracy_as_delta(max_attack_accuracy, base_rate)

    @cache
    def excess(sigma: float) -> float:
        step = Mechanism(noise_multiplier=sigma, sampling=sampling, relation=relation)
        spent = delta((*history, (step, steps)), target_epsilon, accountant=accountant)
        return _excess(spent, target_delta)

    spent = delta(history, target_epsilon, accountant=accountant)
    unreachable = BudgetExhaustedError(
        f"what is already released leaves no room below an attack accuracy of "
        f"{max_attack_accuracy:.4g}: no amount of noise makes further steps fit. Raise the limit"
    )
    if spent >= target_delta:
        raise unreachable
    distance = 2.0 if relation is Relation.REPLACE_ONE else 1.0
    smallest, largest = _NOISE_MULTIPLIERS
    scale = target_delta * math.sqrt(2.0 * math.pi)
    guess = distance * inclusion_rate(sampling) * math.sqrt(steps) / scale
    return _least_noise(excess, min(max(guess, 100 * smallest), largest), unreachable=unreachable)


def _accuracy_as_delta(accuracy: float, base_rate: float) -> tuple[float, float]:
    """Return epsilon and the delta at it with which the best attack has such an accuracy.

    At a share r of members, at most 1/2, that is `1 - r + r delta(log((1 - r) / r))`.
    """
    rarer = min(base_rate, 1.0 - base_rate)
    if not 0.0 < rarer <= 0.5:
        raise ValueError(f"base_rate must lie strictly between 0 and 1, got {base_rate!r}")
    if not 1.0 - rarer < accuracy < 1.0:
        raise ValueError(
            f"max_attack_accuracy must lie between {1.0 - rarer:g}, which blind guessing reaches, "
            f"and 1, got {accuracy!r}"
        )
    return math.log((1.0 - rarer) / rarer), (accuracy - (1.0 - rarer)) / rarer


def _least_noise(
    excess: Callable[[float], float], guess: float, *, unreachable: BudgetExhaustedError
) -> float:
    """Return the smallest noise multiplier at which `excess` is not positive, rounded up."""
    over = under = guess
    smallest, largest = _NOISE_MULTIPLIERS
    factor = 1.1
    while excess(under) > 0:
        if under > largest:
            raise unreachable
        over, under, factor = under, under * factor, factor**2
    while excess(over) <= 0:
        if over < smallest:
            return _round_up(over)
        over, under, factor = over / factor, over, factor**2
    sigma = _round_up(_crossing(excess, over, under, _TOLERANCE / 2))
    while excess(sigma) > 0:
        # The root was on the other side, or the accountant's grid changes between two noise levels.
        sigma = _round_up(sigma * (1.0 + _TOLERANCE))
    return sigma


def steps_for(
    *,
    target_epsilon: float,
    target_delta: float,
    mechanism: Mechanism,
    history: History = (),
    accountant: Accountant = "pld",
    max_steps: int = 10_000_000,
) -> int:
    """Return how many more releases of `mechanism` keep the budget, never one too many.

    `history` is what the same budget has already paid for; if it has used up the budget, the
    answer is 0. Answers beyond `max_steps` are returned as `max_steps`.
    """
    _require_target(target_epsilon)
    if max_steps < 1:
        raise ValueError(f"max_steps must be at least 1, got {max_steps}")

    @cache
    def excess(steps: int) -> float:
        cost = epsilon((*history, (mechanism, steps)), target_delta, accountant=accountant)
        return _excess(cost, target_epsilon)

    if excess(1) > 0:
        return 0
    under, over = 1, _guess_steps(target_epsilon, target_delta, mechanism, max_steps)
    while excess(over) <= 0:
        if over == max_steps:
            return max_steps
        under, over = over, min(max_steps, 2 * over)
    steps = round(_crossing(lambda count: excess(round(count)), over, under, 0.5 / over))
    while excess(steps) > 0:
        steps -= 1
    while excess(steps + 1) <= 0:
        steps += 1
    return steps


def _crossing(
    excess: Callable[[float], float], over: float, under: float, tolerance: float
) -> float:
    """Return about where `excess` changes its sign: within a relative `tolerance`, either side.

    It is positive at `over` and not at `under`.
    """
    from scipy.optimize import brentq  # as much to import as all of this library

    def between(share: float) -> float:
        # The ends as they were given: rounding could move them to the other side of the crossing.
        return under if share == 1.0 else over * (under / over) ** share

    width = abs(math.log(under / over))
    found = brentq(lambda share: excess(between(share)), 0.0, 1.0, xtol=tolerance / width)
    return between(found)


def _excess(cost: float, target: float) -> float:
    """Return the logarithm of cost over target, limited: positive if and only if over budget."""
    if cost > target:
        return max(min(math.log(cost / target), 3.0), 1e-12)
    return max(math.log(cost / target), -3.0) if cost > 0 else -3.0


def _guess_noise(
    epsilon: float, delta: float, steps: int, sampling: Sampling, relation: Relation
) -> float:
    """Solve for the noise as if the composition were Gaussian: the right order of magnitude."""
    scale = epsilon / (_gaussian_scale(delta) * math.sqrt(steps) * inclusion_rate(sampling))
    distance = 2.0 if relation is Relation.REPLACE_ONE else 1.0
    smallest, largest = _NOISE_MULTIPLIERS
    return min(max(distance / math.sqrt(math.log1p(scale**2)), 100 * smallest), largest)


def _guess_steps(epsilon: float, delta: float, mechanism: Mechanism, max_steps: int) -> int:
    """Solve for the steps as if the composition were Gaussian, and a little above."""
    square = (epsilon / _gaussian_scale(delta)) ** 2 / mean_square_loss(mechanism)
    return max(1, math.ceil(min(1.1 * square + 1.0, max_steps)))


def _gaussian_scale(delta: float) -> float:
    return math.sqrt(2.0 * math.log(1.0 / delta))


def _round_up(value: float) -> float:
    """Round up to five significant digits, so that the number can be printed and typed in."""
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - _SIGNIFICANT_DIGITS)
    digits = math.ceil(value / unit)
    rounded = float(f"{digits * unit:.{_SIGNIFICANT_DIGITS}g}")
    return rounded if rounded >= value else float(f"{(digits + 1) * unit:.{_SIGNIFICANT_DIGITS}g}")


def _require_target(target_epsilon: float) -> None:
    if not (target_epsilon > 0 and math.isfinite(target_epsilon)):
        raise ValueError(f"target_epsilon must be positive and finite, got {target_epsilon!r}")


def _exhausted(spent: float, target: float) -> BudgetExhaustedError:
    return BudgetExhaustedError(
        f"epsilon={spent:.4g} of {target:.4g} is already spent and no amount of noise makes "
        "further steps fit; raise the target, or start from a smaller history"
    )
