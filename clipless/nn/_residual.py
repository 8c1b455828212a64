"""Residual connections."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn


class Residual(nn.Module):
    """`(x + block(x)) / 2` (`"average"`, 1-Lipschitz around a 1-Lipschitz block) or `x + block(x)`.

    This is ordinary code. The bounds follow from tracing it, and would for the same line written
    in any other module.
    """

    def __init__(self, block: nn.Module, mode: Literal["average", "add"] = "average") -> None:
        super().__init__()
        if mode not in ("average", "add"):
            raise ValueError(f'mode must be "average" or "add", got {mode!r}')
        self.block = block
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ...) -> the same shape, which the block must preserve."""
        total: Tensor = x + self.block(x)
        return total * 0.5 if self.mode == "average" else total

    def extra_repr(self) -> str:
        """The arguments, for printing."""
        return f"mode={self.mode!r}"
