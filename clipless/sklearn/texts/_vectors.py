"""Vectors of texts as model inputs: unit vectors, centred and evened out by one private query.

Every vector v is scaled to norm one, so that one row moves the sum of (v, v^2) by at most sqrt(2):
v has norm 1, and the entries of v^2 add up to 1. With the mean m and the mean squares e found, a
vector becomes `(v - m) / sqrt(e - m^2 + floor)`; the floor is the average square, or what noise may
make of it, so that entries of which little is known are not blown up. It damps what all texts have
in common, as inverse document frequencies do. A constant is appended, and the model's input guard
scales rows to norm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clipless.statistics import PrivateRows

_CONSTANT = 0.1
STATISTICS_BOUND = math.sqrt(2)


@dataclass(frozen=True)
class VectorEncoder:
    """The fitted encoding; a function of released statistics only."""

    center: Tensor
    gain: Tensor

    @property
    def features(self) -> int:
        """How many inputs the model gets."""
        return len(self.center) + 1

    @classmethod
    def from_rows(cls, rows: PrivateRows, *, size: int, noise_multiplier: float) -> VectorEncoder:
        """Ask for mean and squares of the entries of unit vectors: one release."""

        def statistics(x: Tensor, *others: Tensor) -> Tensor:
            unit = unit_rows(x.double())
            return torch.cat([unit, unit.square()], 1)

        sums = rows.noisy_sum(
            statistics,
            bound=STATISTICS_BOUND,
            noise_multiplier=noise_multiplier,
            label="vector statistics",
        )
        mean, squares = (sums / len(rows)).cpu().split(size)
        error = noise_multiplier * STATISTICS_BOUND / len(rows)
        center = mean.clamp(-1, 1)
        floor = max(1 / size, error)
        gain = ((squares - center.square()).clamp(min=0) + floor).rsqrt()
        return cls(center=center, gain=gain / gain.square().mean().sqrt())

    def __call__(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """(n, p) vectors -> (n, p + 1) features, each row by itself."""
        centered = (unit_rows(numbers) - self.center.to(numbers)) * self.gain.to(numbers)
        constant = centered.new_full((len(centered), 1), _CONSTANT)
        return torch.cat([centered, constant], 1).float()

    def lipschitz(self) -> float:
        """How far features can move, over the move of a unit vector."""
        return float(self.gain.max())

    def to_dict(self) -> dict[str, Any]:
        """Return the parts, for saving."""
        return {"center": self.center, "gain": self.gain}

    @classmethod
    def from_dict(cls, parts: dict[str, Tensor]) -> VectorEncoder:
        """Restore what `to_dict` returned."""
        return cls(center=parts["center"], gain=parts["gain"])


def unit_rows(x: Tensor) -> Tensor:
    """Scale rows to norm one; rows that are not finite, and zeros, become zeros."""
    finite = x.isfinite().all(1, keepdim=True)
    x = torch.where(finite, x, torch.zeros((), dtype=x.dtype))
    largest = x.abs().amax(1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    x = x / largest
    return x / torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp(min=0.5)
