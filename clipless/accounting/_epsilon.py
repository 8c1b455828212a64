"""Epsilon and delta of a history of releases, and their curves.

A history is a sequence of pairs `(Mechanism, count)`. Every number returned is an upper bound: the
releases together satisfy (epsilon, delta)-differential privacy under the relation of their
mechanisms, and adaptive choices between releases are covered.

Two accountants: "pld" (privacy loss distributions, tight, the default) and "rdp" (Rényi). Which of
them can account for what:

| sampling | zero-out | replace-one | add/remove (old ledgers) |
|---|---|---|---|
| full batch; a pass in a fixed order | pld, rdp | pld, rdp | pld, rdp |
| Poisson | pld, rdp | pld | pld, rdp |
| Poisson cut at a maximum size | pld, rdp | pld | pld |
| fixed size without replacement | refused | pld, rdp | refused |

`dp_accounting` takes seconds to import and is loaded by the first question, not by this module.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Sequence
from functools import lru_cache

from clipless.accounting import _pld, rdp
from clipless.accounting._filter import RenyiFilter, filter_of_name
from clipless.accounting._history import (
    Accountant,
    History,
    Runs,
    merge_releases,
    prepare_history,
    require_supported_sampling,
    variants,
    without_failures,
)
from clipless.accounting._mechanism import SAMPLER_EPSILON, Mechanism
from clipless.errors import PrivacyError


def epsilon(history: History, delta: float, *, accountant: Accountant = "pld") -> float:
    """Return an epsilon such that `history` is (epsilon, delta)-differentially private.

    An empty history costs 0; a release without noise costs infinity. Asking again is instant. What
    the sampler of the noise lacks of a Gaussian is part of the result.

    Example:
        >>> from clipless.accounting._mechanism import PoissonSampling
        >>> sampling = PoissonSampling(dataset_size=60_000, rate=0.01)
        >>> step = Mechanism(noise_multiplier=1.0, sampling=sampling)
        >>> round(epsilon([(step, 1000)], 1e-5), 2)
        1.83
    """
    _require_delta(delta)
    runs, failure = without_failures(merge_releases(history))
    if failure >= delta:
        return math.inf
    return _epsilon(runs, float(delta) - failure, _require_accountant(accountant))


def delta(history: History, epsilon: float, *, accountant: Accountant = "pld") -> float:
    """Return a delta such that `history` is (epsilon, delta)-differentially private."""
    if not epsilon >= 0:
        raise ValueError(f"epsilon must be at least 0, got {epsilon!r}")
    runs, failure = without_failures(merge_releases(history))
    if math.isinf(epsilon):
        return min(failure, 1.0)
    return min(_delta(runs, float(epsilon), _require_accountant(accountant)) + failure, 1.0)


def epsilon_curve(
    *,
    mechanism: Mechanism,
    steps: Sequence[int],
    delta: float,
    history: History = (),
    accountant: Accountant = "pld",
) -> tuple[float, ...]:
    """Return epsilon after each number of `steps` of `mechanism`, on top of `history`."""
    return tuple(
        epsilon((*history, (mechanism, count)), delta, accountant=accountant) for count in steps
    )


def default_delta(dataset_size: int) -> float:
    """Return `0.1 / dataset_size`, rounded down to one digit, and at most 1e-4.

    A delta of 1/N would permit to publish one example at random, so delta has to be well below it.

    Example:
        >>> default_delta(60_000), default_delta(1_347), default_delta(100)
        (1e-06, 7e-05, 0.0001)
    """
    size = operator.index(dataset_size)
    if size < 1:
        raise ValueError(f"dataset_size must be at least 1, got {dataset_size}")
    # In whole numbers: the largest d 10^-k that is at most 1 / (10 N).
    power = len(str(10 * size))
    digit = 10**power // (10 * size)
    return min(1e-4, float(f"{digit}e-{power}") if digit < 10 else float(f"1e-{power - 1}"))


class LargeDelta(float):
    """A delta above 0.1/N, and the explicit word that it is meant: `delta=LargeDelta(5e-5)`.

    Example:
        >>> chosen_delta(5e-5, 10_000)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        clipless.errors.PrivacyError: delta=5e-05 is above 0.1/N for 10000 examples: ...
    """


def chosen_delta(delta: float | None, dataset_size: int) -> float:
    """Return the delta of a run: the given one, checked, or `default_delta`.

    Raises:
        PrivacyError: delta is 1/N or more; or above 0.1/N, and not called a `LargeDelta`, for which
            there is a warning.
    """
    if delta is None:
        return default_delta(dataset_size)
    _require_delta(delta)
    if delta >= 1.0 / dataset_size:
        raise PrivacyError(
            f"delta={delta:g} is at least 1/N for {dataset_size} examples: that would permit "
            f"publishing a randomly chosen one. Use at most {default_delta(dataset_size):g}"
        )
    if delta > 0.1 / dataset_size * (1 + 1e-9):
        words = (
            f"delta={delta:g} is above 0.1/N for {dataset_size} examples: a mechanism that "
            f"publishes one example with probability {delta * dataset_size:.0%} would pass. "
            f"{default_delta(dataset_size):g} is the default"
        )
        if not isinstance(delta, LargeDelta):
            raise PrivacyError(
                f"{words}. If you mean it, say so: delta=LargeDelta({delta:g}), of "
                "clipless.privacy, or --large-delta"
            )
        warnings.warn(words, stacklevel=2)
        return delta
    return float(delta)


@lru_cache(maxsize=4096)
def _epsilon(runs: Runs, delta: float, accountant: Accountant) -> float:
    if not runs:
        return 0.0
    require_supported_sampling(runs, accountant)
    if any(mechanism.noise_multiplier == 0 for mechanism, _ in runs):
        return math.inf
    if (declared := filter_of_name(accountant)) is not None:
        return _stated_epsilon(declared, runs, delta)
    order = _fixed_order(accountant)
    try:
        result = max(
            _pld.epsilon(variant, delta)
            if accountant == "pld"
            else rdp.epsilon(variant, delta, order)
            for variant in variants(prepare_history(runs))
        )
    except (ArithmeticError, ValueError, MemoryError) as error:
        raise _failure(runs, accountant) from error
    if math.isnan(result):
        raise PrivacyError(
            f"delta={delta} is too small for the arithmetic of the {accountant!r} accountant; "
            "use a larger delta, or accountant='rdp', which has no smallest one"
        )
    return max(result, 0.0) + SAMPLER_EPSILON


@lru_cache(maxsize=4096)
def _delta(runs: Runs, epsilon: float, accountant: Accountant) -> float:
    if not runs:
        return 0.0
    require_supported_sampling(runs, accountant)
    if any(mechanism.noise_multiplier == 0 for mechanism, _ in runs):
        return 1.0
    if (declared := filter_of_name(accountant)) is not None:
        within = declared.fits(declared.spent(runs))
        ideal = max(epsilon - SAMPLER_EPSILON, 0.0)
        return rdp.delta_at(declared.order, declared.limit, ideal) if within else 1.0
    order, epsilon = _fixed_order(accountant), max(epsilon - SAMPLER_EPSILON, 0.0)
    try:
        result = max(
            _pld.delta(variant, epsilon)
            if accountant == "pld"
            else rdp.delta(variant, epsilon, order)
            for variant in variants(prepare_history(runs))
        )
    except (ArithmeticError, ValueError, MemoryError) as error:
        raise _failure(runs, accountant) from error
    if math.isnan(result):
        raise _failure(runs, accountant)
    return min(max(result, 0.0), 1.0)


def _require_delta(delta: float) -> None:
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must lie strictly between 0 and 1, got {delta!r}")


def _stated_epsilon(declared: RenyiFilter, runs: Runs, delta: float) -> float:
    """Return what a filter promises: the whole of its limit, however little of it was used."""
    if not declared.fits(declared.spent(runs)):
        return math.inf
    if delta == declared.delta:
        return declared.epsilon
    return max(declared.limit + rdp.conversion(declared.order, delta), 0.0) + SAMPLER_EPSILON


def _fixed_order(accountant: Accountant) -> float | None:
    return float(accountant.removeprefix("rdp@")) if accountant.startswith("rdp@") else None


def _require_accountant(accountant: Accountant) -> Accountant:
    if accountant == "filter":
        raise ValueError(
            "accountant 'filter' belongs to a ledger that declares it: PrivacyEngine("
            "accountant='filter'), or Ledger(filter=RenyiFilter(...))"
        )
    if not (accountant in ("pld", "rdp") or accountant.startswith(("rdp@", "filter("))):
        raise ValueError(f"accountant must be 'pld' or 'rdp', got {accountant!r}")
    return accountant


def _failure(runs: Runs, accountant: Accountant) -> PrivacyError:
    return PrivacyError(
        f"the {accountant!r} accountant could not be evaluated numerically for {runs}; "
        "no epsilon can be stated. Try the other accountant, or report this history"
    )
