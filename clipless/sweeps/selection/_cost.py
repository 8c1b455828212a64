"""Epsilon of selecting the best of several private runs.

A run that was chosen because it came out best says more about the data than a run that was the
only one. Three answers, each an upper bound where it is a number:

- *Composition*: all runs together, as if all were published; grows with the number of runs. Where
  scores decided on the settings of later runs, or on when they ended, what the runs came to spend
  is not the bound: each counts as the most that was declared for any of them (`most_epsilon`).
- *Random repetitions* (Papernot and Steinke 2022): independent runs of one mechanism, their number
  drawn secretly from a known distribution, only the best one shown. Then with `d(a)` the Rényi
  divergence of one run at order a,
  truncated negative binomial: `d'(a) = d(a) + log(mean)/(a-1) + (1+eta) min_b [(1-1/b) d(b) +
  log(1/gamma)/b]`; Poisson: `d'(a) = d(a) + mean delta(log(a/(a-1))) + log(mean)/(a-1)`. These are
  the formulas of `dp_accounting.RepeatAndSelectDpEvent`, here for the worst of several runs.
- *Nothing*, where the training data are public.

That the test data are public makes scores free to compute. It does not make selecting free: scores
are those of models that were trained on private data.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from clipless.accounting import (
    SAMPLER_EPSILON,
    Accountant,
    History,
    merge_releases,
    prepare_history,
    rdp,
    require_supported_sampling,
)
from clipless.errors import PrivacyError
from clipless.privacy import epsilon
from clipless.sweeps.selection._repetitions import Repetitions

_MOST_FOR_PLD = 12
"""Composing more distinct mechanisms takes minutes with distributions, and seconds with orders."""


@dataclass(frozen=True, kw_only=True)
class SelectionCost:
    """The cost of a selection, as far as it is known.

    `epsilon` is that of the selected run with the selection, None if it is not covered;
    `composition` that of all runs together, None if the cost of one of them is not known.
    """

    statement: str
    """Begins with `covered`, `not covered` or `free`."""
    epsilon: float | None
    composition: float | None
    composition_statement: str
    delta: float | None

    @property
    def covered(self) -> bool:
        """Whether the selected run has a guarantee that includes the selection."""
        return not self.statement.startswith("not covered")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "covered": self.covered}


def selection_epsilon(
    histories: Sequence[History], *, delta: float, repetitions: Repetitions
) -> float:
    """Return the epsilon of the best of a random number of independent runs.

    Args:
        histories: what one run may release, for every kind of run that may be drawn: not only
            those that were. The worst one counts at each order.
        repetitions: the distribution that the number of runs was drawn from.

    Raises:
        PrivacyError: the accountant for Rényi divergences has no bound for the sampling.

    Example:
        >>> from clipless.privacy import Mechanism, PoissonSampling
        >>> sampling = PoissonSampling(dataset_size=60_000, rate=0.01)
        >>> run = [(Mechanism(noise_multiplier=1.0, sampling=sampling), 1000)]
        >>> one = epsilon(run, 1e-5, accountant="rdp")
        >>> best = selection_epsilon([run], delta=1e-5, repetitions=Repetitions(mean=10.0))
        >>> round(one, 2), round(best, 2)
        (2.1, 4.1)
    """
    from dp_accounting.rdp import rdp_privacy_accountant as library

    orders, worst = _worst(histories, delta)
    if orders is None:
        return math.inf
    selected = _repeated(orders, worst, repetitions)
    return float(library.compute_epsilon(orders, selected, delta)[0]) + SAMPLER_EPSILON


def most_epsilon(histories: Sequence[History], *, runs: int, delta: float) -> float:
    """Return the epsilon of `runs` runs, each one of several kinds, chosen by looking at others.

    At every Rényi order a run costs at most what the worst kind costs there, whichever is chosen
    and however early it ends. So does a sum of them, whoever chooses. One kind alone is a schedule
    that is fixed beforehand, for which distributions are tighter.
    """
    from dp_accounting.rdp import rdp_privacy_accountant as library

    if len(histories) == 1:
        return composition_epsilon([*histories] * runs, delta=delta)
    orders, worst = _worst(histories, delta)
    if orders is None:
        return math.inf
    return float(library.compute_epsilon(orders, runs * worst, delta)[0]) + SAMPLER_EPSILON


def _worst(histories: Sequence[History], delta: float) -> tuple[Any, Any]:
    """Return the orders and the largest divergence of any history at each; None without noise."""
    if not histories:
        raise ValueError("give the history of at least one kind of run")
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must lie strictly between 0 and 1, got {delta!r}")
    import numpy as np

    orders, worst = None, None
    for history in histories:
        runs = merge_releases(history)
        require_supported_sampling(runs, "rdp")
        if any(mechanism.noise_multiplier == 0 for mechanism, _ in runs):
            return None, None
        orders, found = rdp.divergences(prepare_history(runs))
        if orders is None:
            raise ValueError("a history is empty: a run releases something")
        worst = found if worst is None else np.maximum(worst, found)
    return orders, worst


def _repeated(orders: Any, divergences: Any, repetitions: Repetitions) -> Any:
    """Return the divergences of the best of a random number of runs."""
    import numpy as np
    from dp_accounting.rdp import rdp_privacy_accountant as library

    orders = np.asarray(orders, dtype=np.float64)
    mean = repetitions.mean
    if repetitions.distribution == "poisson":
        levels = np.log1p(1.0 / (orders - 1.0))
        deltas = [library.compute_delta(orders, divergences, level)[0] for level in levels]
        result = divergences + mean * np.asarray(deltas) + math.log(mean) / (orders - 1.0)
    else:
        gamma = repetitions.gamma
        constant = (1.0 + repetitions.eta) * np.min(
            (1.0 - 1.0 / orders) * divergences - math.log(gamma) / orders
        )
        result = divergences + math.log(mean) / (orders - 1.0) + constant
    # Divergences grow with the order, so what holds at a higher one holds here.
    ranks = np.argsort(orders)
    result[ranks] = np.minimum.accumulate(result[ranks][::-1])[::-1]
    return result


def composition_epsilon(histories: Sequence[History], *, delta: float) -> float:
    """Return the epsilon of runs whose settings and lengths did not depend on each other's results.

    By privacy loss distributions for a few distinct mechanisms, by Rényi divergences for many
    (where those have a bound for the sampling).
    """
    together = [release for history in histories for release in history]
    runs = merge_releases(together)
    accountant: Accountant = "pld"
    if len(runs) > _MOST_FOR_PLD:
        # Where orders have no bound for the sampling, distributions take long, but they answer.
        with contextlib.suppress(PrivacyError):
            require_supported_sampling(runs, "rdp")
            accountant = "rdp"
    return epsilon(together, delta, accountant=accountant)
