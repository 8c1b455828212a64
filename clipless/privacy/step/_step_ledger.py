"""Which step is under way, and which ones are paid for."""

from __future__ import annotations

from clipless.accounting import Mechanism
from clipless.errors import BudgetExhaustedError
from clipless.ledger import BudgetMeter, Ledger
from clipless.privacy._plan import Plan
from clipless.privacy.sampling._batches import StepSample
from clipless.privacy.step._progress import StepProgress, warn_of_skipped


class StepBook:
    """Counts the steps of a session: each is in the ledger before anything of it is released.

    `last_step` is the number of the last one that was paid for, `progress` the one under way,
    `run` the name under which the ledger has them.
    """

    def __init__(self, ledger: Ledger, meter: BudgetMeter | None, *, last_step: int) -> None:
        self._ledger, self._meter = ledger, meter
        self.last_step = last_step
        self.run = ""
        self.progress: StepProgress | None = None

    def begin(self, sample: StepSample, plan: Plan, *, repeats: bool = False) -> None:
        """Begin the step of a sample, if the budget allows; steps left out are paid for.

        One that `repeats` a release was paid for.
        """
        self.count_skipped(sample.step - self.last_step - 1, plan.mechanism)
        if not repeats:
            self.require_budget(plan.mechanism)
        self.progress = StepProgress(sample.step, sample.micro_batches, plan)

    def count_skipped(self, count: int, mechanism: Mechanism) -> None:
        """Steps that were drawn and never taken cost what they would have cost."""
        if count <= 0:
            return
        warn_of_skipped(count)
        for _ in range(count):
            self.pay(self.last_step + 1, mechanism, label="skipped step")

    def require_budget(self, mechanism: Mechanism) -> int | None:
        """Return how many releases the ledger may hold, or refuse one more of them."""
        if self._meter is None:
            return None
        try:
            return self._meter.require(mechanism)
        except BudgetExhaustedError:
            self.progress = None
            raise

    def pay(self, step: int, mechanism: Mechanism, *, label: str = "training step") -> None:
        """Write the step down: from here on it is spent, whatever happens."""
        with self._ledger.held_by(self.run):
            allowed = self.require_budget(mechanism)
            self._ledger.spend(mechanism, label=label, limit=allowed)
        self.last_step = step

    def repeat(self, step: int, mechanism: Mechanism) -> None:
        """Come one step further, which was paid for when it was taken first."""
        with self._ledger.held_by(self.run):
            self._ledger.repeat(mechanism)
        self.last_step = step

    def released(self, step: int, digest: str) -> None:
        """Write down what a step has released, by its digest."""
        with self._ledger.held_by(self.run):
            self._ledger.release(step, digest)
