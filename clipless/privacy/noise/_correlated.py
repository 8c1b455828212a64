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

**Grids that change.** Bounds that are proved anew and thresholds that follow a quantile change the
deviations of the groups, and with them their grids, from one step to the next. V, N and R above are
in units of the grid of their own step, which is known from earlier releases: nothing else changes.
In those units one example moves V_t by at most 1 / sigma times the deviation of z, all groups
together, whatever the deviations are, because their plan keeps the multiplier sigma. So the bound
of C V, and with it what the run costs, is the same. (Noise that was added at another scale is taken
back less well, which costs accuracy.)

**What a state reveals.** Whoever knows the N of the steps t - bands + 1 to t - 1 knows V there: the
sums of those steps without noise. Of examples that took no part in them V tells nothing that
earlier releases did not, and the rest of what they were released with, rows of `C V + z`, keeps its
z, which follows from no key that is kept. Their guarantee stays; that of the others is gone.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from clipless.accounting.correlated import BandedStrategy
from clipless.common import Query
from clipless.errors import PrivacyError
from clipless.kernels import (
    GRID_STEPS,
    KEY_BYTES,
    STATE_NAME,
    KeyStream,
    grid_noise,
    joint_grid_factor,
    joint_multiplier,
    next_key,
)

PART = 2**10
"""A step of the values' grid, in steps of the grid of z; the denominator of C's entries."""
_LARGEST_GAIN = 2.0**16
"""Of the largest sum of absolute values in a row of C^-1: sums then stay far below 2^63."""
_GAIN_OF_SHORT = 2.0**8
"""Up to this gain noises fit into 32 bits: z is below 2^32, and they are z times gain over 2^10."""
_ROWS_AT_ONCE = 256


class CorrelatedNoise:
    """The noise of a run under a strategy: one release for each step, in order.

    The deviation of a query is that of z; the noise of a single step is larger or smaller. What is
    kept are the noises of the last `bands - 1` steps, as integers of 32 bits where these are
    enough, for each tensor, as far as later steps need them: they follow from all earlier ones, so
    that no key regenerates them. Whoever sees a state can remove the noise of those releases, and
    learns that of later ones: keep it secret. Keys lead forward alone: see the module.
    """

    def __init__(
        self,
        strategy: BandedStrategy,
        *,
        key: bytes | None = None,
        insecure_seed: int | None = None,
    ) -> None:
        self._begin(strategy, key=key, insecure_seed=insecure_seed)
        gain = _largest_row_sum(strategy)
        if gain > _LARGEST_GAIN:
            raise PrivacyError(
                "the inverse of this strategy has rows so large that noise would leave the range "
                "of integers: use a strategy that was optimised"
            )
        self._kept_as = torch.int32 if gain <= _GAIN_OF_SHORT else torch.int64
        self._earlier: list[list[Tensor]] = []
        """The noises of the last steps, latest first, one tensor for each query."""

    def _begin(self, strategy: Any, *, key: bytes | None, insecure_seed: int | None) -> None:
        self.strategy = strategy
        self.step = 0
        """The number of the step that comes next."""
        self.insecure = insecure_seed is not None
        self._key = secrets.token_bytes(KEY_BYTES) if key is None else key
        if insecure_seed is not None:
            text = f"clipless/insecure noise/{insecure_seed}"
            self._key = hashlib.sha256(text.encode()).digest()
        self._announced = 0

    def begin_step(self, step: int) -> None:
        """Say which step the next release is of. Noise of those left out is drawn, and unused."""
        if step < self.step:
            raise PrivacyError(f"the noise of step {step} has been drawn: it is not used twice")
        self._announced = step

    def renew(self) -> None:
        """Take a new key from the operating system; the noises of earlier steps stay known."""
        self._key = secrets.token_bytes(KEY_BYTES)

    def begin_anew(self, step: int) -> None:
        """Take back nothing of what was released before a step, and use a key of its own."""
        self.renew()
        self._earlier, self.step, self._announced = [], step, step

    @torch.no_grad()
    def add_(self, values: Sequence[Tensor], queries: Sequence[Query]) -> None:
        """Round the values of the next step to their grids and add its noise, in place."""
        self._announced = max(self._announced, self.step)
        if self._announced >= self.strategy.steps:
            raise PrivacyError(f"this strategy is one of {self.strategy.steps} steps, all taken")
        self._require_shapes(values)
        while self.step < self._announced:
            self._draw(values)
        noisy = [query for query in queries if query.deviation > 0]
        factor = self._grid_factor(values, queries, noisy)
        for value, query, noise in zip(values, queries, self._draw(values), strict=True):
            if query.deviation > 0:
                unit = factor * query.deviation * PART / GRID_STEPS
                places = torch.round(value.to(torch.float64) / unit).to(torch.int64)
                value.copy_(places.add_(noise).to(torch.float64).mul_(unit))

    def _require_shapes(self, values: Sequence[Tensor]) -> None:
        if self._earlier and [n.shape for n in self._earlier[0]] != [v.shape for v in values]:
            raise PrivacyError("the shapes of what is released have changed between two steps")

    def _grid_factor(
        self, values: Sequence[Tensor], queries: Sequence[Query], noisy: Sequence[Query]
    ) -> float:
        return _grid_factor(values, queries, noisy)

    def _next_key(self) -> bytes:
        """Return the present step's key, which is forgotten."""
        key, self._key = self._key, next_key(self._key)
        return key

    def _draw(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the noise of the present step, and go on to the next one."""
        stream = KeyStream(self._next_key())
        noises = [self._noise(value, stream, index) for index, value in enumerate(values)]
        self.step += 1
        kept = self._most_back()
        self._earlier = [[each.to(self._kept_as) for each in noises], *self._earlier][:kept]
        return noises

    def _most_back(self) -> int:
        """Return how many noises, counted back from now, later steps will need."""
        table, step = self.strategy.table, self.step
        most = 0
        for later in range(step, min(step + self.strategy.bands - 1, self.strategy.steps)):
            needed = table[later].nonzero()[0].max() - (later - step)
            most = max(most, int(needed))
        return most

    def _noise(self, value: Tensor, stream: KeyStream, index: int) -> Tensor:
        """Return the noise of one tensor in the present step, in units of the values' grid."""
        diagonal, *others = self.strategy.table[self.step].tolist()
        left = grid_noise(value.numel(), stream, index, value.device).view(value.shape)
        for entry, earlier in zip(others, self._earlier, strict=False):
            if entry:
                left = left.sub_(earlier[index].to(value.device), alpha=entry)
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
        self._announced = self.step
        self._key = bytes(state[STATE_NAME].tolist())
        backs = sorted({int(name.split("/")[0]) for name in state if "/" in name})
        if backs != list(range(len(backs))) or len(backs) > self.strategy.bands - 1:
            raise PrivacyError("the saved noise is not that of this strategy")
        self._earlier = [
            [state[f"{back}/{index}"].to(self._kept_as) for index in range(_count(state, back))]
            for back in backs
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
    return 1.0 if math.isinf(multiplier) else joint_grid_factor(PART * multiplier, entries)


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
