"""A loss of the user's own, written for one example and mapped over the batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from clipless.common import require_positive
from clipless.errors import LabelError
from clipless.losses._base import Loss, Reduction

ExampleLoss = Callable[[Tensor, Tensor], Tensor]


class PerExample(Loss):
    """A function of one example's output and target, mapped over the batch with `torch.vmap`.

    `fn(output, target)` receives ONE example's output and target, without the batch axis, and
    returns a scalar tensor. It never sees the batch, so it cannot tie examples together (short
    of a closure over other data, which it must not have). Like everything under `vmap` it may
    not branch on tensor values; use `torch.where`.

    The constant is your claim, not a theorem of this library: nothing here checks that the
    gradient of `fn` stays below `lipschitz`. Private training therefore clips every example's
    gradient at the output to it. A constant that is too small changes what is learned, never
    the privacy; one that is too large wastes noise.

    Shape: output `(B, ...)`, target `(B, ...)`.

    >>> def log_cosh(output, target):
    ...     return torch.log(torch.cosh(output - target)).mean()
    >>> loss = PerExample(log_cosh, lipschitz=1.0)
    >>> loss(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 0.0]]))
    tensor(0.2169)
    """

    def __init__(self, fn: ExampleLoss, *, lipschitz: float, reduction: Reduction = "mean") -> None:
        super().__init__(reduction=reduction)
        if not callable(fn):
            raise ValueError(f"fn must be a function of one example, got {fn!r}.")
        if isinstance(fn, torch.nn.Module) and any(True for _ in fn.parameters()):
            raise ValueError(
                "fn has parameters: the loss would train them outside the sensitivity analysis. "
                "Make them part of the model."
            )
        self.fn = fn
        self._lipschitz = require_positive("lipschitz", lipschitz)

    @property
    def lipschitz(self) -> float:
        """The claimed constant, to which private training clips."""
        return self._lipschitz

    def per_example(self, output: Tensor, target: Tensor) -> Tensor:
        """Return `fn` of every example."""
        if output.ndim < 1 or target.shape[:1] != output.shape[:1]:
            raise LabelError(
                f"PerExample needs one target per example along the first axis, got output shape "
                f"{tuple(output.shape)} and target shape {tuple(target.shape)}."
            )
        if output.shape[0] == 0:
            return output.reshape(0)  # some operations cannot be mapped over nothing
        mapped: Callable[[Tensor, Tensor], Tensor] = torch.vmap(self._one)
        return mapped(output, target)

    def _one(self, output: Tensor, target: Tensor) -> Tensor:
        value = self.fn(output, target)
        if not isinstance(value, Tensor) or value.ndim != 0 or not value.is_floating_point():
            kind = (
                f"{value.dtype} of shape {tuple(value.shape)}"
                if isinstance(value, Tensor)
                else type(value).__name__
            )
            raise ValueError(
                "The function of a PerExample loss must return one floating point scalar tensor "
                f"per example, got {kind}. Reduce over the example's own axes, for instance with "
                ".mean()."
            )
        return value

    def extra_repr(self) -> str:
        """Describe the settings inside the module's printed form."""
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        return f"{name}, lipschitz={self._lipschitz}, {super().extra_repr()}"
