"""`BufferedStrategy`: noise that remembers all steps in a few decaying sums (buffered Toeplitz)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from clipless.accounting.correlated._sensitivity import toeplitz_sensitivity

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class BufferedStrategy:
    """A lower triangular Toeplitz matrix of decaying entries (Dvijotham et al. 2024).

    The diagonal is 1, and diagonal t below it `sum_i a_i d_i^(t-1)`, for amplitudes a, decays d.

    The noise of step t is `n_t = z_t - sum_i a_i m_i`, where buffer i becomes `d_i m_i + n_t`
    afterwards: as many buffers as there are pairs (a, d), whatever the number of steps. All bands
    are filled, so that a record that comes again meets its own noise; its sensitivity counts that.

    Example:
        >>> strategy = BufferedStrategy(steps=100, amplitudes=(0.3, 0.2), decays=(0.5, 0.98))
        >>> strategy.coefficients()[:3].round(3)
        array([1.   , 0.5  , 0.346])
        >>> round(strategy.sensitivity(participations=1, separation=100), 3)
        1.532
    """

    steps: int
    amplitudes: tuple[float, ...]
    decays: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse what is not sure to decrease, for which the worst pattern is not known."""
        if self.steps < 1 or len(self.amplitudes) != len(self.decays):
            raise ValueError("give at least one step, and one decay for each amplitude")
        if not all(amplitude >= 0 for amplitude in self.amplitudes):
            raise ValueError(f"amplitudes must be at least 0, got {self.amplitudes}")
        if not math.fsum(self.amplitudes) <= 1:
            raise ValueError(f"amplitudes must add up to at most 1, got {self.amplitudes}")
        if not all(0 <= decay < 1 for decay in self.decays):
            raise ValueError(f"decays must lie in [0, 1), got {self.decays}")

    def coefficients(self) -> Array:
        """Return the first column of C, (steps,)."""
        import numpy as np

        powers = np.asarray(self.decays)[:, None] ** np.arange(self.steps - 1)
        tail = np.asarray(self.amplitudes) @ powers if self.decays else np.zeros(self.steps - 1)
        # Rounding must not make it increase by an ulp: the sensitivity is of what is used here.
        return np.concatenate([[1.0], np.minimum.accumulate(np.minimum(tail, 1.0))])

    def inverse_coefficients(self) -> Array:
        """Return the first column of C^-1, (steps,), by the recursion that makes the noise."""
        import numpy as np

        amplitudes, decays = np.asarray(self.amplitudes), np.asarray(self.decays)
        buffers = np.zeros(len(decays))
        found = np.zeros(self.steps)
        for step in range(self.steps):
            found[step] = (step == 0) - amplitudes @ buffers
            buffers = decays * buffers + found[step]
        return found

    @cached_property
    def gains(self) -> Array:
        """The deviation of each step's noise over that of z: the norms of rows of C^-1."""
        import numpy as np

        found: Array = np.sqrt(np.cumsum(self.inverse_coefficients() ** 2))
        return found

    def after(self, first: int) -> BufferedStrategy:
        """Return the strategy of the steps from `first` on, if noise begins anew with it."""
        return replace(self, steps=self.steps - first)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON holds without loss."""
        return {
            "steps": self.steps,
            "amplitudes": list(self.amplitudes),
            "decays": list(self.decays),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BufferedStrategy:
        """Restore what `to_dict` wrote; anything else raises `ValueError`."""
        if set(data) != {"steps", "amplitudes", "decays"}:
            raise ValueError(f"a strategy has steps, amplitudes and decays, got {sorted(data)}")
        return cls(
            steps=int(data["steps"]),
            amplitudes=tuple(float(each) for each in data["amplitudes"]),
            decays=tuple(float(each) for each in data["decays"]),
        )

    def through(self, workload: Array) -> Array:
        """Return `A C^-1` for rows A of a workload, (rows, steps)."""
        from scipy.fft import irfft, next_fast_len, rfft

        size = next_fast_len(2 * self.steps)
        spectrum = rfft(self.inverse_coefficients(), size).conj()
        found: Array = irfft(rfft(workload, size) * spectrum, size)[..., : self.steps]
        return found

    def sensitivity(self, *, participations: int, separation: int) -> float:
        """Return the sensitivity where a record comes again after `separation` steps or more."""
        return toeplitz_sensitivity(
            self.coefficients().tolist(),
            steps=self.steps,
            participations=participations,
            separation=separation,
        )

    def pass_costs(self, *, steps_per_pass: int) -> tuple[float, ...]:
        """Return what each pass in a fixed order adds to the squared sensitivity.

        After p passes that is the squared sensitivity of the strategy's first p passes.
        """
        coefficients = self.coefficients().tolist()
        costs, before = [], 0.0
        for number in range(1, -(-self.steps // steps_per_pass) + 1):
            found = toeplitz_sensitivity(
                coefficients,
                steps=min(self.steps, number * steps_per_pass),
                participations=number,
                separation=steps_per_pass,
            )
            costs.append(found**2 - before)
            before = found**2
        return tuple(costs)


def optimised_buffers(
    workload: Array, *, buffers: int, participations: int, separation: int, moves: int = 60
) -> BufferedStrategy:
    """Return a strategy of so many buffers with a small mean squared error at its sensitivity.

    Example:
        >>> import numpy as np
        >>> sums = np.tril(np.ones((100, 100)))
        >>> found = optimised_buffers(sums, buffers=2, participations=1, separation=100)
        >>> error = np.linalg.norm(found.through(sums)) / np.linalg.norm(sums)
        >>> bool(error * found.sensitivity(participations=1, separation=100) < 0.35)
        True
    """
    import numpy as np
    from scipy.optimize import minimize

    steps = workload.shape[1]

    def strategy(free: Array) -> BufferedStrategy:
        shares = np.exp(np.append(free[:buffers], 0.0) - max(free[:buffers].max(), 0.0))
        amplitudes = shares[:-1] / shares.sum() * (1.0 - 1e-9)
        decays = 1.0 / (1.0 + np.exp(-np.clip(free[buffers:], -30.0, 15.0)))
        return BufferedStrategy(
            steps=steps, amplitudes=tuple(amplitudes.tolist()), decays=tuple(decays.tolist())
        )

    def loss(free: Array) -> float:
        found = strategy(free)
        error = np.linalg.norm(found.through(workload))
        size = found.sensitivity(participations=participations, separation=separation)
        return float(np.log(error) + np.log(size))

    # Decays whose memories are spread between two steps and the length of a pass.
    memories = np.geomspace(2.0, max(3.0, min(steps, separation)), buffers + 1)[:-1]
    start = np.concatenate([np.full(buffers, -np.log(buffers)), np.log(memories)])
    found = minimize(loss, start, method="L-BFGS-B", options={"maxiter": moves})
    return strategy(found.x)
