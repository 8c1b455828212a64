"""Norms of one example's gradient, taken from its activations and cotangents, and never too small.

A weight that is used on T positions has the gradient `sum_t g_t x_t^T`. Its norm is exactly
`sqrt(sum_{s,t} (g_s . g_t)(x_s . x_t))`, and at most `sum_t ||g_t|| ||x_t||`. The first needs two
products of T x T entries, which round, and what rounding may hide is added: an entry of a product
of n terms is off by at most `n u` times the sum of their magnitudes (u half the spacing at one),
for whatever order the terms are added in. (Or the gradient itself, one example after the other:
`_sums`.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clipless.kernels._bounded_gradients import _factors, example_norm
from clipless.kernels._exceedance import ExceedanceCount
from clipless.kernels._weight_sums import row_sum, rows_scaled, times_shares

CHUNK = 1 << 23
"""So many entries of the examples' own gradients, or patches, are formed at a time."""


@dataclass(frozen=True)
class Threshold:
    """What one example may contribute to a parameter's gradient, and who counts those above it."""

    limit: float
    count: ExceedanceCount | None = None
    only_counted: bool = False
    """Whether nothing is contributed: the threshold is still searched for."""

    def factors(self, bounds: Tensor) -> Tensor:
        """Return `min(1, limit / bound)` for every row, times its share if rows have shares.

        It is 0 where the bound is not finite.
        """
        self.counted(bounds)
        return self.factors_of_some(bounds)

    def counted(self, bounds: Tensor) -> None:
        """Count the examples of a batch that are above the threshold."""
        if self.count is not None:
            # What is not finite is above every threshold.
            self.count.add(~(bounds <= self.limit))

    def integer_sum(
        self, add: Callable[..., tuple[Tensor, Tensor]], cotangent: Tensor, *others: Any
    ) -> Tensor:
        """Add up a weight's gradient as integers, with upper bounds of the examples' norms."""
        shares = times_shares(None, cotangent)
        weight, above = add(cotangent, *others, limit=self.limit, shares=shares)
        if self.count is not None:
            self.count.add(above)
        return torch.zeros_like(weight) if self.only_counted else weight

    def factors_of_some(self, bounds: Tensor, part: slice | None = None) -> Tensor:
        """Return the factors of a part of a batch, without counting."""
        own = torch.zeros_like(bounds) if self.only_counted else _factors(bounds, self.limit)
        shared = times_shares(own, bounds, part)
        return own if shared is None else shared

    def row_sum(self, rows: Tensor) -> Tensor:
        """Add up the examples' own gradients, (batch, *shape), each scaled to the limit."""
        return row_sum(rows_scaled(rows, self.factors(example_norm(rows))))


def upper_norms(cotangent: Tensor, x: Tensor) -> Tensor:
    """Return `sum_t ||g_t|| ||x_t||` for every example, (batch,), from (batch, T, ...)."""
    position_norms = _position_norms(cotangent) * _position_norms(x)
    return position_norms.sum(dim=1) * (1 + x.shape[1] * _unit(x))


def gram_norms(cotangent: Tensor, x: Tensor) -> Tensor:
    """Return upper bounds of `||sum_t g_t x_t^T||` for every example, (batch,), by inner products.

    Never below `sqrt(n u) sum_t ||g_t|| ||x_t||`, n the length of a position, u half the spacing.
    """
    upper = upper_norms(cotangent, x)
    # Of norm one each: their products neither overflow nor vanish.
    own = [_normalised(each) for each in (cotangent, x)]
    terms = cotangent.shape[2] + x.shape[2] + 4
    relative = (_squares(*own) + terms * _unit(x)).sqrt()
    scale = example_norm(cotangent) * example_norm(x)
    # An upper bound that is not finite stays one: such an example is left out.
    return torch.where(upper.isfinite(), torch.minimum(upper, relative * scale), upper)


def _unit(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps / 2


def _position_norms(x: Tensor) -> Tensor:
    """Upper bounds of the norms of all positions, (batch, T)."""
    norms = torch.linalg.vector_norm(x, dim=2)
    return norms * (1 + x.shape[2] * _unit(x)) + torch.finfo(x.dtype).tiny ** 0.5


def _normalised(x: Tensor) -> Tensor:
    norms = example_norm(x)
    usable = norms.isfinite() & (norms > 0)
    return x * torch.where(usable, 1 / torch.where(usable, norms, 1.0), 0.0).view(-1, 1, 1)


def _squares(cotangent: Tensor, x: Tensor) -> Tensor:
    """The squares of the norms, at least 0."""
    positions = x.shape[1]
    found = []
    for rows, columns in zip(
        cotangent.split(size := max(1, CHUNK // (2 * positions * positions))), x.split(size),
        strict=True,
    ):  # fmt: skip
        products = (rows @ rows.mT).mul_(columns @ columns.mT)
        found.append(products.sum(dim=(1, 2), dtype=torch.float64).to(x.dtype).clamp_(min=0.0))
    return torch.cat(found) if found else x.new_zeros(0)
