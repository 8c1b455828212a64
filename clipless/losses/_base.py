"""`Loss`: one value per example, and a constant that bounds its gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from clipless.losses._validation import one_of

Reduction = Literal["mean", "sum", "none"]


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
