"""Which step is under way, and which ones are paid for."""

from __future__ import annotations

from typing import Any

from clipless.errors import BudgetExhaustedError
from clipless.privacy._batches import StepSample
from clipless.privacy._budget import BudgetMeter
from clipless.privacy._ledger import Ledger
from clipless.privacy._mechanism import Mechanism
from clipless.privacy._step import StepProgress, warn_of_skipped


class StepBook:
    """Counts the steps of a session: each is in the ledger before anything of it is released.

    `last_step` is the number of the last one that was paid for, `progress` the one under way.
    """

    def __init__(self, ledger: Ledger, meter: BudgetMeter | None, *, last_step: int) -> None:
        self._ledger, self._meter = ledger, meter
        self.last_step = last_step
        self.progress: StepProgress | None = None

    def begin(self, sample: StepSample, structure: tuple[Any, ...], mechanism: Mechanism) -> None:
        """Begin the step of a sample, if the budget allows; steps left out are paid for."""
        self.count_skipped(sample.step - self.last_step - 1, mechanism)
        self.require_budget(mechanism)
        self.progress = StepProgress(sample.step, sample.micro_batches, structure)

    def count_skipped(self, count: int, mechanism: Mechanism) -> None:
        """Steps that were drawn and never taken cost what they would have cost."""
        if count <= 0:
            return
        warn_of_skipped(count)
        for _ in range(count):
            allowed = self.require_budget(mechanism)
            self._ledger.spend(mechanism, label="skipped step", limit=allowed)
            self.last_step += 1

    def require_budget(self, mechanism: Mechanism) -> int | None:
        """Return how many releases the ledger may hold, or refuse one more of them."""
        if self._meter is None:
            return None
        try:
            return self._meter.require(mechanism)
        except BudgetExhaustedError:
            self.progress = None
            raise

    def pay(self, progress: StepProgress, mechanism: Mechanism) -> None:
        """Write the step down: from here on it is spent, whatever happens."""
        allowed = self.require_budget(mechanism)
        self._ledger.spend(mechanism, limit=allowed)
        self.last_step = progress.step
