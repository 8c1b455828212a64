"""Gaussian noise on a grid: `round(N(0, 1) * 2^28)`, as integers made from random words.

A cell of |N(0, 1)| is drawn from a table, a place within it by inverting the distribution function
there, and a sign. The place is a uniform word plus a correction, because the density within a cell
is not quite constant: of the word's 63 bits, 18 become part of the integer, and the other 45 see to
it that every integer has its probability to a relative error of 2^-40 (`docs/arithmetic.md`).
Nothing is rejected and no branch depends on a value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from clipless.kernels.randomness._chacha import KeyStream
from clipless.kernels.randomness._gaussian_table import CELL_BITS, LOW_BITS, WIDTH_BITS, cell_table

GRID_STEPS = 2**28
"""How many steps of its grid the standard deviation of noise is: the grid is public."""

_CELL_STEPS_BITS = 28 - WIDTH_BITS
_PLACE_BITS = 63
_SLOPE = 2.0**-20  # the square of a cell's width: b below
_AT_ONCE = 1 << 15
"""Samples that are made at a time: what they need stays in the processor's caches."""
_CELLS, _THRESHOLDS, _PLACES = 0, 1, 2
"""The three streams of words: which slot and sign, which candidate, which place."""
_STREAMS = 3


@torch.no_grad()
def add_grid_noise_(
    tensors: Sequence[Tensor], deviations: Sequence[float], stream: KeyStream
) -> None:
    """Round tensors to grids and add Gaussian noise of the given deviations, in place.

    The grid of a tensor is its deviation over 2^28. Rounding moves two neighbours apart by at most
    one step an entry, which whoever chooses the deviation has to account for.
    """
    for index, (tensor, deviation) in enumerate(zip(tensors, deviations, strict=True)):
        if deviation > 0:
            step = deviation / GRID_STEPS
            places = torch.round(tensor.to(torch.float64) / step).to(torch.int64)
            places += grid_noise(tensor.numel(), stream, index, tensor.device).view(places.shape)
            tensor.copy_(places.to(torch.float64).mul_(step))


def grid_noise(
    count: int, stream: KeyStream, index: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """Return `round(N(0, 1) * 2^28)` for each of `count` samples, (count,) int64.

    The same on every device: a function of the stream's key and the index.

    Example:
        >>> noise = grid_noise(1000, KeyStream(bytes(32)))
        >>> bool((noise.double() / GRID_STEPS).std() < 1.1)
        True
    """
    device = torch.device(device)
    if device.type == "cuda":
        kernels = _cuda_kernels()
        if kernels is not None:
            noise: Tensor = kernels.grid_noise(count, stream.key, index, device)
            return noise
    parts = [
        _drawn(min(_AT_ONCE, count - first), first, stream, index)
        for first in range(0, count, _AT_ONCE)
    ]
    noise = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
    return noise.to(device)


def _cuda_kernels() -> ModuleType | None:
    """The kernels for CUDA, if Triton is there."""
    try:
        from clipless.kernels.randomness import _triton_noise
    except ImportError:
        return None
    return _triton_noise


def _drawn(count: int, first: int, stream: KeyStream, index: int) -> Tensor:
    """Samples `first` to `first + count`; `first` is a multiple of what fills whole blocks."""

    def words(plane: int, each: int) -> Tensor:
        """`count` numbers, of which `each` are in a word."""
        found = stream.words(
            -(-count // each), purpose=plane, index=index, first_block=first // (8 * each)
        )
        return torch.from_numpy(found.view("<i4" if each == 2 else "<i8").copy())[:count]

    short = words(_CELLS, 2)  # a slot, 17 digits of chance, and a sign
    slots = (short & ((1 << CELL_BITS) - 1)).to(torch.int64)
    digits = (short >> CELL_BITS) & ((1 << LOW_BITS) - 1)
    chance = words(_THRESHOLDS, 1).bitwise_right_shift_(1).bitwise_and_((1 << 63) - 1)
    place = words(_PLACES, 1).bitwise_right_shift_(1).bitwise_and_((1 << 63) - 1)
    table = cell_table(torch.device("cpu"))
    threshold = table.threshold.take(slots)
    own = (chance < threshold) | ((chance == threshold) & (digits < table.below.take(slots)))
    cells = torch.where(own, slots, table.other.take(slots))
    place -= _correction(cells, place)
    # Rounded to the nearest step: twice as fine first, since a half more could overflow.
    steps = ((place >> (_PLACE_BITS - _CELL_STEPS_BITS - 1)) + 1) >> 1
    steps += cells << _CELL_STEPS_BITS
    return torch.where(short < 0, -steps, steps)


def _correction(cells: Tensor, place: Tensor) -> Tensor:
    """Return how much nearer to zero than uniform a place within its cell is, in units of 2^-63.

    With q = u - 1/2 for a uniform u, the place within a cell of width w around x is s + 1/2 where s
    has the distribution function u for the density exp(-m s - b s^2 / 2), m = w x, b = w^2. Its
    series is q - (1/4 - q^2) R(q), with R as below; what is left out is below 2^-60 for x <= 8.
    """
    m = cells.to(torch.float64).add_(0.5).mul_(_SLOPE)
    q = place.sub(1 << 62).to(torch.float64).mul_(2.0**-63)
    b, m2 = _SLOPE, m * m
    c0 = m * (m2 * (m2 * (1 / 720) + (-1 / 48 + 5 * b / 1152)) + (1 / 2 - b / 32 + b * b / 768))
    c1 = m2 * (m2 * (m2 * (17 / 5040) + (-1 / 30 + 29 * b / 2240)) + (1 / 3 - 17 * b / 240))
    c1 += b / 6 - b * b / 160
    c2 = m * (m2 * (m2 * (-1 / 24) + (1 / 4 - 43 * b / 360)) + (7 * b / 24 - 59 * b * b / 1440))
    c3 = m2 * (m2 * (m2 * (-1 / 21) + (1 / 5 - 11 * b / 63)) + 23 * b / 60) + 7 * b * b / 120
    c4 = m * (m2 * (m2 * (1 / 6) + 163 * b / 360) + 127 * b * b / 720)
    c5 = m2 * m2 * (m2 * (1 / 7) + 71 * b / 140)
    r = torch.addcmul(c4, c5, q)
    for coefficient in (c3, c2, c1, c0):
        r = torch.addcmul(coefficient, r, q)
    bell = torch.addcmul(torch.full_like(q, 0.25), q, q, value=-1)
    return r.mul_(bell).mul_(2.0**63).round_().to(torch.int64)


def joint_grid_factor(multiplier: float, entries: int) -> float:
    """Return by how much deviations must grow so that rounding to grids costs nothing.

    Rounding moves each of `entries` numbers of two neighbours apart by one step, which is 2^-28 of
    its deviation (an eighth more, for the rounding of the division). In units of deviations, one
    record then moves the release by `1 / multiplier` and by `1.125 sqrt(entries) 2^-28` more at
    most: the triangle inequality over all tensors that are released together.
    """
    moved = 1.125 * math.sqrt(entries) / GRID_STEPS * multiplier
    if not moved < 0.5:
        raise ValueError(
            f"a noise multiplier of {multiplier:g} on {entries} numbers is more than the grid of "
            "the noise allows; nothing is learned at such a multiplier. Take a smaller one."
        )
    return 1 / (1 - moved)
