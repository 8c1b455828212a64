"""`Loss`: one value per example, and a constant that bounds its gradient.

With it what losses check: settings, outputs, and the labels that a constant was derived for.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from numbers import Integral
from typing import Literal, TypeVar

import torch
from torch import Tensor

from clipless.errors import LabelError

Reduction = Literal["mean", "sum", "none"]
Choice = TypeVar("Choice", bound=str)


class Loss(torch.nn.Module, ABC):
    """A per-example loss whose gradient at the model's output is bounded.

    Guarantee: for every example, `||d loss / d output|| <= lipschitz_for(output.shape[1:])`, and
    `lipschitz_for(shape) <= lipschitz` for every shape. It holds for any finite output and any
    target that is accepted. Examples never meet before the reduction.

    Where the values of the targets can be read for free (on the CPU, outside `torch.compile` and
    the transforms of `torch.func`), a target outside the loss's domain raises `LabelError`.
    Elsewhere it is brought back into the domain or contributes nothing, so that the bound holds
    there too.

    A subclass implements `per_example` and `lipschitz`, and holds no parameters.

    Shape: output `(B, K)`, or `(B,)` where one number per example makes sense; result a scalar,
    or `(B,)` with `reduction="none"`. An empty batch costs 0, for `"mean"` as well.

    >>> from clipless.losses import CrossEntropy
    >>> loss = CrossEntropy(tau=2.0, reduction="none")
    >>> loss(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    tensor([0.3466, 0.3466, 0.3466])
    """

    reduction: Reduction

    def __init__(self, *, reduction: Reduction = "mean") -> None:
        super().__init__()
        self.reduction = one_of("reduction", reduction, ("mean", "sum", "none"))

    @property
    @abstractmethod
    def lipschitz(self) -> float:
        """Bound of one example's gradient norm for every output shape the loss accepts."""

    def lipschitz_for(self, output_shape: Sequence[int]) -> float:
        """Return the bound for one example's output of shape `output_shape` (no batch axis)."""
        return self.lipschitz

    @abstractmethod
    def per_example(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each example, shape `(B,)`; entry i reads row i alone."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the reduced loss.

        `"mean"` divides by the size of the batch at hand, which private training must not do:
        there, sum `per_example` and divide by the public expected batch size.
        """
        losses = self.per_example(output, target)
        if losses.shape != output.shape[:1]:
            raise ValueError(
                f"{type(self).__name__}.per_example returned shape {tuple(losses.shape)} for "
                f"{output.shape[0]} examples; it must return one value per example."
            )
        if self.reduction == "none":
            return losses
        if self.reduction == "sum":
            return losses.sum()
        return losses.sum() / max(losses.shape[0], 1)

    def extra_repr(self) -> str:
        """Describe the settings inside the module's printed form."""
        return f"reduction={self.reduction!r}"


def optional_count(name: str, value: int | None) -> int | None:
    """Return `value` as an int of at least 1, or None if it is None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1 or None, got {value!r}.")
    return int(value)


def one_of(name: str, value: Choice, choices: Sequence[Choice]) -> Choice:
    """Return `value` if it is among the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
    return value


def readable(tensor: Tensor) -> bool:
    """Whether the values can be inspected at no cost: no device sync, no tracing, no transform."""
    return (
        not torch.compiler.is_compiling()
        and type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def output_count(loss: str, output_shape: Sequence[int]) -> int:
    """Return how many numbers one example's output holds; at least one is required."""
    count = math.prod(output_shape)
    if count < 1:
        raise ValueError(f"{loss} needs at least one output, got shape {tuple(output_shape)}.")
    return count


def class_count(loss: str, output_shape: Sequence[int]) -> int:
    """Return K for one example's output of shape `(K,)`, K >= 2."""
    if len(output_shape) != 1 or output_shape[0] < 2:
        raise ValueError(
            f"{loss} needs K >= 2 logits per example, output shape (batch, K); got "
            f"(batch, {', '.join(map(str, output_shape))}). For one logit use BinaryCrossEntropy "
            "or a margin loss; for sequences and images write a PerExample loss."
        )
    return output_shape[0]


def scores(loss: str, output: Tensor) -> Tensor:
    """Return the output in at least single precision; it needs a batch axis and real numbers."""
    if not output.is_floating_point():
        raise ValueError(f"{loss} needs floating point outputs, got {output.dtype}.")
    if output.ndim < 1:
        raise ValueError(f"{loss} needs a batch axis, output shape (batch, ...); got a scalar.")
    return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output


def class_membership(loss: str, output: Tensor, target: Tensor) -> Tensor:
    """Return the boolean `(B, K)` table of which class each example belongs to.

    `target` holds integer class indices, shape `(B,)`. An index out of range is refused where it
    can be seen; elsewhere its row is False throughout.
    """
    batch, classes = output.shape
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise LabelError(
            f"{loss} takes integer class indices, got {target.dtype}. One-hot, multi-hot and "
            "smoothed labels have another Lipschitz constant: pass target.argmax(dim=1) for "
            "one-hot labels, target.long() for indices stored as floats or booleans, or use "
            "BinaryCrossEntropy for several labels per example."
        )
    if target.shape != (batch,):
        raise LabelError(
            f"{loss} takes one class index per example, target shape ({batch},); got "
            f"{tuple(target.shape)}. Pass target.argmax(dim=1) for one-hot labels, "
            "target.squeeze(1) for a column of indices."
        )
    target = target.long()
    if readable(target) and batch > 0:
        low, high = (int(value) for value in torch.aminmax(target))
        if low < 0 or high >= classes:
            raise LabelError(
                f"{loss} got labels from {low} to {high} for {classes} logits; class indices run "
                f"from 0 to {classes - 1}. Remove unlabelled examples (-1, -100) from the data "
                "set: the loss ignores nobody."
            )
    return target.unsqueeze(1) == torch.arange(classes, device=target.device)


def binary_signs(loss: str, output: Tensor, target: Tensor) -> Tensor:
    """Return the labels -1 or +1 of one-logit examples as a `(B, 1)` column.

    `target` has shape `(B,)` or `(B, 1)`. Other values are refused where they can be seen;
    elsewhere they are clamped to [-1, 1] and NaN becomes 0.
    """
    if target.is_complex() or target.dtype == torch.bool:
        raise LabelError(
            f"{loss} takes labels -1 and +1 for one logit, got {target.dtype}. Convert booleans "
            "with 2 * target.long() - 1."
        )
    _check_one_label_each(loss, output, target)
    if readable(target) and not bool((target.abs() == 1).all()):
        raise LabelError(
            f"{loss} takes labels -1 and +1 for one logit, and some are neither. Convert 0/1 "
            "labels with 2 * target - 1."
        )
    return _clean(target, output.dtype).clamp(-1.0, 1.0).reshape(-1, 1)


def probabilities(loss: str, output: Tensor, target: Tensor) -> Tensor:
    """Return targets in [0, 1] in the shape of the output.

    The target's shape is the output's; one logit per example takes `(B,)` or `(B, 1)` for either.
    Values outside [0, 1] are refused where they can be seen; elsewhere they are clamped and NaN
    becomes 0.
    """
    if target.is_complex():
        raise LabelError(f"{loss} takes real targets between 0 and 1, got {target.dtype}.")
    if output.shape[1:].numel() == 1 and output.ndim <= 2:
        _check_one_label_each(loss, output, target)
    elif target.shape != output.shape:
        raise LabelError(
            f"{loss} takes one label per output, target shape {tuple(output.shape)}; got "
            f"{tuple(target.shape)}. For one class index per example use CrossEntropy."
        )
    if readable(target) and not bool(((target >= 0) & (target <= 1)).all()):
        raise LabelError(
            f"{loss} takes labels between 0 and 1, and some lie outside. Convert -1/+1 labels "
            "with (target + 1) / 2."
        )
    return _clean(target, output.dtype).clamp(0.0, 1.0).reshape(output.shape)


def regression_rows(loss: str, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and target as `(B, n)`; a target that is NaN becomes 0.

    The shapes must be equal: `(B,)` against `(B, 1)` would broadcast to all pairs of examples.
    """
    output = scores(loss, output)
    output_count(loss, output.shape[1:])
    if target.is_complex():
        raise LabelError(f"{loss} takes real targets, got {target.dtype}.")
    if target.shape != output.shape:
        raise LabelError(
            f"{loss} takes a target of the output's shape {tuple(output.shape)}, got "
            f"{tuple(target.shape)}. Nothing is broadcast: use target.unsqueeze(1) or "
            "output.squeeze(1) to make (B,) and (B, 1) agree."
        )
    target = _clean(target, output.dtype)
    if output.ndim == 1:
        return output.unsqueeze(1), target.unsqueeze(1)
    return output.flatten(1), target.flatten(1)


def _check_one_label_each(loss: str, output: Tensor, target: Tensor) -> None:
    batch = output.shape[0]
    if target.shape not in ((batch,), (batch, 1)):
        raise LabelError(
            f"{loss} takes one label per example, target shape ({batch},) or ({batch}, 1); got "
            f"{tuple(target.shape)}."
        )


def _clean(target: Tensor, dtype: torch.dtype) -> Tensor:
    """Targets in the output's precision, without NaN and infinities, cut off from autograd."""
    return torch.nan_to_num(target.detach().to(dtype))
