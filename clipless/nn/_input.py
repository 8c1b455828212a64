"""`BoundedInput`, the input guard: its outputs are finite and of bounded norm."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from clipless.common import require_positive
from clipless.kernels import make_finite_and_bounded


class BoundedInput(nn.Module):
    """Bring every example to norm at most `norm` (`"clip"`) or exactly `norm` (`"sphere"`).

    NaN and infinite entries become zeros, so one bad record changes nothing but its own part of
    the sum. Put it first: all sensitivities follow from this norm. `"clip"` is a projection onto a
    ball and 1-Lipschitz on finite inputs. `"sphere"` makes better use of the noise when norms vary
    little in meaning, but has no Lipschitz constant; certificates in the units of the raw input
    then take each example's own norm into account. An all-zero example stays zero.

    Example:
        >>> BoundedInput(1.0)(torch.tensor([[3.0, 4.0], [0.3, float("nan")]]))
        tensor([[0.6000, 0.8000],
                [0.3000, 0.0000]])
    """

    def __init__(self, norm: float, mode: Literal["clip", "sphere"] = "clip") -> None:
        super().__init__()
        if mode not in ("clip", "sphere"):
            raise ValueError(f'mode must be "clip" or "sphere", got {mode!r}')
        self.norm = require_positive("norm", norm)
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ...) -> the same shape, every example of norm at most `norm`."""
        return make_finite_and_bounded(x, self.norm, sphere=self.mode == "sphere")

    def extra_repr(self) -> str:
        """The arguments, for printing."""
        return f"norm={self.norm:g}, mode={self.mode!r}"
