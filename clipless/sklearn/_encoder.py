"""Encoding of table rows as model inputs, by released statistics alone.

A column x becomes `z = 3 tanh((x - centre) / (3 spread))`: what lies far out is kept in reach
without a hard edge. A second feature, `|z| - 0.8`, tells the middle from both ends; a column of two
values has no middle and goes without. Missing numbers become 0, with an indicator of their own
where they are frequent enough to tell. Categories become indicators of the frequent hash buckets
and one for all others. Features are divided by the square root of their number and a constant is
appended. Columns that vary together are pulled apart, if their covariance could be asked for. The
model's input guard then scales each row to norm 1; the constant keeps what the norm said.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from clipless.spectral import spectral_norm_bound
from clipless.statistics import Scaling, decorrelation_matrix, noise_radius

_CUT = 3.0
_CONSTANT = 0.25
_MEAN_DEVIATION = 0.8  # of a standard Gaussian: what |z| is on average
_MOST_CATEGORIES = 64  # of one column
_MOST_INDICATORS = 1024  # of all columns of categories together
_RIDGE, _NOISE_PART = 1.5, 0.25
_NOISE_ROOM = 4.0  # a bucket counts as used if it stands this many noise deviations above zero


@dataclass(frozen=True)
class Encoder:
    """The fitted encoding; a function of released statistics and public bounds only."""

    center: Tensor
    spread: Tensor
    indicators: Tensor
    """Positions of the numeric columns that have an indicator for missing values."""
    buckets: tuple[Tensor, ...]
    """For each categorical column, the hash buckets that have an indicator of their own."""
    folded: Tensor
    """Positions of the numeric columns that have the second feature."""
    rates: Tensor
    """The fraction of rows in which each indicator is on, for scaling."""
    mix: Tensor | None = None
    """(features, features), of norm one: decorrelates the features."""

    @property
    def features(self) -> int:
        """How many inputs the model gets."""
        return len(self.center) + len(self.folded) + len(self.rates) + 1

    @classmethod
    def from_scaling(cls, scaling: Scaling) -> Encoder:
        """Decide, from noisy fractions alone, which indicators are worth having."""
        floor = max(_NOISE_ROOM * scaling.resolution, 1e-4)
        indicators = torch.nonzero(scaling.missing > floor).flatten()
        rates = [scaling.missing[indicators]]
        buckets = []
        most = min(_MOST_CATEGORIES, max(1, _MOST_INDICATORS // max(len(scaling.categories), 1)))
        for fractions in scaling.categories:
            order = torch.argsort(fractions, descending=True, stable=True)[:most]
            kept = order[fractions[order] > floor]
            buckets.append(kept)
            rest = (1 - fractions[kept].sum()).clamp(min=0)
            rates.append(torch.cat([fractions[kept], rest[None]]))
        return cls(
            center=scaling.center,
            spread=scaling.spread,
            indicators=indicators,
            buckets=tuple(buckets),
            folded=torch.nonzero(~scaling.switches).flatten(),
            rates=torch.cat(rates).clamp(0.01, 0.99),
        )

    def __call__(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """(n, p) numbers and (n, q) buckets -> (n, features), each row by itself."""
        standard = (numbers.double() - self.center) / self.spread
        squeezed = _CUT * torch.tanh(standard / _CUT)
        ends = squeezed[:, self.folded].abs() - _MEAN_DEVIATION
        numeric = torch.nan_to_num(torch.cat([squeezed, ends], 1), nan=0.0)
        flags = [numbers[:, self.indicators].isnan().double()]
        for column, kept in enumerate(self.buckets):
            matches = (codes[:, column, None] == kept).double()
            flags.append(torch.cat([matches, 1 - matches.sum(1, keepdim=True)], 1))
        on = torch.cat(flags, 1)
        # The spread of an indicator, by the same measure as that of numbers.
        switched = (on - self.rates) / (2.5 * self.rates * (1 - self.rates))
        features = torch.cat([numeric, _CUT * torch.tanh(switched / _CUT)], 1)
        features = features / math.sqrt(max(features.shape[1], 1))
        constant = features.new_full((len(features), 1), _CONSTANT)
        features = torch.cat([features, constant], 1)
        return (features if self.mix is None else features @ self.mix).float()

    def decorrelated(self, covariance: Tensor, *, noise: float) -> Encoder:
        """Return the encoder that also decorrelates, given a noisy covariance of its results.

        One and a half times the mean eigenvalue is added to all, and a part of what noise of
        standard deviation `noise` in every entry makes of them: directions of little variance are
        raised, and those of noise alone not far.
        """
        size = len(covariance)
        mean = float(covariance.diagonal().mean().clamp(min=0))
        added = _RIDGE * mean + _NOISE_PART * noise_radius(noise, size)
        return replace(self, mix=decorrelation_matrix(covariance, added=added))

    def lipschitz(self) -> float:
        """How far an encoded row can move, over the move of the row's numbers in units of their
        spreads, (x - centre) / spread; categories and gaps unchanged.

        tanh and the absolute value are 1-Lipschitz, and a column has at most two features; the norm
        of what decorrelates them is certified.
        """
        each = math.sqrt(2) if len(self.folded) else 1.0
        mixed = 1.0 if self.mix is None else float(spectral_norm_bound(self.mix))
        return each * mixed / math.sqrt(max(self.features - 1, 1))

    def to_dict(self) -> dict[str, Any]:
        """Return the parts, for saving."""
        return {
            "center": self.center, "spread": self.spread, "indicators": self.indicators,
            "folded": self.folded, "rates": self.rates,
            **({} if self.mix is None else {"mix": self.mix}),
            **{f"buckets.{column}": kept for column, kept in enumerate(self.buckets)},
        }  # fmt: skip

    @classmethod
    def from_dict(cls, parts: dict[str, Tensor]) -> Encoder:
        """Restore what `to_dict` returned."""
        count = sum(name.startswith("buckets.") for name in parts)
        buckets = tuple(parts[f"buckets.{column}"] for column in range(count))
        return cls(
            center=parts["center"], spread=parts["spread"], indicators=parts["indicators"],
            buckets=buckets, folded=parts["folded"], rates=parts["rates"], mix=parts.get("mix"),
        )  # fmt: skip
