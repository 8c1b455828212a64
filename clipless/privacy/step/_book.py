"""What is paid for and released: in the ledger first, then with noise, and never twice.

Every release leaves a digest in the ledger, under the name of the run: a name stands for one stream
of samples and noise. A resumed run repeats the steps that the ledger has digests of, with the same
samples and noise, and compares before anything is handed out. What comes out the same, bit for bit,
tells nobody anything new, and is free. What differs (another learning rate, other data, another
multiplier, arithmetic that is not repeatable) is thrown away: that step releases fresh noise and
nothing else, and is paid for. From there on, and beyond the last digest, samples and noise are
fresh from the operating system, under a new name. So two copies of one state part where their
records end, and a release that left no digest (a crash came first) is never repeated.

On accelerators no step leaves a digest: it would wait for the device, and arithmetic there is not
repeatable bit for bit anyway. A run that is resumed there goes on with fresh randomness at once.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clipless.accounting import Mechanism
from clipless.common import Query, fresh_bits, not_set_error, release_
from clipless.errors import BudgetExhaustedError
from clipless.kernels import KEY_BYTES, may_look_at
from clipless.ledger import INSECURE, Budget, BudgetMeter, Ledger
from clipless.privacy._plan import Plan
from clipless.privacy.sampling._batches import StepSample
from clipless.privacy.step import _refusals as refusals
from clipless.privacy.step._output_guard import ForwardCall

if TYPE_CHECKING:
    from clipless.privacy.step._parts import StepParts


@dataclass
class StepProgress:
    """How far the present step has come."""

    step: int
    micro_batches: int
    plan: Plan
    """The bounds that all its gradients are held to, and the noise that they get."""
    seen: set[int] = field(default_factory=set)
    delivered: int = 0
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """The summed gradients so far, without noise, by the parameter's place in the plan."""
    counts: dict[str, Tensor] = field(default_factory=dict)
    """The examples above each threshold so far, without noise, by the path of its layer."""

    def check_next(self, call: ForwardCall) -> None:
        """Refuse a pass that is not a whole micro-batch of the step, for the first time."""
        if call.plan is not self.plan and call.plan.sensitivities != self.plan.sensitivities:
            raise refusals.changed_within_step()
        sample: StepSample = call.sample
        rows = call.output.shape[0]
        if sample.micro_batch in self.seen or call.through_criterion:
            raise refusals.batch_used_twice()
        if rows != sample.rows:
            raise refusals.not_the_whole_batch(rows, drawn=sample.rows, views=sample.views)

    def check_complete(self) -> None:
        """Refuse to release a step of which something is missing."""
        missing = self.micro_batches - len(self.seen)
        if missing:
            raise refusals.incomplete_step(missing, self.micro_batches)
        if self.delivered != self.micro_batches:
            raise refusals.missing_backward(self.delivered, self.micro_batches)


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

    def begin(self, sample: StepSample, plan: Plan, *, repeats: bool = False) -> StepProgress:
        """Begin the step of a sample, if the budget allows; steps left out are paid for.

        One that `repeats` a release was paid for.
        """
        self.count_skipped(sample.step - self.last_step - 1, plan.mechanism)
        if not repeats:
            self.require_budget(plan.mechanism)
        self.progress = StepProgress(sample.step, sample.micro_batches, plan)
        return self.progress

    def saw(self, call: ForwardCall) -> None:
        """Note that a micro-batch has been through the criterion."""
        if self.progress is None:
            raise not_set_error("the step under way")
        self.progress.seen.add(call.sample.micro_batch)
        call.through_criterion = True

    def count_skipped(self, count: int, mechanism: Mechanism) -> None:
        """Steps that were drawn and never taken cost what they would have cost."""
        if count <= 0:
            return
        refusals.warn_of_skipped(count)
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


def budget_meter(plan: Plan, ledger: Ledger) -> BudgetMeter | None:
    """Return what refuses steps beyond the plan's budget, if it has one."""
    if plan.target_epsilon is None:
        return None
    budget = Budget(epsilon=plan.target_epsilon, delta=plan.delta, accountant=plan.accountant)
    return BudgetMeter(budget=budget, ledger=ledger)


class Outcomes:
    """Adds the noise of each step, and keeps the digests of the results."""

    def __init__(self, session: StepParts) -> None:
        self._session = session
        self._expected: dict[int, str] = {}
        self._noise_is_old = False
        """Whether the noise that comes next has been released before."""

    @property
    def run(self) -> str:
        """The name of the present stream of samples and noise."""
        return self._session._book.run

    # --- beginning, new or resumed ---------------------------------------------------------------

    def begin(self, state: Mapping[str, Any] | None, *, repeat: bool) -> dict[str, Any]:
        """Name the run in the ledger; return how the loader is to begin.

        With the `state` of a run, go on with the steps after it, and `repeat` those that the
        ledger has digests of.
        """
        ledger, sampler = self._session.ledger, None
        if state is not None:
            sampler = state["sampler"]
            spent = [(Mechanism.from_dict(each), int(count)) for each, count in state["spent"]]
            ledger.begin_run(str(state["run"]), spent=spent)  # or it is not the run's ledger
            self._session._book.run = str(state["run"])
            if repeat and self._leaves_digests:
                self._expected = _consecutive(ledger.released(self.run), int(sampler["step"]))
        until = max(self._expected, default=-1) + 1
        self._noise_is_old = bool(self._expected)
        if not self._expected:
            self._begin_afresh(keep_seed=state is None)
        return {
            "key": self._together(fresh_bits(8 * KEY_BYTES)),
            "repeated": sampler,
            "until": until,
        }

    def _begin_afresh(self, *, keep_seed: bool = False) -> None:
        """Give the run a new name, and new noise."""
        session = self._session
        if not keep_seed:
            session.noise.renew()
        self._expected, self._noise_is_old = {}, False
        insecure = session.noise.insecure or session.loader.insecure
        name = self._together(f"{fresh_bits(64):016x}")
        session._book.run = f"{INSECURE}: {name}" if insecure else name
        session.ledger.begin_run(self.run)

    def _together(self, value: Any) -> Any:
        """What process 0 has drawn, for all processes."""
        return self._session.group.processes.from_first(lambda: value)

    # --- a step ----------------------------------------------------------------------------------

    def repeats(self, step: int) -> bool:
        """Whether a step was released before, so that it must come out the same."""
        return step in self._expected

    @property
    def left(self) -> int:
        """How many steps are still to be repeated."""
        return len(self._expected)

    def account(self, step: int) -> None:
        """Pay for a step, unless it may turn out to repeat one that was paid for."""
        session = self._session
        if not self.repeats(step):
            session._book.pay(step, session.plan.mechanism)

    @torch.no_grad()
    def add_noise(self, step: int, tensors: Sequence[Tensor], queries: Sequence[Query]) -> None:
        """Add the noise of a step in place; what then stands in `tensors` may be handed out."""
        session, expected = self._session, self._expected.pop(step, None)
        if expected is None and self._noise_is_old:  # steps were left out that would have used it
            self._begin_afresh()
        release_(tensors, queries, session.noise)
        if not self._leaves_digests:
            return
        digest = self._digest(tensors)
        if expected is None:
            session._book.released(step, digest)
        elif digest == expected:
            session._book.repeat(step, session.plan.mechanism)
            if not self._expected:
                self._begin_afresh()
        else:
            self._diverge(step, tensors, queries)

    def _diverge(self, step: int, tensors: Sequence[Tensor], queries: Sequence[Query]) -> None:
        """Throw away what was not released like this before, and go on afresh."""
        session = self._session
        for tensor in tensors:
            tensor.zero_()
        self._begin_afresh()
        session.loader.repeat_no_more()
        session._book.pay(step, session.plan.mechanism)
        warnings.warn(
            f"step {step}, repeated, does not come out as it did before: the learning rate, the "
            "data, the noise or the software have changed, or the arithmetic is not repeatable. "
            "This step releases nothing but noise; all that follow have fresh samples and noise. "
            "They are paid for.",
            stacklevel=2,
        )
        release_(tensors, queries, session.noise)
        session._book.released(step, self._digest(tensors))

    @property
    def _leaves_digests(self) -> bool:
        """Whether results can be looked at, and repeated: elsewhere than on an accelerator."""
        return all(map(may_look_at, self._session._trainable))

    def _digest(self, tensors: Sequence[Tensor]) -> str:
        """The digest of what all processes together release."""
        number = self._session.group.fingerprint(tensors) % (1 << 64)
        return hashlib.sha256(f"clipless/release/{number:016x}".encode()).hexdigest()[:16]


def _consecutive(released: Mapping[int, str], step: int) -> dict[int, str]:
    """The digests from `step` on, as far as none is missing."""
    found: dict[int, str] = {}
    while step in released:
        found[step] = released[step]
        step += 1
    return found
