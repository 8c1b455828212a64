"""The state of the step under way: what went through, what it adds up to, what is paid for."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clipless.common import not_set_error
from clipless.errors import BudgetExhaustedError, PrivacyError
from clipless.ledger import Budget, BudgetMeter, Ledger, nothing_released_since
from clipless.privacy._plan import Plan
from clipless.privacy.sampling._batches import StepSample
from clipless.privacy.step._output_guard import ForwardCall
from clipless.privacy.step._withheld import withheld


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
            raise PrivacyError(
                "the model was changed and called again between this forward pass and its "
                "criterion, or between the batches of one step; the noise would be that of another "
                "model. Change it between steps."
            )
        sample: StepSample = call.sample
        rows = call.output.shape[0]
        if sample.micro_batch in self.seen or call.through_criterion:
            raise PrivacyError(
                "this batch went through the criterion before. Every sampled example may "
                "contribute once to a step: draw the next batch from the private loader."
            )
        if rows != sample.rows:
            views = "" if sample.views == 1 else f" ({sample.views} views of every example)"
            raise PrivacyError(
                f"the batch drawn from the private loader has {sample.rows} rows{views}, but "
                f"{rows} went through the model. Feed it whole and once: dropping, "
                "repeating or splitting examples changes what was sampled."
            )

    def check_complete(self) -> None:
        """Refuse to release a step of which something is missing."""
        missing = self.micro_batches - len(self.seen)
        if missing:
            raise PrivacyError(
                f"{missing} of the {self.micro_batches} micro-batches of this step have not "
                "gone through the criterion. Step once for every sample, after its last "
                "micro-batch (loader.current.is_last)."
            )
        if self.delivered != self.micro_batches:
            raise PrivacyError(
                f"backward was called for {self.delivered} of the {self.micro_batches} "
                "batches of this step. Call backward on every private loss, once."
            )


def step_without_batch(*, training: bool) -> PrivacyError:
    """The error for a step to which nothing has contributed."""
    if training:
        return PrivacyError(
            "the optimizer was asked to step without a batch: draw one from the private "
            "loader, then call the model, the criterion and backward, once each."
        )
    return PrivacyError(
        "the optimizer was asked to step while the model is in evaluation mode, in which "
        "losses do not count and gradients have no noise; they were discarded. Call "
        "model.train() before the model, the criterion and backward."
    )


def warn_of_skipped(count: int) -> None:
    """Say that steps were drawn, and will be counted, that were never taken."""
    warnings.warn(
        f"{count} drawn batch(es) did not lead to a step of the optimizer. They are counted "
        "all the same, since skipping may depend on the data; their gradients are discarded. "
        "For several backward passes a step, use micro_batch_size.",
        stacklevel=3,
    )


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
        warn_of_skipped(count)
        for _ in range(count):
            self.pay(self.last_step + 1, plan, label="skipped step")

    def require_budget(self, plan: Plan, step: int) -> int | None:
        """Return how many releases the ledger may hold, or refuse one more of them."""
        try:
            mechanism = plan.schedule.due(step, first=self.first)
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
            mechanism = plan.schedule.due(step, first=self.first)
            if mechanism is not None:
                # A pass is reserved by itself: a crash would cost all that was reserved with it.
                alone = plan.schedule.period > 1
                self._ledger.spend(mechanism, label=label, limit=1 if alone else allowed)
        self.last_step = step

    def repeat(self, step: int, plan: Plan) -> None:
        """Come one step further, which was paid for when it was taken first."""
        with self._ledger.held_by(self.run):
            mechanism = plan.schedule.due(step, first=self.first)
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


class Gradients:
    """The gradients of a model's parameters: nothing without noise is left where others look."""

    def __init__(self, parameters: Mapping[str, Tensor], trainable: Sequence[Tensor]) -> None:
        self._parameters, self._trainable = list(parameters.values()), list(trainable)
        self._own: list[Tensor] = []
        self._withheld: list[Tensor] = []
        self._kinds: list[tuple[torch.dtype, torch.device]] = []

    def drop(self) -> None:
        """Take all gradients away."""
        for parameter in self._parameters:
            parameter.grad = None

    def put(self, gradients: Sequence[Tensor | None]) -> None:
        """Let the trainable parameters have these gradients, and remember that they are ours.

        None is for parameters that another process looks after.
        """
        self.drop()
        for parameter, gradient in zip(self._trainable, gradients, strict=True):
            parameter.grad = gradient
        self._own = [p.grad for p in self._parameters if p.grad is not None]

    def release(self, sums: Sequence[Tensor | None]) -> None:
        """Let the optimizer find what was released, in the parameters' own format."""
        both = zip(self._trainable, sums, strict=True)
        self.put([None if each is None else each.to(own.dtype) for own, each in both])

    def withhold(self) -> None:
        """Let who looks for gradients before they have their noise find that they are kept back."""
        kinds = [(parameter.dtype, parameter.device) for parameter in self._trainable]
        if any(device.type not in ("cpu", "cuda") for _, device in kinds):
            return  # sparse tensors are not everywhere
        if kinds != self._kinds:
            self._withheld = [withheld(parameter) for parameter in self._trainable]
            self._kinds = kinds
        self.put(self._withheld)

    def give_up(self) -> None:
        """Take away what stands for gradients that will not come any more."""
        kept_back = set(map(id, self._withheld))
        for parameter in self._trainable:
            if id(parameter.grad) in kept_back:
                parameter.grad = None

    def check_own(self) -> None:
        """Refuse gradients that somebody else has put there, and discard them."""
        own = set(map(id, self._own))
        if any(p.grad is not None and id(p.grad) not in own for p in self._parameters):
            self.drop()
            raise PrivacyError(
                "a parameter has a gradient that did not come through the private criterion: "
                "another loss was differentiated, or `grad` was assigned. It was discarded. Only "
                "the private loss may be differentiated, and gradients cannot be edited."
            )


def without_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    """Compute in the precision of the tensors, whatever surrounds the call of `backward`."""
    if not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)
