"""What a history of releases costs: epsilon, delta and their curves.

A history is a sequence of pairs `(Mechanism, count)`. Every number returned is an upper bound: the
releases together satisfy (epsilon, delta)-differential privacy under the relation of their
mechanisms, and adaptive choices between releases are covered.

Two accountants: "pld" (privacy loss distributions, tight, the default) and "rdp" (Rényi). Which of
them can account for what:

| sampling | add/remove | replace-one |
|---|---|---|
| full batch | pld, rdp | pld, rdp |
| Poisson | pld, rdp | pld |
| Poisson cut at a maximum size | pld | pld |
| fixed size without replacement | refused | pld, rdp |

`dp_accounting` takes seconds to import and is loaded by the first question, not by this module.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import lru_cache

from clipless.errors import PrivacyError
from clipless.privacy import _pld, _rdp
from clipless.privacy._history import (
    Accountant,
    History,
    Runs,
    merge,
    prepare,
    require_support,
    variants,
)
from clipless.privacy._mechanism import Mechanism


def epsilon(history: History, delta: float, *, accountant: Accountant = "pld") -> float:
    """Return an epsilon such that `history` is (epsilon, delta)-differentially private.

    An empty history costs 0; a release without noise costs infinity. Asking again is instant.

    Example:
        >>> from clipless.privacy._mechanism import PoissonSampling
        >>> sampling = PoissonSampling(dataset_size=60_000, rate=0.01)
        >>> step = Mechanism(noise_multiplier=1.0, sampling=sampling)
        >>> round(epsilon([(step, 1000)], 1e-5), 2)
        1.83
    """
    _require_delta(delta)
    return _epsilon(merge(history), float(delta), _require_accountant(accountant))


def delta(history: History, epsilon: float, *, accountant: Accountant = "pld") -> float:
    """Return a delta such that `history` is (epsilon, delta)-differentially private."""
    if not epsilon >= 0:
        raise ValueError(f"epsilon must be at least 0, got {epsilon!r}")
    if math.isinf(epsilon):
        return 0.0
    return _delta(merge(history), float(epsilon), _require_accountant(accountant))


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


def delta_curve(
    *,
    mechanism: Mechanism,
    steps: Sequence[int],
    epsilon: float,
    history: History = (),
    accountant: Accountant = "pld",
) -> tuple[float, ...]:
    """Return delta after each number of `steps` of `mechanism`, on top of `history`."""
    return tuple(
        delta((*history, (mechanism, count)), epsilon, accountant=accountant) for count in steps
    )


def privacy_profile(
    history: History, *, deltas: Sequence[float], accountant: Accountant = "pld"
) -> tuple[float, ...]:
    """Return the epsilon of `history` at each of several deltas."""
    return tuple(epsilon(history, each, accountant=accountant) for each in deltas)


def default_delta(dataset_size: int) -> float:
    """Return the largest power of ten below `1 / dataset_size`, and at most 1e-4.

    A delta of 1/N would permit to publish one example at random, so delta has to be smaller. The
    rule gives the values in common use: 1e-5 for 60,000 examples, 1e-6 for 162,079.
    """
    size = operator.index(dataset_size)
    if size < 1:
        raise ValueError(f"dataset_size must be at least 1, got {dataset_size}")
    return float(f"1e-{max(4, len(str(size)))}")


@lru_cache(maxsize=4096)
def _epsilon(runs: Runs, delta: float, accountant: Accountant) -> float:
    if not runs:
        return 0.0
    require_support(runs, accountant)
    if any(mechanism.noise_multiplier == 0 for mechanism, _ in runs):
        return math.inf
    method = _pld.epsilon if accountant == "pld" else _rdp.epsilon
    try:
        result = max(method(variant, delta) for variant in variants(prepare(runs)))
    except (ArithmeticError, ValueError, MemoryError) as error:
        raise _failure(runs, accountant) from error
    if math.isnan(result):
        raise PrivacyError(
            f"delta={delta} is too small for the arithmetic of the {accountant!r} accountant; "
            "use a larger delta, or accountant='rdp', which has no smallest one"
        )
    return max(result, 0.0)


@lru_cache(maxsize=4096)
def _delta(runs: Runs, epsilon: float, accountant: Accountant) -> float:
    if not runs:
        return 0.0
    require_support(runs, accountant)
    if any(mechanism.noise_multiplier == 0 for mechanism, _ in runs):
        return 1.0
    method = _pld.delta if accountant == "pld" else _rdp.delta
    try:
        result = max(method(variant, epsilon) for variant in variants(prepare(runs)))
    except (ArithmeticError, ValueError, MemoryError) as error:
        raise _failure(runs, accountant) from error
    if math.isnan(result):
        raise _failure(runs, accountant)
    return min(max(result, 0.0), 1.0)


def _require_delta(delta: float) -> None:
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must lie strictly between 0 and 1, got {delta!r}")


def _require_accountant(accountant: Accountant) -> Accountant:
    if accountant not in ("pld", "rdp"):
        raise ValueError(f"accountant must be 'pld' or 'rdp', got {accountant!r}")
    return accountant


def _failure(runs: Runs, accountant: Accountant) -> PrivacyError:
    return PrivacyError(
        f"the {accountant!r} accountant could not be evaluated numerically for {runs}; "
        "no epsilon can be stated. Try the other accountant, or report this history"
    )
