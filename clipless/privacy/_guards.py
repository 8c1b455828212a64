"""The guards of a backward pass, as autograd functions.

What reaches the parameters is exactly what came through the criterion, one clipped cotangent for
each example; whatever else somebody attaches to the model's output does not get through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clipless.errors import PrivacyError
from clipless.nn._gradient import clip_rows

if TYPE_CHECKING:
    from clipless.privacy._session import TrainingSession

# The guard leaves room for the rounding of a loss whose gradient reaches its constant, so that it
# changes nothing for honest losses. The plan's arithmetic slack covers it many times over.
GUARD_ROOM = 1 + 1e-5


@dataclass(eq=False)
class ForwardCall:
    """One forward pass of the model, from its output to the end of its backward pass."""

    session: TrainingSession
    training: bool
    """Whether the model was in training mode; evaluation passes cannot be differentiated."""
    rows: int
    through_criterion: bool = False
    cotangent: Tensor | None = None
    """What came back through the criterion, before any other use of the output is added."""
    finished: bool = False


def guard_output(output: Tensor, call: ForwardCall) -> Tensor:
    """Mark the model's output as `call`'s and guard its backward pass."""
    guarded: Tensor = _OutputGuard.apply(output, call)  # type: ignore[no-untyped-call]
    guarded._clipless_call = call  # type: ignore[attr-defined]
    return guarded


def call_of(output: Any) -> ForwardCall | None:
    """Return the forward pass whose output this very tensor is."""
    return getattr(output, "_clipless_call", None)


def tap(output: Tensor, call: ForwardCall) -> Tensor:
    """Return the output for the criterion's eyes; its backward pass notes the cotangent."""
    tapped: Tensor = _Tap.apply(output, call)  # type: ignore[no-untyped-call]
    tapped._clipless_call = call  # type: ignore[attr-defined]
    return tapped


def public_mean(losses: Tensor, weights: Tensor | None, call: ForwardCall) -> Tensor:
    """Sum the losses of the examples (padding left out) and divide by the public batch size."""
    batch_size = call.session.plan.expected_batch_size
    result: Tensor = _PublicMean.apply(losses, weights, batch_size, call)  # type: ignore[no-untyped-call]
    return result


class _OutputGuard(torch.autograd.Function):
    """Identity forward; backward, the criterion's cotangents, finite and of norm at most L / b."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, call: ForwardCall) -> Tensor:
        ctx.call = call
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        call: ForwardCall = ctx.call
        noted = call.cotangent
        if call.finished:
            raise PrivacyError(
                "backward was called a second time through the same forward pass. Every sampled "
                "example may contribute once: call the model again on a new batch, and do not "
                "use retain_graph=True."
            )
        if noted is None:
            raise PrivacyError(
                "backward reached the model's output without going through the criterion that was "
                "made private. Compute the loss with that criterion, from the model's output in "
                "training mode."
            )
        if noted.device.type == "cpu" and not _equal(noted, cotangents[0]):
            raise PrivacyError(
                "the model's output is used by something besides the criterion. Terms that look "
                "at several examples have no bounded sensitivity: put what you need into a "
                "per-example loss (clipless.losses.PerExample)."
            )
        call.finished, call.cotangent = True, None
        call.session.backward_done(call)
        limit = call.session.plan.loss_lipschitz / call.session.plan.expected_batch_size
        return clip_rows(noted, limit * GUARD_ROOM), None


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, call: ForwardCall) -> Tensor:
        ctx.call = call
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        ctx.call.cotangent = cotangents[0]
        return cotangents[0], None


class _PublicMean(torch.autograd.Function):
    """The loss of a step. Its backward pass does not depend on how the loss was scaled later."""

    @staticmethod
    def forward(
        ctx: Any, losses: Tensor, weights: Tensor | None, batch_size: float, call: ForwardCall
    ) -> Tensor:
        ctx.save_for_backward(weights)
        ctx.call, ctx.batch_size, ctx.count = call, batch_size, losses.shape[0]
        if weights is not None:
            losses = torch.where(weights > 0, losses * weights, torch.zeros_like(losses))
        return losses.sum() / batch_size

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None, None, None]:
        scale = cotangents[0]
        if scale.device.type == "cpu" and not ctx.call.session.allows_scaling and scale != 1:
            raise PrivacyError(
                f"the private loss was multiplied by {float(scale):g} before backward. The "
                "criterion already divides by the public batch size; change the learning rate "
                "instead, and use micro_batch_size for batches larger than memory."
            )
        ones = scale.new_ones(ctx.count) / ctx.batch_size
        (weights,) = ctx.saved_tensors
        return (ones if weights is None else ones * weights), None, None, None


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
