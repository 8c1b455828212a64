"""Where a Gaussian lies, in exact numbers: the probabilities of cells, as a table to draw from.

|N(0, 1)| is cut into cells of width 2^-10, up to 16: beyond lies less than 2^-188. A cell is drawn
by the alias method: one of two candidates, by one comparison, whatever the numbers are, so that the
time it takes tells nothing. Probabilities are integers of unit 2^-77, computed from integers alone;
their errors add up to less than 2^-62 of probability.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

CELL_BITS = 14
"""There are 2^14 cells."""
WIDTH_BITS = 10
"""A cell is 2^-10 of a standard deviation wide."""
THRESHOLD_BITS = 63

_POINT = 200
"""Binary digits behind the point of the fixed-point numbers below."""
_ONE = 1 << _POINT


class CellTable(NamedTuple):
    """The alias table: slot i stands for cell i below its threshold, and for another above it."""

    threshold: Tensor
    """(cells,) int64, of 2^63."""
    other: Tensor
    """(cells,) int64."""


@functools.cache
def cell_table(device: torch.device) -> CellTable:
    """Return the table on a device."""
    threshold, other = _alias(cell_probabilities())
    return CellTable(
        torch.tensor(threshold, dtype=torch.int64, device=device),
        torch.tensor(other, dtype=torch.int64, device=device),
    )


@functools.cache
def cell_probabilities() -> tuple[int, ...]:
    """Return the probability of each cell of |N(0, 1)|, in units of 2^-77; they sum to 2^77.

    The integral of the density over a cell around its centre x is, with h half its width,
    `2 h phi(x) sum_k He_2k(x) h^2k / (2k + 1)!`; densities follow from their neighbours'.
    """
    half_bits = WIDTH_BITS + 1  # h = 2^-11, and centres are odd multiples of it
    # phi(x + w) = phi(x) exp(-x w - w^2 / 2), and that factor shrinks by exp(-w^2) each time.
    density = _exp_minus(_ONE >> (2 * half_bits + 1))
    factor = _exp_minus(2 * (_ONE >> (2 * half_bits)) + (_ONE >> (2 * WIDTH_BITS + 1)))
    shrink = _exp_minus(_ONE >> (2 * WIDTH_BITS))
    masses = []
    for cell in range(1 << CELL_BITS):
        masses.append((density * _series(2 * cell + 1, half_bits)) >> _POINT)
        density = (density * factor) >> _POINT
        factor = (factor * shrink) >> _POINT
    total, whole = sum(masses), 1 << (CELL_BITS + THRESHOLD_BITS)
    scaled = [(mass * whole + total // 2) // total for mass in masses]
    scaled[0] += whole - sum(scaled)
    return tuple(scaled)


def _series(odd: int, half_bits: int) -> int:
    """Return `sum_k He_2k(x) h^2k / (2k + 1)!` at x = odd * h, for h = 2^-half_bits."""
    square = (odd * odd) << (_POINT - 2 * half_bits)  # x^2
    # He_(n+2)(x) = (x^2 - 2 n - 1) He_n(x) - n (n - 1) He_(n-2)(x)
    before, value, total, factorial = 0, _ONE, _ONE, 1
    for k in range(1, 9):
        n = 2 * k - 2
        before, value = (
            value,
            (((square - (2 * n + 1) * _ONE) * value) >> _POINT) - n * (n - 1) * before,
        )
        factorial *= (2 * k) * (2 * k + 1)
        total += (value >> (2 * half_bits * k)) // factorial
    return total


def _exp_minus(x: int) -> int:
    """Return exp(-x) of a fixed-point number below one."""
    total, term, n = _ONE, _ONE, 0
    while term:
        n += 1
        term = (term * x >> _POINT) // n
        total += term if n % 2 == 0 else -term
    return total


def _alias(probabilities: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return thresholds and other candidates by Walker's method; integers, so nothing is lost."""
    unit = 1 << THRESHOLD_BITS  # what a slot holds
    left = list(probabilities)
    small = [i for i, each in enumerate(left) if each < unit]
    large = [i for i, each in enumerate(left) if each >= unit]
    threshold, other = [unit - 1] * len(left), list(range(len(left)))
    while small and large:
        low, high = small.pop(), large[-1]
        threshold[low], other[low] = left[low], high
        left[high] -= unit - left[low]
        if left[high] < unit:
            small.append(large.pop())
    return threshold, other
