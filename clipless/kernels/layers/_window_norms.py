"""Euclidean norms over windows and over all positions of images, and their gradients by hand.

With y = ||x|| / sqrt(m) over a window, dy/dx = x / (m y), and zero where y is zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from clipless.kernels._dispatch import dense, kernels_for, layout_of
from clipless.kernels.layers._memory import run_in_blocks

_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class WindowNorms:
    """Norms of windows of images (batch, channels, height, width), over `sqrt(multiplicity)`."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    multiplicity: int

    def plain(self, x: Tensor) -> Tensor:
        """By average pooling of the squares."""
        return safe_sqrt(F.avg_pool2d(x * x, *self._geometry) * self._gain)

    def forward(self, x: Tensor) -> Tensor:
        """In one pass over memory if windows tile the image."""
        if not self._in_one_pass(x):
            return self.averages(x)
        x = dense(x)
        kernels = kernels_for(x)
        size = [n // k for n, k in zip(x.shape[2:], self.kernel, strict=True)]
        norms = torch.empty(
            (*x.shape[:2], *size), dtype=x.dtype, device=x.device, memory_format=layout_of(x)
        )
        if kernels is not None:
            kernels.pool(x, norms, self.kernel, _negligible(x.dtype))
            return norms
        planes, targets = _planes(x.detach(), norms, layout=layout_of(x))
        rows, columns = self.lines(x)
        lines = [planes[:, row] for row in rows]

        def work(part: slice) -> None:
            energy = torch.square(wide(lines[0][part]))
            for line in lines[1:]:
                row = wide(line[part])
                energy.addcmul_(row, row)
            energy = _sum([energy[:, :, column] for column in columns])
            targets[part] = finish(energy, x.dtype)

        run_in_blocks(work, len(planes), entries=lines[0][0].numel())
        return norms

    def backward(self, x: Tensor, norms: Tensor, cotangent: Tensor) -> Tensor:
        """Every entry of x times `cotangent / (m norm)` of its windows."""
        if not self._in_one_pass(x):
            return self.averages_backward(x, norms, cotangent)
        x = dense(x)
        kernels = kernels_for(x)
        gradient = torch.empty_like(x)
        if kernels is not None:
            cotangent = cotangent.contiguous(memory_format=layout_of(x))
            kernels.spread(x, norms, cotangent, gradient, self.kernel)
            return gradient
        height, width = (n - n % k for n, k in zip(x.shape[2:], self.kernel, strict=True))
        gradient[:, :, height:] = 0
        gradient[:, :, :, width:] = 0
        cotangent = cotangent.contiguous(memory_format=layout_of(x))
        planes, targets, norms, cotangent = _planes(
            x, gradient, norms, cotangent, layout=layout_of(x)
        )
        rows, columns = self.lines(x)
        cells = [(planes[:, i, j], targets[:, i, j]) for i in rows for j in columns]

        def work(part: slice) -> None:
            ratio = quotient(cotangent[part], norms[part])
            for entries, results in cells:
                torch.mul(entries[part], ratio, out=results[part])

        run_in_blocks(work, len(planes), entries=norms[0].numel())
        return gradient

    def averages(self, x: Tensor) -> Tensor:
        """The norms by average pooling, for windows of any kind."""
        squares = wide(x) * wide(x)
        return finish(F.avg_pool2d(squares, *self._geometry) * self._gain, x.dtype)

    def averages_backward(self, x: Tensor, norms: Tensor, cotangent: Tensor) -> Tensor:
        """The gradient by the backward pass of average pooling."""
        spread = torch.ops.aten.avg_pool2d_backward(
            quotient(cotangent, norms) * self._gain, wide(x), *self._geometry, False, True, None
        )
        return (spread * x).to(x.dtype)

    @property
    def _geometry(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        return self.kernel, self.stride, self.padding

    @property
    def _gain(self) -> float:
        """From the mean of squares to the square of the result: w / m."""
        return math.prod(self.kernel) / self.multiplicity

    @property
    def tiles(self) -> bool:
        """Whether windows lie side by side, without padding."""
        return self.kernel == self.stride and self.padding == (0, 0)

    def _in_one_pass(self, x: Tensor) -> bool:
        return self.tiles and (x.device.type == "cpu" or kernels_for(x) is not None)

    def spread(self, values: Tensor, x: Tensor) -> Tensor:
        """Repeat a value for every window over it, and zeros over what no window of `x` covers."""
        rows, columns = self.kernel
        windows = values[:, :, :, None, :, None].expand(-1, -1, -1, rows, -1, columns)
        image = windows.flatten(4, 5).flatten(2, 3)
        below, beside = x.shape[2] % rows, x.shape[3] % columns
        return F.pad(image, (0, beside, 0, below)) if below or beside else image

    def lines(self, x: Tensor) -> tuple[list[slice], list[slice]]:
        """The first, second, ... rows of all windows that tile an image, and their columns."""
        rows, columns = (
            [slice(first, size - size % k, k) for first in range(k)]
            for size, k in zip(x.shape[2:], self.kernel, strict=True)
        )
        return rows, columns


@dataclass(frozen=True)
class GlobalNorms:
    """Norms over all positions: (batch, channels, *size) -> (batch, channels)."""

    def plain(self, x: Tensor) -> Tensor:
        """By a sum of squares."""
        positions = x.flatten(2)
        return safe_sqrt((positions * positions).sum(dim=-1))

    def forward(self, x: Tensor) -> Tensor:
        """By a sum of squares, in float32 at least."""
        positions = wide(x).flatten(2)
        return finish((positions * positions).sum(dim=-1), x.dtype)

    def backward(self, x: Tensor, norms: Tensor, cotangent: Tensor) -> Tensor:
        """Every entry of x times `cotangent / norm`."""
        ratio = quotient(cotangent, norms)
        return (x * ratio.reshape(*ratio.shape, *([1] * (x.ndim - 2)))).to(x.dtype)


def wide(x: Tensor) -> Tensor:
    """`x` in a precision in which its squares are summed."""
    return x.float() if x.dtype in _HALVES else x


def _negligible(dtype: torch.dtype) -> float:
    """The energy up to which a norm is taken to be zero; norms are not to be lost in rounding.

    Below 1e-31, float32 squares have lost so many bits that x / ||x|| could exceed one.
    """
    return max(1e-31, torch.finfo(dtype).tiny ** 2)


def finish(energy: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn energies into norms."""
    norms = F.threshold(energy, _negligible(dtype), 0.0).sqrt()
    # Where the result is changed in place, or is itself under another name (`to` its own dtype),
    # torch 2.11 compiles a backward pass of zeros.
    return norms if norms.dtype == dtype else norms.to(dtype)


def _sum(parts: list[Tensor]) -> Tensor:
    """The sum of a few tensors, without copies of any."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def quotient(cotangent: Tensor, norms: Tensor) -> Tensor:
    """`cotangent / norm`, and zero where the norm is."""
    return wide(cotangent) / F.threshold(wide(norms), 0.0, math.inf)


def safe_sqrt(energy: Tensor) -> Tensor:
    """Return the square root, with value and derivative zero where the energy is negligible."""
    negligible = energy <= 1e-31
    return torch.where(negligible, 0.0, torch.where(negligible, 1.0, energy).sqrt())


def _planes(*images: Tensor, layout: torch.memory_format) -> list[Tensor]:
    """See images as (planes, height, width, entries at a position), as they lie in memory."""
    if layout == torch.channels_last:
        return [image.permute(0, 2, 3, 1) for image in images]
    return [image.flatten(0, 1).unsqueeze(-1) for image in images]
