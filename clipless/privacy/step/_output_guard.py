"""The output guard: each example's cotangent at the model's output is made finite and bounded.

The model's output is cut off from its graph before anybody sees it. The criterion works on a copy
of its own; when the backward pass reaches that copy, each example's cotangent is made finite,
clipped to its limit and handed to the session, which alone runs the rest of the backward pass.
What comes out of it is kept here (`Gradients`) until it has its noise.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clipless.kernels import make_finite_and_bounded, may_look_at
from clipless.privacy.step import _refusals as refusals
from clipless.privacy.step._withheld import withheld

if TYPE_CHECKING:
    from clipless.privacy._plan import Plan
    from clipless.privacy.sampling._batches import StepSample
    from clipless.privacy.step._enforcement import BackwardPass
    from clipless.privacy.step._step import PrivateStep


def guard_room(dtype: torch.dtype) -> float:
    """The factor above a loss's constant at which its gradients are clipped.

    Room for the rounding of a loss whose gradient reaches its constant, so that the guard changes
    nothing for honest losses. The plan's arithmetic slack is a hundred times as large.
    """
    return 1 + (1e-11 if dtype == torch.float64 else 1e-5)


@dataclass(eq=False)
class ForwardCall:
    """One forward pass in training mode, from its output to the end of its backward pass.

    It hangs on the output that everybody sees; copies of that, in memory or on disk, lose it.
    """

    session: PrivateStep
    output: Tensor
    """The model's output, with the graph that leads to the parameters."""
    backward: BackwardPass | None
    """The backward pass to the parameters, as long as it has not run."""
    sample: StepSample
    """The batch that went in."""
    plan: Plan = field(repr=False)
    """Whose bounds the gradients behind the output are held to."""
    through_criterion: bool = False
    finished: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (OrderedDict, ())  # which torch.load accepts


def detach_output(call: ForwardCall) -> Tensor:
    """Return the output as everybody sees it: the same values, and no way to the parameters."""
    seen = _copy(call.output)
    seen._clipless_call = call  # type: ignore[attr-defined]
    seen.register_hook(_refuse_other_use)
    return seen


def _copy(output: Tensor) -> Tensor:
    """The same values at the end of no graph, in float32 at least: losses do not round."""
    wide = torch.promote_types(output.dtype, torch.float32)
    return output.detach().to(wide, copy=True).requires_grad_()


def values_of(call: ForwardCall) -> Tensor:
    """The output as the model gave it, whatever was done to the copy that everybody sees."""
    return call.output.detach().to(torch.promote_types(call.output.dtype, torch.float32))


def call_of(output: Any) -> ForwardCall | None:
    """Return the forward pass whose output this very tensor is."""
    call = getattr(output, "_clipless_call", None)
    return call if isinstance(call, ForwardCall) else None


def watch_output(call: ForwardCall) -> Tensor:
    """Return the output for the criterion; its backward pass is the one that counts."""
    own = _copy(call.output)
    watched: Tensor = _WatchedOutput.apply(own, call)  # type: ignore[no-untyped-call]
    watched._clipless_call = call  # type: ignore[attr-defined]
    return watched


def loss_with_cotangents(call: ForwardCall, loss: Tensor, cotangents: Tensor) -> Tensor:
    """Return a loss whose guarded cotangents are known already: `backward` hands them over."""
    own = torch.empty(0, device=loss.device, requires_grad=True)
    result: Tensor = _LossWithCotangents.apply(own, loss, cotangents, call)  # type: ignore[no-untyped-call]
    return result


def limit_of(session: PrivateStep) -> float:
    """The norm that one row's cotangent may have at the model's output."""
    room = guard_room(session._trainable[0].dtype)
    return session.plan.loss_lipschitz / session.plan.loss_divisor * room


def public_mean(losses: Tensor, weights: Tensor | None, call: ForwardCall) -> Tensor:
    """Sum the losses of the rows (padding left out) and divide by a public constant.

    That is the expected batch size, times the views that every example has. Rows that are shared
    out among a user's records count by their share; their cotangents do not, as each row is held to
    a whole bound, and shares are applied where rows are added up.
    """
    divisor = call.session.plan.loss_divisor
    shares = call.sample.shares
    if shares is not None:
        losses = _SharedLosses.apply(losses, shares.to(losses))  # type: ignore[no-untyped-call]
    result: Tensor = _PublicMean.apply(losses, weights, divisor, call)  # type: ignore[no-untyped-call]
    return result


def plain_reduction(losses: Tensor, reduction: str) -> Tensor:
    """The ordinary reduction, for evaluation."""
    if reduction == "none":
        return losses
    return losses.sum() / (max(losses.shape[0], 1) if reduction == "mean" else 1)


@torch.utils.hooks.unserializable_hook  # type: ignore[untyped-decorator]  # no warning at saving
def _refuse_other_use(cotangent: Tensor) -> None:
    raise refusals.other_use_of_output()


class _WatchedOutput(torch.autograd.Function):
    """Identity; its backward pass hands the guarded cotangents to the session and ends there."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, call: ForwardCall) -> Tensor:
        ctx.call = call
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[None, None]:
        _hand_over(ctx.call, make_finite_and_bounded(cotangents[0], limit_of(ctx.call.session)))
        return None, None


def _hand_over(call: ForwardCall, cotangents: Tensor) -> None:
    """Let the session run the backward pass behind an output, once."""
    if call.finished:
        raise refusals.second_backward()
    call.finished = True
    call.session.backward(call, cotangents)


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
        _check_scale(cotangents[0], ctx.call)
        ones = cotangents[0].new_ones(ctx.count) / ctx.divisor
        (weights,) = ctx.saved_tensors
        return (ones if weights is None else ones * weights), None, None, None


class _SharedLosses(torch.autograd.Function):
    """Losses times their rows' shares, with the gradient of losses that have none."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, shares: Tensor) -> Tensor:
        return losses * shares

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        return cotangents[0], None


class _LossWithCotangents(torch.autograd.Function):
    """The loss of a step whose cotangents were computed along with it."""

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, loss: Tensor, cotangents: Tensor, call: ForwardCall
    ) -> Tensor:
        ctx.save_for_backward(cotangents)
        ctx.call = call
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[None, None, None, None]:
        _check_scale(cotangents[0], ctx.call)
        (guarded,) = ctx.saved_tensors
        _hand_over(ctx.call, guarded)
        return None, None, None, None


def _check_scale(scale: Tensor, call: ForwardCall) -> None:
    """Refuse a loss that was multiplied. (On a GPU, where a look would stall, it has no effect.)"""
    if may_look_at(scale) and not call.session.allows_scaling and scale != 1:
        raise refusals.scaled_loss(float(scale))


def main_output(output: Any) -> Any:
    """The tensor for the criterion: the output itself, or the `logits` of a model's output."""
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) and not isinstance(output, Tensor) else output


def with_main_output(output: Any, seen: Tensor) -> Any:
    """Return a model's output as everybody sees it: `seen` in its place, all else without graph."""
    if isinstance(output, Tensor):
        return seen
    other = copy.copy(output)
    if isinstance(other, MutableMapping):
        for key, value in output.items():
            other[key] = seen if value is output.logits else _detached(value)
    else:
        for key, value in vars(output).items():
            setattr(other, key, _detached(value))
        other.logits = seen
    return other


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) in (tuple, list):
        return type(value)(map(_detached, value))
    return value


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
            raise refusals.foreign_gradient()


def without_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    """Compute in the precision of the tensors, whatever surrounds the call of `backward`."""
    if not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)
