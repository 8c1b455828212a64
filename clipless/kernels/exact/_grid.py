"""Rounding examples to public grids, such that no example's bound is exceeded by the rounding.

A row's activations x are divided by their largest entry and rounded to 8 bits; its cotangents g are
multiplied by that entry and rounded to 16 bits, on one grid for all rows. What a row adds to a
weight's gradient is then `unit sum_t g_t x_t^T` of integers, with a unit that is public, and the
sum over rows is a sum of integers, which no order of summation changes.

The bound `||g|| ||p||`, p all patches of x, is taken of the integers: `||g||^2 ||p||^2` may be
`square` at most, a whole number too. A row above it is rounded anew from smaller cotangents, and
what may still be too large is cut towards zero, which makes every entry smaller. So rounding costs
no slack.

Rounding is stochastic, which keeps sums unbiased where the grid is coarse. Its bits are a hash of
the scaled entry and its place in the row. They are no secret: bounds hold whatever they are, and a
row's depend on nothing but the row, so that neighbours agree on all rows but one, and the sum is
the same in whatever order and whatever batches rows are taken.

This file is the arithmetic of `_triton_exact`, bit for bit, in torch's operators.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

LARGEST_INPUT = 127
LARGEST_COTANGENT = 127 * 256
"""Of which the limbs are 127 and 128 in size at most: `256 high + low`."""
FRACTION = 1 << 16
"""Into so many steps a step of a grid is divided before it is decided whether to round up."""
LEAST = 2.0**-96
"""Rows whose largest entry is smaller are taken for empty: `2^31 / LEAST` fits into float32."""
LEAST_LIMIT = 2.0**-900
"""A step of the grid of a smaller limit may not be a normal number, and have few digits."""
_STEPS = 4064.0
_LEAST_STEPS = 16.0
_MARGIN = 1 - 2.0**-20
"""More than float32 rounds by where a row is made smaller."""
_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Layout:
    """How channels of an image, or features of positions, lie in memory once they are integers."""

    groups: int
    channels: int
    """In a group."""
    multiple: int

    @property
    def padded(self) -> int:
        """The channels of a group with padding, so that a few at a time can be read."""
        few = 1 << max(self.channels - 1, 3).bit_length()
        whole = -(-self.channels // self.multiple) * self.multiple
        return few if self.channels < self.multiple else whole


@dataclass(frozen=True)
class Grid:
    """The public numbers of one layer's sum."""

    square: int
    """What `||g||^2 ||p||^2` of a row's integers may be."""
    unit: float
    """What a product of integers stands for: `unit sqrt(square)` is the bound."""
    multiplier: float
    """Cotangents are multiplied by this, over the multiplier of their row's activations."""
    reserve: float
    """By how much rounding makes the square of the norm of cotangents larger, at most a little."""


@functools.lru_cache(maxsize=1024)
def grid_of(*, limit: float, inputs: int, outputs: int) -> Grid:
    """Return the grid of a layer whose rows have so many entries of patches, and of cotangents.

    Where all activations of a row are alike in size, a cotangent at the bound has entries of
    `4064 / sqrt(outputs)` steps, at least 16: so 16 bits hold it also if all of it is in one entry,
    and the activations' largest entry is 8 times what it is on average.
    """
    if not limit >= LEAST_LIMIT:
        raise ValueError(f"limit must be {LEAST_LIMIT:.0e} at least, got {limit}")
    steps = max(_LEAST_STEPS, _STEPS / math.sqrt(outputs))
    root = min(LARGEST_INPUT * steps * math.sqrt(inputs * outputs), 2.0**31 - 1)
    square = int(root) ** 2
    unit = limit / int(root) * (1 - 2.0**-50)
    multiplier = min(FRACTION**2 / unit, torch.finfo(torch.float32).max)
    return Grid(square, unit, _float32(multiplier), _float32(0.3 * outputs))


def _float32(number: float) -> float:
    """The number as kernels will see it."""
    return float(torch.tensor(number, dtype=torch.float64).float())


def input_integers(
    x: Tensor,
    *,
    padding: tuple[int, int],
    layout: Layout,
    counts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Round (batch, channels, height, width) to (batch, height, width, groups, channels) of int64.

    Padded. Also returned are each row's multiplier, times `FRACTION`, -1 for a row that is not
    finite, and the squared norm of its patches: each square counts as often as `counts`, (height,
    width), says; once if that is None.
    """
    laid = _laid_out(x, padding, layout)
    largest, usable = _largest(laid)
    multiplier = _where_usable(usable, _quotient(LARGEST_INPUT * FRACTION, _ones(usable, largest)))
    multiplier = torch.where(largest < torch.inf, multiplier, -1.0)
    rounded = _rounded(laid, multiplier, LARGEST_INPUT)
    if counts is None:
        return rounded, multiplier, _squares(rounded)
    lines = rounded.square().flatten(3).sum(dim=3)
    return rounded, multiplier, (lines * counts).flatten(1).sum(dim=1)


def cotangent_integers(
    cotangent: Tensor,
    multiplier: Tensor,
    squares: Tensor,
    grid: Grid,
    shares: Tensor | None,
    *,
    layout: Layout,
) -> tuple[Tensor, Tensor]:
    """Round cotangents such that no row exceeds its bound, given its activations' integers.

    Returns them as (batch, height, width, groups, channels) of int64, and which rows were too large
    or not finite. `shares`: by which rows are multiplied beside, and their bounds.
    """
    laid = _laid_out(cotangent, (0, 0), layout)
    largest, usable = _largest(laid)
    finite = (largest < torch.inf) & (multiplier >= 0)
    usable = usable & (squares > 0)
    limits = torch.full_like(squares, grid.square) if shares is None else row_squares(grid, shares)
    allowed = limits // squares.clamp(min=1)
    wanted = torch.tensor(grid.multiplier, dtype=torch.float32, device=largest.device)
    if shares is not None:
        wanted = wanted * shares.to(torch.float32)
    wanted = wanted / _ones(usable, multiplier)
    most = _quotient(LARGEST_COTANGENT * FRACTION, _ones(usable, largest))
    multiplier = _where_usable(usable, torch.minimum(wanted, most))
    rounded = _rounded(laid, multiplier, LARGEST_COTANGENT)
    found = _squares(rounded)
    outside = (found > allowed) | (usable & (wanted > most)) | ~finite
    if bool((found > allowed).any()):
        room = allowed.float()
        root = _root(room)
        target = torch.maximum(((room - grid.reserve) - root) - root, 0.5 * room)
        smaller = torch.where(found > allowed, _root(target / _ones(found > 0, found.float())), 1.0)
        rounded = _rounded(laid, multiplier * smaller, LARGEST_COTANGENT)
        found = _squares(rounded)
        cut = _root(room / _ones(found > 0, found.float())) * _MARGIN
        towards_zero = (rounded.float() * _by_row(cut, rounded)).to(torch.int64)
        rounded = torch.where(_by_row(found > allowed, rounded), towards_zero, rounded)
    return rounded, outside


def row_squares(grid: Grid, shares: Tensor) -> Tensor:
    """Return what `||g||^2 ||p||^2` of rows with shares may be, whole numbers."""
    return (grid.square * shares.double().square() * (1 - 2.0**-40)).to(torch.int64)


def _laid_out(x: Tensor, padding: tuple[int, int], layout: Layout) -> Tensor:
    high, wide = padding
    grouped = x.float().unflatten(1, (layout.groups, layout.channels)).permute(0, 3, 4, 1, 2)
    more = layout.padded - layout.channels
    return F.pad(grouped, (0, more, 0, 0, wide, wide, high, high))


def _largest(laid: Tensor) -> tuple[Tensor, Tensor]:
    """The largest entry of each row, infinite if one is not finite, and whether it is of use."""
    size = laid.flatten(1).abs()
    size = torch.where(size < torch.inf, size, torch.inf)
    largest = size.amax(dim=1) if size.shape[1] else size.new_zeros(len(size))
    return largest, (largest >= LEAST) & (largest < torch.inf)


def _rounded(laid: Tensor, multiplier: Tensor, most: int) -> Tensor:
    used = _by_row(multiplier > 0, laid)
    scaled = torch.where(used, laid * _by_row(multiplier, laid), 0.0).contiguous()
    place = torch.arange(laid.shape[1:].numel(), device=laid.device).view(laid.shape[1:])
    mixed = (scaled.view(torch.int32).to(torch.int64) ^ (place * 0x9E3779B1)) & _MASK
    mixed = ((mixed ^ (mixed >> 16)) * 0x7FEB352D) & _MASK
    mixed = ((mixed ^ (mixed >> 15)) * 0x846CA68B) & _MASK
    return ((scaled.to(torch.int64) + (mixed >> 16)) >> 16).clamp(-most, most)


def _squares(rounded: Tensor) -> Tensor:
    return rounded.square().flatten(1).sum(dim=1)


def _root(values: Tensor) -> Tensor:
    """The square root, rounded once: that of float32 numbers on a CPU may be off by two digits."""
    return values.double().sqrt().float()


def _by_row(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.ndim - 1))


def _quotient(number: int, values: Tensor) -> Tensor:
    """A number over values, rounded once: torch's own `number / values` multiplies by inverses."""
    return torch.full_like(values, number) / values


def _ones(usable: Tensor, values: Tensor) -> Tensor:
    return torch.where(usable, values, 1.0)


def _where_usable(usable: Tensor, values: Tensor) -> Tensor:
    return torch.where(usable, values, 0.0)
