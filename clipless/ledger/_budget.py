"""Privacy budgets (epsilon, delta), and whether the next step still fits into one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from clipless.accounting import (
    Accountant,
    History,
    Mechanism,
    Sampling,
    chosen_delta,
    epsilon,
    meter_accountant,
    noise_multiplier_for,
    steps_for,
)
from clipless.errors import BudgetExhaustedError, PrivacyError
from clipless.ledger._ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The most that all releases together may cost: (epsilon, delta), by the named accountant."""

    epsilon: float
    delta: float
    accountant: Accountant = "pld"

    def __post_init__(self) -> None:
        """Refuse a budget that means nothing."""
        if not (self.epsilon > 0 and math.isfinite(self.epsilon)):
            raise ValueError(f"epsilon must be positive and finite, got {self.epsilon!r}")
        if not 0.0 < self.delta < 1.0:
            raise ValueError(f"delta must lie strictly between 0 and 1, got {self.delta!r}")

    @classmethod
    def for_ledger(
        cls,
        ledger: Ledger,
        *,
        epsilon: float,
        delta: float | None = None,
        accountant: Accountant = "pld",
    ) -> Budget:
        """Return a budget for everything in a ledger: by its filter, if it has declared one.

        Without `delta`, that of the filter, or `default_delta`.
        """
        return cls(
            epsilon=epsilon,
            delta=delta_of(ledger, epsilon=epsilon, delta=delta),
            accountant=accountant_of(ledger, accountant),
        )

    def spent(self, history: History) -> float:
        """Return the epsilon of `history` at the budget's delta; of a filter, the part used."""
        return epsilon(history, self.delta, accountant=meter_accountant(self.accountant))

    def allows(self, history: History) -> bool:
        """Return whether `history` keeps the budget."""
        return self.spent(history) <= self.epsilon

    def remaining_steps(self, history: History, *, mechanism: Mechanism) -> int:
        """Return how many releases of `mechanism` still fit on top of `history`."""
        return steps_for(
            target_epsilon=self.epsilon,
            target_delta=self.delta,
            mechanism=mechanism,
            history=history,
            accountant=meter_accountant(self.accountant),
        )

    def require_all(self, ledger: Ledger, releases: History) -> None:
        """Refuse releases that do not all fit on top of the ledger, before any of them is made.

        For whatever takes several releases (statistics, then training): give all of them, and
        nothing is spent if the last one would not have fitted. A query that is asked or not
        depending on an earlier result belongs among them, and is recorded in either case
        (`Ledger.record`): that is paying the declared maximum.
        """
        together = (*ledger.history(), *releases)
        declared = ledger.filter
        fits = declared is None or declared.fits(declared.spent(together))
        if not (fits and self.allows(together)):
            raise BudgetExhaustedError(
                f"{sum(count for _, count in releases)} planned releases do not fit into "
                f"epsilon={self.epsilon:g} at delta={self.delta:g}, of which "
                f"{self.spent(ledger.history()):.4g} is spent. Nothing was released: agree on a "
                "larger budget, or plan fewer releases with more noise"
            )

    def noise_multiplier(
        self, ledger: Ledger, *, steps: int, sampling: Sampling, before: History = ()
    ) -> float:
        """Return the least noise with which `steps` fit after the releases `before` them.

        Raises `BudgetExhaustedError`, before any of them is made, if no amount of noise is enough.
        """
        return noise_multiplier_for(
            target_epsilon=self.epsilon, target_delta=self.delta, steps=steps, sampling=sampling,
            relation=ledger.relation, accountant=meter_accountant(self.accountant),
            history=(*ledger.history(), *before),
        )  # fmt: skip


class BudgetMeter:
    """Checks before every step that it fits the budget, with few calls of the accountant.

    Guarantee: as long as every release of `ledger` is preceded by a `require` that returned, what
    the ledger counts keeps `budget`. The accountant is asked about 1, 2, 4, ... steps ahead, and
    exactly once that is too much, so that a training of n steps asks about log2(n) times.
    """

    def __init__(self, *, budget: Budget, ledger: Ledger) -> None:
        self.budget = budget
        self._ledger = ledger
        self._mechanism: Mechanism | None = None
        self._history: History = ()
        self._elsewhere = 0
        self._start = 0
        self._known = 0

    def require(self, mechanism: Mechanism) -> int:
        """Return how many releases of `mechanism` are known to fit now, which is at least one.

        The number is a good `limit` for `Ledger.spend`. Raises `BudgetExhaustedError` if not even
        one release fits.
        """
        count = self._ledger.count(mechanism)
        elsewhere = self._ledger.releases - count
        if mechanism != self._mechanism or elsewhere != self._elsewhere:
            self._mechanism, self._elsewhere, self._start = mechanism, elsewhere, count
            self._history, self._known = self._ledger.history(), 0
        used = count - self._start
        if used >= self._known:
            self._look_ahead(mechanism, used + max(1, used))
        if used >= self._known:
            spent = self.budget.spent(self._ledger.history())
            raise BudgetExhaustedError(
                f"the next release would exceed epsilon={self.budget.epsilon:g} at "
                f"delta={self.budget.delta:g}; {spent:.4g} is spent. Stop here, or agree on a "
                "larger budget"
            )
        return self._known - used

    def _look_ahead(self, mechanism: Mechanism, steps: int) -> None:
        if self.budget.allows((*self._history, (mechanism, steps))):
            self._known = steps
        else:
            self._known = self.budget.remaining_steps(self._history, mechanism=mechanism)


def accountant_of(ledger: Ledger, asked: Accountant) -> Accountant:
    """Return the accountant of a ledger: the filter that it declares, or the one asked for."""
    if ledger.filter is not None:
        return str(ledger.filter)
    if asked == "filter":
        raise PrivacyError(
            "the ledger was begun without a filter, and one must be declared before the first "
            "release: begin a new ledger with accountant='filter', or with "
            "Ledger(..., filter=RenyiFilter(...))"
        )
    return asked


def delta_of(ledger: Ledger, *, epsilon: float | None, delta: float | None) -> float:
    """Return the delta of what is planned; where a filter is declared, that of the filter.

    Who asks for another delta, or for more epsilon, than the filter has declared is refused.
    """
    declared = ledger.filter
    if declared is None:
        return chosen_delta(delta, ledger.dataset_size)
    if (epsilon or 0.0) > declared.epsilon or delta not in (None, declared.delta):
        raise PrivacyError(
            f"the ledger has declared {declared}: epsilon={epsilon} at delta={delta} is another "
            "budget. Leave delta out, and ask for no more epsilon"
        )
    return declared.delta
