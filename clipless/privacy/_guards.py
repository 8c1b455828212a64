"""The way back from the loss to the parameters, and the only one there is.

The model's output is cut off from its graph before anybody sees it. The criterion works on a copy
of its own; when the backward pass reaches that copy, each example's cotangent is made finite,
clipped to its limit and handed to the session, which alone runs the rest of the backward pass.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clipless.errors import PrivacyError
from clipless.nn._gradient import clip_rows

if TYPE_CHECKING:
    from clipless.privacy._batches import StepSample
    from clipless.privacy._session import TrainingSession

# The guard leaves room for the rounding of a loss whose gradient reaches its constant, so that it
# changes nothing for honest losses. The plan's arithmetic slack covers it many times over.
GUARD_ROOM = 1 + 1e-5


@dataclass(eq=False)
class ForwardCall:
    """One forward pass in training mode, from its output to the end of its backward pass.

    It hangs on the output that everybody sees; copies of that, in memory or on disk, lose it.
    """

    session: TrainingSession
    output: Tensor
    """The model's output, with the graph that leads to the parameters."""
    sample: StepSample
    """The batch that went in."""
    structure: tuple[Any, ...] = field(repr=False)
    """What the model's bounds were proved for when it was called."""
    through_criterion: bool = False
    finished: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (OrderedDict, ())  # which torch.load accepts


def cut_off(call: ForwardCall) -> Tensor:
    """Return the output as everybody sees it: the same values, and no way to the parameters."""
    seen = call.output.detach().clone().requires_grad_()
    seen._clipless_call = call  # type: ignore[attr-defined]
    seen.register_hook(_refuse_other_use)
    return seen


def call_of(output: Any) -> ForwardCall | None:
    """Return the forward pass whose output this very tensor is."""
    call = getattr(output, "_clipless_call", None)
    return call if isinstance(call, ForwardCall) else None


def tap(call: ForwardCall) -> Tensor:
    """Return the output for the criterion; its backward pass is the one that counts."""
    own = call.output.detach().clone().requires_grad_()
    tapped: Tensor = _Tap.apply(own, call)  # type: ignore[no-untyped-call]
    tapped._clipless_call = call  # type: ignore[attr-defined]
    return tapped


def public_mean(losses: Tensor, weights: Tensor | None, call: ForwardCall) -> Tensor:
    """Sum the losses of the rows (padding left out) and divide by a public constant.

    That is the expected batch size, times the views that every example has.
    """
    divisor = call.session.plan.loss_divisor
    result: Tensor = _PublicMean.apply(losses, weights, divisor, call)  # type: ignore[no-untyped-call]
    return result


def plain_reduction(losses: Tensor, reduction: str) -> Tensor:
    """The ordinary reduction, for evaluation."""
    if reduction == "none":
        return losses
    return losses.sum() / (max(losses.shape[0], 1) if reduction == "mean" else 1)


@torch.utils.hooks.unserializable_hook  # type: ignore[untyped-decorator]  # no warning at saving
def _refuse_other_use(cotangent: Tensor) -> None:
    raise PrivacyError(
        "the model's output is differentiated by something besides the criterion that was made "
        "private, or the criterion was left out. Terms that look at several examples have no "
        "bounded sensitivity: put what you need into a per-example loss "
        "(clipless.losses.PerExample) and compute the loss with it, in training mode."
    )


class _Tap(torch.autograd.Function):
    """Identity; its backward pass hands the guarded cotangents to the session and ends there."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, call: ForwardCall) -> Tensor:
        ctx.call = call
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[None, None]:
        call: ForwardCall = ctx.call
        if call.finished:
            raise PrivacyError(
                "backward was called a second time through the same forward pass. Every sampled "
                "example may contribute once: call the model again on a new batch, and do not "
                "use retain_graph=True."
            )
        call.finished = True
        plan = call.session.plan
        limit = plan.loss_lipschitz / plan.loss_divisor * GUARD_ROOM
        call.session.deliver(call, clip_rows(cotangents[0], limit))
        return None, None


class _PublicMean(torch.autograd.Function):
    """The loss of a step. Its backward pass does not depend on how the loss was scaled later."""

    @staticmethod
    def forward(
        ctx: Any, losses: Tensor, weights: Tensor | None, divisor: float, call: ForwardCall
    ) -> Tensor:
        ctx.save_for_backward(weights)
        ctx.call, ctx.divisor, ctx.count = call, divisor, losses.shape[0]
        if weights is not None:
            losses = torch.where(weights > 0, losses * weights, torch.zeros_like(losses))
        return losses.sum() / divisor

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None, None, None]:
        scale = cotangents[0]
        if scale.device.type == "cpu" and not ctx.call.session.allows_scaling and scale != 1:
            raise PrivacyError(
                f"the private loss was multiplied by {float(scale):g} before backward. The "
                "criterion already divides by the public batch size; change the learning rate "
                "instead, use micro_batch_size for batches larger than memory, and pass a "
                "gradient scaler as grad_scaler= to make_private."
            )
        ones = scale.new_ones(ctx.count) / ctx.divisor
        (weights,) = ctx.saved_tensors
        return (ones if weights is None else ones * weights), None, None, None
