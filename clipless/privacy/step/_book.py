"""Release of a step: written to the ledger first, then given noise, and never released twice.

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

Where steps are paid for pass by pass (`Schedule`), more is at stake: the steps that a state has
behind it and those of two continuations would together be released once, and twice. So each step
leaves a line in the ledger, on the disk before anybody sees the result. A run that is resumed goes
on with the noise it had, correlated noise included, if the ledger knows of no release from that
step on. Otherwise noise begins anew with that step, without the noise of earlier ones, and passes
are counted, and paid for, from there.
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
from clipless.ledger import INSECURE, Budget, BudgetMeter, Ledger, nothing_released_since
from clipless.privacy._plan import Plan
from clipless.privacy.noise._correlated import CorrelatedNoise
from clipless.privacy.sampling._batches import StepSample
from clipless.privacy.step import _refusals as refusals
from clipless.privacy.step._output_guard import ForwardCall

if TYPE_CHECKING:
    from clipless.privacy.step._parts import StepParts

_UNREAD = "not read"
"""Stands in the ledger for what a step has released where results are not looked at."""


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
    `run` the name under which the ledger has them, `first` the step with which their noise began:
    a plan whose steps are paid for together, pass by pass, counts passes from there.
    """

    def __init__(self, ledger: Ledger, meter: BudgetMeter | None, *, last_step: int) -> None:
        self._ledger, self._meter = ledger, meter
        self.last_step = last_step
        self.first = 0
        self.run = ""
        self.progress: StepProgress | None = None

    def begin(self, sample: StepSample, plan: Plan, *, repeats: bool = False) -> StepProgress:
        """Begin the step of a sample, if the budget allows; steps left out are paid for.

        One that `repeats` a release was paid for.
        """
        self.count_skipped(sample.step - self.last_step - 1, plan)
        if not repeats:
            self.require_budget(plan, sample.step)
        self.progress = StepProgress(sample.step, sample.micro_batches, plan)
        return self.progress

    def saw(self, call: ForwardCall) -> None:
        """Note that a micro-batch has been through the criterion."""
        if self.progress is None:
            raise not_set_error("the step under way")
        self.progress.seen.add(call.sample.micro_batch)
        call.through_criterion = True

    def count_skipped(self, count: int, plan: Plan) -> None:
        """Steps that were drawn and never taken cost what they would have cost."""
        if count <= 0:
            return
        refusals.warn_of_skipped(count)
        for _ in range(count):
            self.pay(self.last_step + 1, plan, label="skipped step")

    def require_budget(self, plan: Plan, step: int) -> int | None:
        """Return how many releases the ledger may hold, or refuse one more of them."""
        try:
            mechanism = self._due(step, plan)
            if self._meter is None or mechanism is None:
                return None
            return self._meter.require(mechanism)
        except BudgetExhaustedError:
            self.progress = None
            raise

    def pay(self, step: int, plan: Plan, *, label: str = "training step") -> None:
        """Write the step down: from here on it is spent, whatever happens."""
        with self._ledger.held_by(self.run):
            allowed = self.require_budget(plan, step)
            mechanism = self._due(step, plan)
            if mechanism is not None:
                # A pass is reserved by itself: a crash would cost all that was reserved with it.
                limit = 1 if plan.each_step is None else allowed
                self._ledger.spend(mechanism, label=label, limit=limit)
        self.last_step = step

    def _due(self, step: int, plan: Plan) -> Mechanism | None:
        """What is to be paid before a step; None if it was paid for with another."""
        return plan.each_step or plan.schedule.due(step, first=self.first)

    def repeat(self, step: int, plan: Plan) -> None:
        """Come one step further, which was paid for when it was taken first."""
        with self._ledger.held_by(self.run):
            mechanism = self._due(step, plan)
            if mechanism is not None:
                self._ledger.repeat(mechanism)
        self.last_step = step

    def released(self, step: int, digest: str, *, certain: bool = False) -> None:
        """Write down what a step has released, by its digest; see `Ledger.release`."""
        with self._ledger.held_by(self.run):
            self._ledger.release(step, digest, certain=certain)

    def continues(self, step: int) -> bool:
        """Whether nothing was released from `step` on: by this run, or by one that went on."""
        return nothing_released_since(self._ledger.entries(), self.run, step)


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
            self._session._book.first = int(state.get("first", 0))
            if repeat and self._leaves_digests:
                self._expected = _consecutive(ledger.released(self.run), int(sampler["step"]))
        until = max(self._expected, default=-1) + 1
        self._noise_is_old = bool(self._expected)
        if not self._expected:
            self._begin_afresh(
                0 if sampler is None else int(sampler["step"]),
                keep_seed=state is None,
                goes_on=repeat,
            )
        return {
            "key": self._together(fresh_bits(8 * KEY_BYTES)),
            "repeated": sampler,
            "until": until,
        }

    def _begin_afresh(self, step: int, *, keep_seed: bool = False, goes_on: bool = False) -> None:
        """Give the run a new name from a step on, and new noise.

        It `goes_on` where the state is that of the step before: noise that remembers earlier steps
        still does, and passes are counted as they were, if nobody has released the step yet.
        """
        session, book = self._session, self._session._book
        if not keep_seed:
            session.noise.renew()
            if self._by_passes:
                if goes_on and self.run not in session.ledger.continued and book.continues(step):
                    session.ledger.continued.add(self.run)
                else:
                    book.first = step
                    if isinstance(session.noise, CorrelatedNoise):
                        session.noise.begin_anew(step)
        self._expected, self._noise_is_old = {}, False
        insecure = session.noise.insecure or session.loader.insecure
        name = self._together(f"{fresh_bits(64):016x}")
        book.run = f"{INSECURE}: {name}" if insecure else name
        session.ledger.begin_run(self.run)

    @property
    def _by_passes(self) -> bool:
        """Whether several steps are paid for together."""
        return self._session.plan.each_step is None

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
        left_out = self._noise_is_old and not self.repeats(step)
        if self._by_passes and (left_out or self.run in session.ledger.continued):
            self._begin_afresh(step)
        if not self.repeats(step):
            session._book.pay(step, session.plan)

    @torch.no_grad()
    def add_noise(self, step: int, tensors: Sequence[Tensor], queries: Sequence[Query]) -> None:
        """Add the noise of a step in place; what then stands in `tensors` may be handed out."""
        session, expected = self._session, self._expected.pop(step, None)
        if expected is None and self._noise_is_old:  # steps were left out that would have used it
            self._begin_afresh(step)
        self._announce(step)
        if self._by_passes and not self._leaves_digests:
            session._book.released(step, _UNREAD, certain=True)
        release_(tensors, queries, session.noise)
        if not self._leaves_digests:
            return
        digest = self._digest(tensors)
        if expected is None:
            session._book.released(step, digest, certain=self._by_passes)
        elif digest == expected:
            session._book.repeat(step, session.plan)
            if not self._expected:
                self._begin_afresh(step + 1, goes_on=True)
        else:
            self._diverge(step, tensors, queries)

    def _diverge(self, step: int, tensors: Sequence[Tensor], queries: Sequence[Query]) -> None:
        """Throw away what was not released like this before, and go on afresh."""
        session = self._session
        for tensor in tensors:
            tensor.zero_()
        self._begin_afresh(step)
        session.loader.repeat_no_more()
        session._book.pay(step, session.plan)
        warnings.warn(
            f"step {step}, repeated, does not come out as it did before: the learning rate, the "
            "data, the noise or the software have changed, or the arithmetic is not repeatable. "
            "This step releases nothing but noise; all that follow have fresh samples and noise. "
            "They are paid for.",
            stacklevel=2,
        )
        self._announce(step)
        release_(tensors, queries, session.noise)
        session._book.released(step, self._digest(tensors), certain=self._by_passes)

    def _announce(self, step: int) -> None:
        """Tell noise that remembers earlier steps which one comes now."""
        noise = self._session.noise
        if isinstance(noise, CorrelatedNoise):
            noise.begin_step(step)

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
