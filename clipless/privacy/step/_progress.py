"""How far a step has come: which parts of its sample went through, and what they add up to."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from torch import Tensor

from clipless.errors import PrivacyError
from clipless.privacy._plan import Plan
from clipless.privacy.sampling._batches import StepSample
from clipless.privacy.step._output_guard import ForwardCall


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
