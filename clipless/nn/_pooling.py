"""Pooling layers scaled to be exactly 1-Lipschitz.

With w cells in a window and a pixel in at most m windows, average pooling is sqrt(m / w)-Lipschitz
and L2-norm pooling sqrt(m)-Lipschitz; "scaled" layers divide by just that. Padding is zeros, and
is counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from clipless.kernels import GlobalNorms, WindowNorms, euclidean_norms
from clipless.kernels import safe_sqrt as safe_sqrt  # for pooling layers elsewhere
from clipless.spectral import patch_multiplicity

Size = int | Sequence[int]


class WindowPoolBase(nn.Module):
    axes: ClassVar[int]

    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> None:
        super().__init__()
        self.kernel_size = self._per_axis("kernel_size", kernel_size, least=1)
        self.stride = self._per_axis("stride", kernel_size if stride is None else stride, least=1)
        self.padding = self._per_axis("padding", padding, least=0)
        if any(2 * p > k for p, k in zip(self.padding, self.kernel_size, strict=True)):
            raise ValueError(
                f"padding {self.padding} exceeds half of kernel_size {self.kernel_size}"
            )

    @property
    def window(self) -> int:
        """Number of cells in a window: w."""
        return math.prod(self.kernel_size)

    @property
    def multiplicity(self) -> int:
        """In how many windows one pixel can lie: m."""
        return patch_multiplicity(self.kernel_size, self.stride, (1,) * self.axes)

    def _check_fits(self, x: Tensor) -> None:
        """Refuse images in which there is no room for a window: the result would be empty."""
        if not isinstance(x, Tensor):  # symbolic tracing: there is no size yet
            return
        size = x.shape[2:]
        padded = [n + 2 * p for n, p in zip(size, self.padding, strict=False)]
        if len(size) != self.axes or any(
            n < k for n, k in zip(padded, self.kernel_size, strict=True)
        ):
            raise ValueError(
                f"{type(self).__name__} takes (batch, channels, *size) with {self.axes} axes of at "
                f"least {self.kernel_size} cells, padding {self.padding} included, and got an "
                f"input of shape {tuple(x.shape)}. Use a smaller kernel_size, or pool fewer times."
            )

    def _average(self, x: Tensor) -> Tensor:
        function = F.avg_pool1d if self.axes == 1 else F.avg_pool2d
        return function(x, self.kernel_size, self.stride, self.padding)

    def _per_axis(self, name: str, value: Size, *, least: int) -> tuple[int, ...]:
        values = (value,) * self.axes if isinstance(value, int) else tuple(value)
        if len(values) != self.axes or any(not isinstance(v, int) or v < least for v in values):
            raise ValueError(f"{name} must be {self.axes} integer(s) >= {least}, got {value!r}")
        return values

    def extra_repr(self) -> str:
        """The arguments, for printing."""
        return f"{self.kernel_size}, stride={self.stride}, padding={self.padding}"


class _AvgPool(WindowPoolBase):
    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, *size) -> (batch, channels, *size')."""
        self._check_fits(x)
        return self._average(x) * math.sqrt(self.window / self.multiplicity)


class L2NormPoolBase(WindowPoolBase):
    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, *size) -> (batch, channels, *size')."""
        self._check_fits(x)
        if self.axes == 2:
            return euclidean_norms(x, self._norms())
        return euclidean_norms(x.unsqueeze(-2), self._norms()).squeeze(-2)

    def _norms(self) -> WindowNorms:
        """The windows; those of a sequence are windows of an image of height one."""
        ones, zeros = (1,) * (2 - self.axes), (0,) * (2 - self.axes)
        return WindowNorms(
            kernel=(*ones, *self.kernel_size),  # type: ignore[arg-type]
            stride=(*ones, *self.stride),  # type: ignore[arg-type]
            padding=(*zeros, *self.padding),  # type: ignore[arg-type]
            multiplicity=self.multiplicity,
        )


class ScaledAvgPool1d(_AvgPool):
    """Average pooling of sequences times `sqrt(w / m)`: 1-Lipschitz."""

    axes = 1


class ScaledAvgPool2d(_AvgPool):
    """Average pooling of images times `sqrt(w / m)`: 1-Lipschitz, and tight on constant windows.

    Example:
        >>> ScaledAvgPool2d(2)(torch.ones(1, 1, 2, 2))
        tensor([[[[2.]]]])
    """

    axes = 2


class ScaledL2NormPool1d(L2NormPoolBase):
    """The Euclidean norm of every window of a sequence, over `sqrt(m)`: 1-Lipschitz."""

    axes = 1


class ScaledL2NormPool2d(L2NormPoolBase):
    """The Euclidean norm of every window of an image, over `sqrt(m)`: 1-Lipschitz.

    Without overlap it preserves the norm of the input exactly. At a zero window its derivative is
    taken to be zero.

    Example:
        >>> ScaledL2NormPool2d(2)(torch.ones(1, 1, 2, 2))
        tensor([[[[2.]]]])
    """

    axes = 2


class GlobalAvgPoolBase(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, *size) -> (batch, channels)."""
        positions = x.flatten(2)
        return positions.sum(dim=-1) * positions.size(-1) ** -0.5


class GlobalL2NormPoolBase(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, *size) -> (batch, channels)."""
        return euclidean_norms(x, GlobalNorms())


class ScaledGlobalAvgPool1d(GlobalAvgPoolBase):
    """The sum over a sequence divided by the root of its length: 1-Lipschitz."""


class ScaledGlobalAvgPool2d(GlobalAvgPoolBase):
    """The sum over all pixels divided by the root of their number: 1-Lipschitz."""


class ScaledGlobalL2NormPool1d(GlobalL2NormPoolBase):
    """The Euclidean norm over a sequence, channel by channel: 1-Lipschitz."""


class ScaledGlobalL2NormPool2d(GlobalL2NormPoolBase):
    """The Euclidean norm over all pixels, channel by channel: 1-Lipschitz."""
