"""The input guard: whatever arrives, what leaves is finite and of bounded norm."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from clipless._arguments import positive
from clipless._geometry import scale_into_ball


class BoundedInput(nn.Module):
    """Bring every example to norm at most `norm` (`"clip"`) or exactly `norm` (`"sphere"`).

    NaN and infinite entries become zeros, so one bad record changes nothing but its own part of
    the sum. Put it first: all sensitivities follow from this norm. `"clip"` is a projection onto a
    ball and 1-Lipschitz on finite inputs. `"sphere"` makes better use of the noise when norms vary
    little in meaning, but has no Lipschitz constant: a network behind it carries no robustness
    certificate in the units of its raw input. An all-zero example stays zero.

    Example:
        >>> BoundedInput(1.0)(torch.tensor([[3.0, 4.0], [0.3, float("nan")]]))
        tensor([[0.6000, 0.8000],
                [0.3000, 0.0000]])
    """

    def __init__(self, norm: float, mode: Literal["clip", "sphere"] = "clip") -> None:
        super().__init__()
        if mode not in ("clip", "sphere"):
            raise ValueError(f'mode must be "clip" or "sphere", got {mode!r}')
        self.norm = positive("norm", norm)
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ...) -> the same shape, every example of norm at most `norm`."""
        finite = torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
        if self.mode == "clip":
            return scale_into_ball(finite, self.norm)
        flat = finite.unsqueeze(-1).flatten(1)
        # Entries are scaled to at most one first: their squares neither overflow nor vanish.
        largest = flat.detach().abs().amax(dim=1, keepdim=True)
        unit = flat / torch.where(largest > 0, largest, 1.0)
        length = torch.linalg.vector_norm(unit, dim=1, keepdim=True)
        return (unit * (self.norm / torch.where(length > 0, length, 1.0))).view_as(x)

    def extra_repr(self) -> str:
        """The arguments, for printing."""
        return f"norm={self.norm:g}, mode={self.mode!r}"
