"""The matrix from gradients to what an optimizer makes of them: what noise is weighed by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Matrix = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class OptimizerWorkload:
    """SGD as a linear map: row t holds what each gradient adds to the weights after step t.

    Momentum, dampening, Nesterov and coupled weight decay are those of `torch.optim.SGD`.
    `learning_rates` has one entry a step, or is None for a constant rate. `average` is the decay of
    an exponential average of weights; with it, the rows are those of the average. For Adam and its
    kin take its first decay as `momentum` and as `dampening`: the division by the second moment
    is not linear and is left out. The choice of a workload costs accuracy at worst, never privacy.

    Example:
        >>> OptimizerWorkload(steps=3).matrix()
        array([[1., 0., 0.],
               [1., 1., 0.],
               [1., 1., 1.]])
        >>> OptimizerWorkload(steps=3, momentum=0.5).matrix()[2]
        array([1.75, 1.5 , 1.  ])
    """

    steps: int
    learning_rates: tuple[float, ...] | None = None
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    average: float | None = None

    def __post_init__(self) -> None:
        """Refuse settings that describe no optimizer."""
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        rates = self.learning_rates
        if rates is not None and len(rates) != self.steps:
            raise ValueError(f"{len(rates)} learning rates for {self.steps} steps: give one a step")
        if rates is not None and not (
            all(rate >= 0 and math.isfinite(rate) for rate in rates) and any(rates)
        ):
            raise ValueError("learning rates must be finite, at least 0, and not all 0")
        for name in ("momentum", "dampening"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)!r}")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay!r}")
        if self.average is not None and not 0 <= self.average < 1:
            raise ValueError(f"average must lie in [0, 1), got {self.average!r}")

    def matrix(self, *, most_rows: int | None = None) -> Matrix:
        """Return the workload, (steps, steps), lower triangular; or evenly spaced rows of it."""
        import numpy as np

        steps = self.steps
        rates = np.ones(steps) if self.learning_rates is None else np.asarray(self.learning_rates)
        weights, velocity, mean = (np.zeros(steps) for _ in range(3))
        count = steps if most_rows is None else min(steps, most_rows)
        kept = np.unique(np.rint(np.linspace(steps - 1, 0, count)).astype(int))
        rows = np.zeros((len(kept), steps))
        place = {int(step): row for row, step in enumerate(kept)}
        for step in range(steps):
            # Signs are those of descent: the weights move along minus the velocity.
            gradient = self.weight_decay * weights
            gradient[step] -= 1.0
            damped = 0.0 if step == 0 else self.dampening
            velocity = self.momentum * velocity + (1.0 - damped) * gradient
            direction = gradient + self.momentum * velocity if self.nesterov else velocity
            weights = weights - rates[step] * direction
            if self.average is not None:
                mean = self.average * mean + (1.0 - self.average) * weights
            if step in place:
                rows[place[step]] = weights if self.average is None else mean
        return rows
