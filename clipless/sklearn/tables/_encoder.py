"""Encoding of table rows as model inputs, by released statistics alone.

A column x becomes `z = 3 tanh((x - centre) / (3 spread))`: what lies far out is kept in reach
without a hard edge. A second feature, `|z| - 0.8`, tells the middle from both ends; a column of two
values has no middle and goes without. Missing numbers become 0, with an indicator of their own
where they are frequent enough to tell. Categories become indicators of the frequent hash buckets
and one for all others. Features are divided by the square root of their number and a constant is
appended. In larger tables a number also tells how far it is across each piece between two knots, so
that a line on the features is a curve of the number. Columns that vary together are pulled apart,
if their covariance could be asked for. Where there are many rows for each, products of two features
are appended, those of the directions in which rows differ most: a line then sees interactions. The
model's input guard scales each row to norm 1; the constant keeps what the norm said.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from clipless.sklearn.tables._pieces import find_knots, piecewise, steepest
from clipless.spectral import spectral_norm_bound
from clipless.statistics import Scaling, decorrelation_matrix, noise_radius

_CUT = 3.0
_CONSTANT = 0.25
_MEAN_DEVIATION = 0.8  # of a standard Gaussian: what |z| is on average
_MOST_CATEGORIES = 64  # of one column
_MOST_INDICATORS = 1024  # of all columns of categories together
_RIDGE, _NOISE_PART = 1.5, 0.25
_PIECES = 1.4  # weight of what tells about pieces, that of the squeezed number being one
_MOST_BENT = 20  # numeric columns; more pieces would drown what the numbers themselves say
_FILL = 1.5  # most rows are scaled beyond the unit ball and put on its surface
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
    knots: tuple[Tensor, ...] = ()
    """The knots of each numeric column, in order."""
    mix: Tensor | None = None
    """(linear features, as many): decorrelates them. Of norm one, unless there are products."""
    directions: Tensor | None = None
    """(base features, k): what products are taken of, k (k + 1) / 2 of them."""

    @property
    def base(self) -> int:
        """How many features there are without pieces and products, the constant included."""
        return len(self.center) + len(self.folded) + len(self.rates) + 1

    @property
    def features(self) -> int:
        """How many inputs the model gets."""
        products = 0 if self.directions is None else _products_of(self.directions.shape[1])
        return self._linear + products

    @property
    def _linear(self) -> int:
        return self.base + sum(max(len(each) - 1, 0) for each in self.knots)

    @classmethod
    def from_scaling(cls, scaling: Scaling, *, step: float = 0.0) -> Encoder:
        """Decide, from noisy fractions alone, which indicators are worth having.

        With a `step`, in spreads, numbers are bent at knots.
        """
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
        plain = cls(
            center=scaling.center,
            spread=scaling.spread,
            indicators=indicators,
            buckets=tuple(buckets),
            folded=torch.nonzero(~scaling.switches).flatten(),
            rates=torch.cat(rates).clamp(0.01, 0.99),
        )
        if step > 0 and len(scaling.center) <= _MOST_BENT:
            return replace(plain, knots=find_knots(scaling, step=step))
        return plain

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
        constant = features.new_full((len(features), 1), _CONSTANT)
        pieces = _PIECES * piecewise(numbers.double(), self.knots) / self._scale
        features = torch.cat([features / self._scale, constant, pieces], 1)
        mixed = features if self.mix is None else features @ self.mix
        if self.directions is None:
            return mixed.float()
        factors = _in_ball(features[:, : self.base] @ self.directions)
        return torch.cat([_in_ball(mixed).float(), _products(factors.float())], 1)

    @property
    def _scale(self) -> float:
        """What features are divided by, so that the norm of a row does not grow with them."""
        return math.sqrt(max(self.base - 1, 1))

    def decorrelated(self, covariance: Tensor, *, noise: float) -> Encoder:
        """Return the encoder that also decorrelates, given a noisy covariance of its results.

        One and a half times the mean eigenvalue is added to all, and a part of what noise of
        standard deviation `noise` in every entry makes of them: directions of little variance are
        raised, and those of noise alone not far.
        """
        return replace(self, mix=_gains(covariance, noise=noise).mix)

    def with_products(self, covariance: Tensor | None, *, noise: float, directions: int) -> Encoder:
        """Return the encoder that appends products of `directions` decorrelated features.

        They are those of the base features, in which rows vary most by the noisy covariance.
        Linear features and factors are scaled into the unit ball, row by row, and most rows onto
        its surface.
        """
        count = min(directions, self.base)
        if covariance is None:
            mix, factors = (
                _FILL * torch.eye(size, dtype=torch.float64) for size in (self._linear, self.base)
            )
            return replace(self, mix=mix, directions=factors)
        whole = _gains(covariance, noise=noise)
        base = _gains(covariance[: self.base, : self.base], noise=noise)
        return replace(
            self, mix=whole.filling(whole.mix), directions=base.filling(base.leading(count))
        )

    def lipschitz(self) -> float:
        """How far an encoded row can move, over the move of the row's numbers in units of their
        spreads, (x - centre) / spread; categories and gaps unchanged.

        tanh and the absolute value are 1-Lipschitz, a column has at most two features, and one of
        its pieces moves at a time; the norm of what decorrelates them is certified. Scaling into a
        ball is 1-Lipschitz, and the products a a^T of vectors a in the unit ball are 2-Lipschitz.
        """
        base = math.sqrt(2) if len(self.folded) else 1.0
        slope = _PIECES * steepest(self.knots, self.spread) if self.knots else 0.0
        mixed = 1.0 if self.mix is None else float(spectral_norm_bound(self.mix))
        linear = math.hypot(base, slope) * mixed / self._scale
        if self.directions is None:
            return linear
        return math.hypot(
            linear, 2 * base * float(spectral_norm_bound(self.directions)) / self._scale
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the parts, for saving."""
        return {
            "center": self.center, "spread": self.spread, "indicators": self.indicators,
            "folded": self.folded, "rates": self.rates,
            **({} if self.mix is None else {"mix": self.mix}),
            **({} if self.directions is None else {"directions": self.directions}),
            **{f"knots.{column}": places for column, places in enumerate(self.knots)},
            **{f"buckets.{column}": kept for column, kept in enumerate(self.buckets)},
        }  # fmt: skip

    @classmethod
    def from_dict(cls, parts: dict[str, Tensor]) -> Encoder:
        """Restore what `to_dict` returned."""

        def listed(kind: str) -> tuple[Tensor, ...]:
            count = sum(name.startswith(f"{kind}.") for name in parts)
            return tuple(parts[f"{kind}.{column}"] for column in range(count))

        return cls(
            center=parts["center"], spread=parts["spread"], indicators=parts["indicators"],
            buckets=listed("buckets"), folded=parts["folded"], rates=parts["rates"],
            knots=listed("knots"), mix=parts.get("mix"), directions=parts.get("directions"),
        )  # fmt: skip


@dataclass(frozen=True)
class _Gains:
    """A noisy covariance, with the gains that even out its directions."""

    covariance: Tensor
    mix: Tensor

    def leading(self, count: int) -> Tensor:
        """The columns of largest variance of the decorrelating matrix, in its own axes."""
        _, vectors = torch.linalg.eigh(self.covariance)
        return self.mix @ vectors[:, -count:]

    def filling(self, matrix: Tensor) -> Tensor:
        """Scale a matrix so that most rows leave the unit ball under it."""
        power = float((matrix.mT @ self.covariance @ matrix).diagonal().sum())
        return matrix * (_FILL / math.sqrt(max(power, 1e-2)))


def _gains(covariance: Tensor, *, noise: float) -> _Gains:
    size = len(covariance)
    mean = float(covariance.diagonal().mean().clamp(min=0))
    added = _RIDGE * mean + _NOISE_PART * noise_radius(noise, size)
    return _Gains(covariance, decorrelation_matrix(covariance, added=added))


def _products_of(directions: int) -> int:
    return directions * (directions + 1) // 2


def _products(factors: Tensor) -> Tensor:
    """(n, k) factors -> (n, k (k + 1) / 2) products: the norm of a row's is that of a a^T."""
    first, second = torch.triu_indices(factors.shape[1], factors.shape[1])
    weight = torch.where(first == second, 1.0, math.sqrt(2)).to(factors)
    return factors[:, first] * factors[:, second] * weight


def _in_ball(rows: Tensor) -> Tensor:
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=1.0)
