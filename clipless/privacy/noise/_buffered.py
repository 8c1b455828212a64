"""Correlated noise from a few decaying sums: a buffered Toeplitz strategy on the grid.

With `C = 1 + sum_k c_k S^k`, `c_k = sum_i a_i d_i^(k-1)`, S the shift by a step, the noise of step
t is `N_t = floor((z_t - P_t) / 2^10 + 1/2)`, in the units of `_correlated.py`: z in steps of its
own grid, N and the values V in units that are 2^10 of them. P_t is `2^10 sum_i a_i M_i`, rounded
to a whole number, where buffer M_i becomes `d_i M_i + N_t` after each step. So

    R_t = V_t + N_t = floor((2^10 (C V)_t + z_t + e_t - 2^10 sum_k c_k R_{t-k}) / 2^10 + 1/2) ,

`e_t = 2^10 sum_k c_k N_{t-k} - P_t`: what rounding adds. Buffers are sums of float64 numbers, and
e_t is not zero, but it follows from earlier releases and *earlier values*, and from nothing else:
P_t is known before z_t is drawn, and whole numbers do the rest exactly. R is post-processing of a
Gaussian mechanism that is asked `2^10 (C V)_t + e_t`. Of two neighbours, e differs by at most 2 E
in each of the `entries * steps` numbers of a run, |e_t| <= E, so that its sensitivity is that of
C V and `2 E sqrt(entries * steps)` steps of the grid of z, of which a deviation has 2^28. The
deviations grow by as much (`_grid_factor`), so that what every pass is paid for holds.

**E.** z is below 2^32. With G the largest sum of absolute values in a row of C^-1, |N| is at most
`N* = G (2^22 + 1)`, and |M_i| at most `N* K_i`, K_i the smaller of `1 / (1 - d_i)` and the number
of steps. Each step of a buffer rounds by at most `2^-52 N* K_i`, which decays as the buffer does:
M_i is off by `2^-52 N* K_i^2`, and the sum of n products by `2^-52 (n + 1)` of what it adds up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from clipless.accounting.correlated import BufferedStrategy
from clipless.common import Query
from clipless.errors import PrivacyError
from clipless.kernels import (
    GRID_STEPS,
    STATE_NAME,
    KeyStream,
    grid_noise,
    joint_grid_factor,
    joint_multiplier,
)
from clipless.privacy.noise._correlated import PART, CorrelatedNoise

_UNIT = 2.0**-52
_LARGEST_Z = 2.0**32
_MOST_MOVED = 0.01
"""Of a deviation: strategies that rounding would cost more than that are refused."""


class BufferedNoise(CorrelatedNoise):
    """The noise of a run under a buffered strategy: one float64 vector for each buffer is kept.

    The interface, the keys and what a state reveals are those of `CorrelatedNoise`: whoever sees
    the buffers of two steps in a row knows the noise between them.
    """

    strategy: BufferedStrategy

    def __init__(
        self, strategy: BufferedStrategy, *, key: bytes | None = None,
        insecure_seed: int | None = None,
    ) -> None:  # fmt: skip
        self._begin(strategy, key=key, insecure_seed=insecure_seed)
        self._off = largest_rounding(strategy)
        self._buffers: list[Tensor] = []
        """One tensor for each query, (buffers, *shape)."""

    def begin_anew(self, step: int) -> None:
        """Take back nothing of what was released before a step, and use a key of its own."""
        super().begin_anew(step)
        self._buffers = []

    def _require_shapes(self, values: Sequence[Tensor]) -> None:
        if self._buffers and [b.shape[1:] for b in self._buffers] != [v.shape for v in values]:
            raise PrivacyError("the shapes of what is released have changed between two steps")

    def _draw(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the noise of the present step, and go on to the next one."""
        stream = KeyStream(self._next_key())
        count = len(self.strategy.decays)
        if not self._buffers:
            self._buffers = [
                torch.zeros((count, *value.shape), dtype=torch.float64) for value in values
            ]
        noises = []
        for index, value in enumerate(values):
            buffers = self._buffers[index].to(value.device)
            like = [count] + [1] * value.ndim
            amplitudes, decays = (
                torch.tensor(each, dtype=torch.float64, device=value.device).view(like)
                for each in (self.strategy.amplitudes, self.strategy.decays)
            )
            taken = torch.floor((amplitudes * buffers).sum(dim=0) * PART + 0.5).to(torch.int64)
            z = grid_noise(value.numel(), stream, index, value.device).view(value.shape)
            noise = torch.div(z - taken + PART // 2, PART, rounding_mode="floor")
            self._buffers[index] = buffers * decays + noise
            noises.append(noise)
        self.step += 1
        return noises

    def _grid_factor(
        self, values: Sequence[Tensor], queries: Sequence[Query], noisy: Sequence[Query]
    ) -> float:
        """Return by how much deviations grow, so that neither rounding costs anything."""
        multiplier = joint_multiplier(
            [query.sensitivity for query in noisy], [query.deviation for query in noisy]
        )
        entries = sum(v.numel() for v, q in zip(values, queries, strict=True) if q.deviation > 0)
        if math.isinf(multiplier):
            return 1.0
        grid = joint_grid_factor(PART * multiplier, entries)
        moved = 2 * self._off * math.sqrt(entries * self.strategy.steps) / GRID_STEPS * multiplier
        if not moved < _MOST_MOVED:
            raise PrivacyError(
                "the decays of this strategy are so near to 1 that its buffers round by "
                f"{moved:.2g} of one example's contribution: take bands, or smaller decays"
            )
        return 1 / (1 - (1 - 1 / grid) - moved)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the buffers and the next step's key. Secret."""
        own = {
            "step": torch.tensor(self.step),
            STATE_NAME: torch.frombuffer(bytearray(self._key), dtype=torch.uint8),
        }
        return own | {f"buffers/{i}": each for i, each in enumerate(self._buffers)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue where `state` was saved."""
        names = [f"buffers/{index}" for index in range(len(state) - 2)]
        if set(names) != {name for name in state if "/" in name} or any(
            len(state[name]) != len(self.strategy.decays) for name in names
        ):
            raise PrivacyError("the saved noise is not that of this strategy")
        self.step = self._announced = int(state["step"])
        self._key = bytes(state[STATE_NAME].tolist())
        self._buffers = [state[name].double() for name in names]


def largest_rounding(strategy: BufferedStrategy) -> float:
    """Return E: how far what is taken back is from what C says, at most, in steps of z's grid."""
    import numpy as np

    gain = float(np.abs(strategy.inverse_coefficients()).sum())
    largest = gain * (_LARGEST_Z / PART + 1)
    found = 0.0
    for amplitude, decay in zip(strategy.amplitudes, strategy.decays, strict=True):
        memory = min(float(strategy.steps), 1 / (1 - decay))
        buffer = largest * memory
        found += amplitude * buffer * _UNIT * (len(strategy.decays) + 1 + memory)
    # Twice, for the rounding of this computation and of the last steps to the grid.
    return 0.5 + 2 * PART * found
