"""Correlated noise on a grid: a banded strategy applied to Gaussian noise, in whole numbers.

With a strategy C, independent Gaussian integers z and values V on a grid, step t releases
R = V + N,

    N_t = round((z_t - sum_{j >= 1} C[t, t-j] N_{t-j}) / C[t, t]) .

As N = R - V and V lies on the grid, R_t is the rounding of

    ((C V)_t + z_t - sum_{j >= 1} C[t, t-j] R_{t-j}) / C[t, t] :

a function of `(C V + z)_t`, which is what the Gaussian mechanism releases, and of what was released
before. It holds exactly because nothing is rounded on the way: entries of C are multiples of 2^-10,
V and N multiples of 2^10 steps of the grid of z, and all sums are sums of 64-bit integers. It needs
the N that were added, and not those that real numbers would give.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from clipless.accounting.correlated import BandedStrategy
from clipless.common import Query
from clipless.errors import PrivacyError
from clipless.kernels import (
    GRID_STEPS,
    STATE_NAME,
    KeyStream,
    grid_noise,
    joint_grid_factor,
    joint_multiplier,
    next_key,
)

_PART = 2**10
"""A step of the values' grid, in steps of the grid of z; the denominator of C's entries."""
_LARGEST_GAIN = 2.0**16
"""Of the largest sum of absolute values in a row of C^-1: sums then stay far below 2^63."""
_ROWS_AT_ONCE = 256


class CorrelatedNoise:
    """The noise of a run under a strategy; one release for each step, in order, none left out.

    The deviation of a query is that of z; the noise of a single step is larger or smaller. What is
    kept are the noises of the last `bands - 1` steps, int64, for each tensor. Whoever sees a state
    can remove the noise of those releases, and learns that of later ones: keep it secret. Keys lead
    forward alone, so that what came before those steps stays hidden.

    It is checked by tests and stands by itself: no session uses it yet.
    """

    def __init__(self, strategy: BandedStrategy, *, key: bytes) -> None:
        if _largest_row_sum(strategy) > _LARGEST_GAIN:
            raise PrivacyError(
                "the inverse of this strategy has rows so large that noise would leave the range "
                "of integers: use a strategy that was optimised"
            )
        self.strategy = strategy
        self.step = 0
        """The number of the step that comes next."""
        self._key = key
        self._earlier: list[list[Tensor]] = []
        """The noises of the last steps, latest first, one tensor for each query."""

    @torch.no_grad()
    def add_(self, values: Sequence[Tensor], queries: Sequence[Query]) -> None:
        """Round the values of the next step to their grids and add its noise, in place."""
        if self.step >= self.strategy.steps:
            raise PrivacyError(f"this strategy is one of {self.strategy.steps} steps, all taken")
        if self._earlier and [n.shape for n in self._earlier[0]] != [v.shape for v in values]:
            raise PrivacyError("the shapes of what is released have changed between two steps")
        noisy = [query for query in queries if query.deviation > 0]
        factor = _grid_factor(values, queries, noisy)
        key, self._key = self._key, next_key(self._key)
        noises = []
        for index, (value, query) in enumerate(zip(values, queries, strict=True)):
            noise = self._noise(value, KeyStream(key), index)
            noises.append(noise)
            if query.deviation > 0:
                unit = factor * query.deviation * _PART / GRID_STEPS
                places = torch.round(value.to(torch.float64) / unit).to(torch.int64)
                value.copy_(places.add_(noise).to(torch.float64).mul_(unit))
        self._earlier = [noises, *self._earlier][: self.strategy.bands - 1]
        self.step += 1

    def _noise(self, value: Tensor, stream: KeyStream, index: int) -> Tensor:
        """Return the noise of one tensor in the present step, in units of the values' grid."""
        diagonal, *others = self.strategy.table[self.step].tolist()
        left = grid_noise(value.numel(), stream, index, value.device).view(value.shape)
        for entry, earlier in zip(others, self._earlier, strict=False):
            if entry:
                left = left.sub_(earlier[index], alpha=entry)
        return _rounded_quotient(left, diagonal)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the noises that later steps need, and the next step's key. Secret."""
        own = {
            "step": torch.tensor(self.step),
            STATE_NAME: torch.frombuffer(bytearray(self._key), dtype=torch.uint8),
        }
        return own | {
            f"{back}/{index}": noise
            for back, noises in enumerate(self._earlier)
            for index, noise in enumerate(noises)
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue where `state` was saved."""
        self.step = int(state["step"])
        self._key = bytes(state[STATE_NAME].tolist())
        kept = min(self.step, self.strategy.bands - 1)
        self._earlier = [
            [state[f"{back}/{index}"] for index in range(_count(state, back))]
            for back in range(kept)
        ]


def _count(state: Mapping[str, Tensor], back: int) -> int:
    return sum(name.startswith(f"{back}/") for name in state)


def _rounded_quotient(numerator: Tensor, denominator: int) -> Tensor:
    """Return `floor(numerator / denominator + 1/2)`, in integers."""
    return torch.div(2 * numerator + denominator, 2 * denominator, rounding_mode="floor")


def _grid_factor(
    values: Sequence[Tensor], queries: Sequence[Query], noisy: Sequence[Query]
) -> float:
    """Return by how much deviations grow so that rounding to the values' grid costs nothing.

    That grid is 2^10 times as wide as the one that `joint_grid_factor` is about. In every step in
    which a record takes part it moves what C is applied to by so much more, at most.
    """
    multiplier = joint_multiplier(
        [query.sensitivity for query in noisy], [query.deviation for query in noisy]
    )
    entries = sum(v.numel() for v, q in zip(values, queries, strict=True) if q.deviation > 0)
    return 1.0 if math.isinf(multiplier) else joint_grid_factor(_PART * multiplier, entries)


def _largest_row_sum(strategy: BandedStrategy) -> float:
    """Return the largest sum of absolute values in a row of C^-1."""
    import numpy as np

    largest = 0.0
    for first in range(0, strategy.steps, _ROWS_AT_ONCE):
        rows = np.arange(first, min(first + _ROWS_AT_ONCE, strategy.steps))
        picked = np.zeros((len(rows), strategy.steps))
        picked[np.arange(len(rows)), rows] = 1.0
        largest = max(largest, float(np.abs(strategy.through(picked)).sum(axis=1).max()))
    return largest
