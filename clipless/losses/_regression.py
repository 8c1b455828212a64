"""Regression losses. The target always has the output's shape; nothing is broadcast."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from clipless.common import require_positive
from clipless.kernels import scale_into_ball
from clipless.losses._base import Loss, Reduction, optional_count, output_count, regression_rows


class AbsoluteError(Loss):
    """Absolute error, mean over the n outputs of an example: `mean_k |output_k - target_k|`.

    The gradient has entries `+-1/n` or 0: its norm is at most `1/sqrt(n)`.

    Shape: output and target `(B,)` or `(B, ...)`, equal. With `outputs`, `lipschitz` is the exact
    `1/sqrt(outputs)` and other sizes are refused. A target that is NaN counts as 0.

    >>> import torch
    >>> loss = AbsoluteError(outputs=4)
    >>> loss(torch.zeros(1, 4), torch.tensor([[1.0, 2.0, 0.0, -1.0]]))
    tensor(1.)
    >>> loss.lipschitz
    0.5
    """

    def __init__(self, *, outputs: int | None = None, reduction: Reduction = "mean") -> None:
        super().__init__(reduction=reduction)
        self.outputs = optional_count("outputs", outputs)

    @property
    def lipschitz(self) -> float:
        """`1/sqrt(outputs)`, or 1 when the number of outputs was not given."""
        return 1.0 / math.sqrt(self.outputs or 1)

    def lipschitz_for(self, output_shape: Sequence[int]) -> float:
        """Return `1/sqrt(n)` for an output of n numbers."""
        count = output_count("AbsoluteError", output_shape)
        if self.outputs not in (None, count):
            raise ValueError(
                f"AbsoluteError was built for outputs={self.outputs} numbers and got {count}."
            )
        return 1.0 / math.sqrt(count)

    def per_example(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean absolute error of every example."""
        output, target = regression_rows("AbsoluteError", output, target)
        self.lipschitz_for(output.shape[1:])
        return (output - target).abs().mean(dim=1)

    def extra_repr(self) -> str:
        """Describe the settings inside the module's printed form."""
        return f"outputs={self.outputs}, {super().extra_repr()}"


class Huber(Loss):
    """Huber loss, mean over the n outputs of an example.

    With `r = output_k - target_k`: `r^2 / 2` where `|r| <= delta`, `delta (|r| - delta/2)` beyond.
    The gradient has entries `clamp(r, -delta, delta) / n`: its norm is at most `delta/sqrt(n)`.

    Shape: output and target `(B,)` or `(B, ...)`, equal. A target that is NaN counts as 0.

    >>> import torch
    >>> loss = Huber(delta=2.0)
    >>> loss(torch.tensor([0.0, 5.0]), torch.tensor([1.0, 1.0]))
    tensor(3.2500)
    >>> loss.lipschitz, loss.lipschitz_for((4,))
    (2.0, 1.0)
    """

    def __init__(self, delta: float = 1.0, *, reduction: Reduction = "mean") -> None:
        super().__init__(reduction=reduction)
        self.delta = require_positive("delta", delta)

    @property
    def lipschitz(self) -> float:
        """`delta`, the constant for one output; more outputs have a smaller one."""
        return self.delta

    def lipschitz_for(self, output_shape: Sequence[int]) -> float:
        """Return `delta/sqrt(n)` for an output of n numbers."""
        return self.delta / math.sqrt(output_count("Huber", output_shape))

    def per_example(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean Huber loss of every example."""
        output, target = regression_rows("Huber", output, target)
        return F.huber_loss(output, target, reduction="none", delta=self.delta).mean(dim=1)

    def extra_repr(self) -> str:
        """Describe the settings inside the module's printed form."""
        return f"delta={self.delta}, {super().extra_repr()}"


class SquaredError(Loss):
    """Squared error, summed over outputs, of output and target projected onto their balls.

    `||P(output) - Q(target)||^2`, where P and Q project onto the balls of radius `output_bound`
    (X) and `target_bound` (Y) about 0. Inside the balls this is the ordinary squared error, of
    gradient norm `2 ||output - target|| <= 2 (X + Y)`; outside it stays true, because P is
    1-Lipschitz. Choose the radii from public knowledge; the model's output bound is a good X, for
    an output beyond X learns its direction only, no longer its length.

    Shape: output and target `(B,)` or `(B, ...)`, equal. A target that is NaN counts as 0.

    >>> import torch
    >>> loss = SquaredError(output_bound=1.0, target_bound=2.0)
    >>> loss(torch.tensor([[0.6, 0.0]]), torch.tensor([[0.0, 0.8]]))
    tensor(1.)
    >>> loss.lipschitz
    6.0
    """

    def __init__(
        self, output_bound: float, target_bound: float, *, reduction: Reduction = "mean"
    ) -> None:
        super().__init__(reduction=reduction)
        self.output_bound = require_positive("output_bound", output_bound)
        self.target_bound = require_positive("target_bound", target_bound)

    @property
    def lipschitz(self) -> float:
        """`2 (output_bound + target_bound)` for any number of outputs."""
        return 2.0 * (self.output_bound + self.target_bound)

    def per_example(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the squared distance of every example."""
        output, target = regression_rows("SquaredError", output, target)
        output = scale_into_ball(output, self.output_bound)
        target = scale_into_ball(target, self.target_bound)
        return (output - target).square().sum(dim=1)

    def extra_repr(self) -> str:
        """Describe the settings inside the module's printed form."""
        settings = f"output_bound={self.output_bound}, target_bound={self.target_bound}"
        return f"{settings}, {super().extra_repr()}"
