"""An agreed (epsilon, delta), and whether the next step still fits into it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from clipless.errors import BudgetExhaustedError
from clipless.privacy._accounting import epsilon
from clipless.privacy._calibration import steps_for
from clipless.privacy._history import Accountant, History
from clipless.privacy._ledger import Ledger
from clipless.privacy._mechanism import Mechanism


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

    def spent(self, history: History) -> float:
        """Return the epsilon of `history` at the budget's delta."""
        return epsilon(history, self.delta, accountant=self.accountant)

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
            accountant=self.accountant,
        )


class BudgetMeter:
    """Says before every step whether it fits, and asks the accountant only now and then.

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
        one release fits. Steps that a resumed run repeats are in the ledger already, and fitted.
        """
        if prepaid := self._ledger.prepaid(mechanism):
            return prepaid
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
