"""Euclidean norms of windows, with a backward pass that keeps nothing but input and output.

With y = ||x|| / sqrt(m) over a window, dy/dx = x / (m y), and zero where y is zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from clipless._kernels import kernels_for
from clipless._layout import dense, layout_of
from clipless._watched import compiled, watched
from clipless.nn._parts import in_parts

_HALVES = (torch.float16, torch.bfloat16)


class Norms(Protocol):
    """Euclidean norms of parts of every example's channels."""

    def plain(self, x: Tensor) -> Tensor:
        """The norms of `x`, float32 or float64, in torch operators that autograd understands."""

    def forward(self, x: Tensor) -> Tensor:
        """The norms of `x`."""

    def backward(self, x: Tensor, norms: Tensor, cotangent: Tensor) -> Tensor:
        """The gradient of `x`."""


def euclidean_norms(x: Tensor, norms: Norms) -> Tensor:
    """Return `norms` of `x`. Half precisions are squared and summed in float32."""
    if compiled() and isinstance(norms, WindowNorms):
        traced: Tensor = _TracedNorms.apply(x, norms)  # type: ignore[no-untyped-call]
        return traced
    if not watched(x) and x.numel() > 0:
        result: Tensor = _EuclideanNorms.apply(x, norms)  # type: ignore[no-untyped-call]
        return result
    if isinstance(x, Tensor) and x.dtype in _HALVES:
        return norms.plain(x.float()).to(x.dtype)
    return norms.plain(x)


class _EuclideanNorms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norms: Norms) -> Tensor:
        result = norms.forward(x)
        ctx.save_for_backward(x, result)
        ctx.norms = norms
        return result

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        (cotangent,) = cotangents
        x, result = ctx.saved_tensors
        norms: Norms = ctx.norms
        further = torch.is_grad_enabled()
        if not further and not watched(cotangent):
            return norms.backward(x, result, cotangent), None
        # A derivative of the derivative is wanted, or cotangents come in batches.
        with torch.enable_grad():
            value = norms.plain(x.float() if x.dtype in _HALVES else x).to(x.dtype)
            (gradient,) = torch.autograd.grad(value, x, cotangent, create_graph=further)
        return gradient, None


class _TracedNorms(torch.autograd.Function):
    """The same for compilers: left to themselves, they would keep the squares as well."""

    @staticmethod
    def forward(x: Tensor, norms: Norms) -> Tensor:
        return norms.forward(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, ctx.norms = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        norms: Norms = ctx.norms
        return norms.backward(*ctx.saved_tensors, *cotangents), None


@dataclass(frozen=True)
class WindowNorms:
    """Norms of windows of images (batch, channels, height, width), over `sqrt(multiplicity)`."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    multiplicity: int

    def plain(self, x: Tensor) -> Tensor:
        """By average pooling of the squares."""
        return root(F.avg_pool2d(x * x, *self._geometry) * self._gain)

    def forward(self, x: Tensor) -> Tensor:
        """In one pass over memory if windows tile the image."""
        if torch.compiler.is_compiling() or not self._in_one_pass(x):
            wide = _wide(x)
            return _finish(F.avg_pool2d(wide * wide, *self._geometry) * self._gain, x.dtype)
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
        rows, columns = self._lines(x)
        lines = [planes[:, row] for row in rows]

        def work(part: slice) -> None:
            energy = torch.square(_wide(lines[0][part]))
            for line in lines[1:]:
                row = _wide(line[part])
                energy.addcmul_(row, row)
            energy = _sum([energy[:, :, column] for column in columns])
            targets[part] = _finish(energy, x.dtype)

        in_parts(work, len(planes), entries=lines[0][0].numel())
        return norms

    def backward(self, x: Tensor, norms: Tensor, cotangent: Tensor) -> Tensor:
        """Every entry of x times `cotangent / (m norm)` of its windows."""
        if torch.compiler.is_compiling() and self._tiles:
            return (x * self._spread(_ratio(cotangent, norms), x)).to(x.dtype)
        if torch.compiler.is_compiling() or not self._in_one_pass(x):
            spread = torch.ops.aten.avg_pool2d_backward(
                _ratio(cotangent, norms) * self._gain, _wide(x), *self._geometry,
                False, True, None,
            )  # fmt: skip
            return (spread * x).to(x.dtype)
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
        rows, columns = self._lines(x)
        cells = [(planes[:, i, j], targets[:, i, j]) for i in rows for j in columns]

        def work(part: slice) -> None:
            ratio = _ratio(cotangent[part], norms[part])
            for entries, results in cells:
                torch.mul(entries[part], ratio, out=results[part])

        in_parts(work, len(planes), entries=norms[0].numel())
        return gradient

    @property
    def _geometry(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        return self.kernel, self.stride, self.padding

    @property
    def _gain(self) -> float:
        """From the mean of squares to the square of the result: w / m."""
        return math.prod(self.kernel) / self.multiplicity

    @property
    def _tiles(self) -> bool:
        return self.kernel == self.stride and self.padding == (0, 0)

    def _in_one_pass(self, x: Tensor) -> bool:
        return self._tiles and (x.device.type == "cpu" or kernels_for(x) is not None)

    def _spread(self, ratio: Tensor, x: Tensor) -> Tensor:
        """Repeat every entry over its window, and zeros over what no window covers."""
        rows, columns = self.kernel
        windows = ratio[:, :, :, None, :, None].expand(-1, -1, -1, rows, -1, columns)
        image = windows.flatten(4, 5).flatten(2, 3)
        below, beside = x.shape[2] % rows, x.shape[3] % columns
        return F.pad(image, (0, beside, 0, below)) if below or beside else image

    def _lines(self, x: Tensor) -> tuple[list[slice], list[slice]]:
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
        return root((positions * positions).sum(dim=-1))

    def forward(self, x: Tensor) -> Tensor:
        """By a sum of squares, in float32 at least."""
        positions = _wide(x).flatten(2)
        return _finish((positions * positions).sum(dim=-1), x.dtype)

    def backward(self, x: Tensor, norms: Tensor, cotangent: Tensor) -> Tensor:
        """Every entry of x times `cotangent / norm`."""
        ratio = _ratio(cotangent, norms)
        return (x * ratio.reshape(*ratio.shape, *([1] * (x.ndim - 2)))).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in _HALVES else x


def _negligible(dtype: torch.dtype) -> float:
    """The energy up to which a norm is taken to be zero; norms are not to be lost in rounding.

    Below 1e-31, float32 squares have lost so many bits that x / ||x|| could exceed one.
    """
    return max(1e-31, torch.finfo(dtype).tiny ** 2)


def _finish(energy: Tensor, dtype: torch.dtype) -> Tensor:
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


def _ratio(cotangent: Tensor, norms: Tensor) -> Tensor:
    """`cotangent / norm`, and zero where the norm is."""
    return _wide(cotangent) / F.threshold(_wide(norms), 0.0, math.inf)


def root(energy: Tensor) -> Tensor:
    """Square root that is zero, with derivative zero, where the energy is zero or negligible."""
    negligible = energy <= 1e-31
    return torch.where(negligible, 0.0, torch.where(negligible, 1.0, energy).sqrt())


def _planes(*images: Tensor, layout: torch.memory_format) -> list[Tensor]:
    """See images as (planes, height, width, entries at a position), as they lie in memory."""
    if layout == torch.channels_last:
        return [image.permute(0, 2, 3, 1) for image in images]
    return [image.flatten(0, 1).unsqueeze(-1) for image in images]
