"""Norms of one example's gradient, taken from its activations and cotangents, and never too small.

A weight that is used on T positions has the gradient `sum_t g_t x_t^T`. Its norm is exactly
`sqrt(sum_{s,t} (g_s . g_t)(x_s . x_t))`, and at most `sum_t ||g_t|| ||x_t||`. The first needs two
products of T x T entries, or the gradient itself, one example after the other; both round, and what
rounding may hide is added: an entry of a product of n terms is off by at most `n u` times the sum
of their magnitudes (u half the spacing at one), for whatever order the terms are added in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from clipless.kernels._bounded_gradients import _factors, example_norm
from clipless.kernels._exceedance import ExceedanceCount
from clipless.kernels._weight_sums import row_sum, rows_scaled, times_shares

_CHUNK = 1 << 23
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
        if self.count is not None:
            # What is not finite is above every threshold.
            self.count.add(~(bounds <= self.limit))
        own = torch.zeros_like(bounds) if self.only_counted else _factors(bounds, self.limit)
        shared = times_shares(own, bounds)
        return own if shared is None else shared

    def row_sum(self, rows: Tensor) -> Tensor:
        """Add up the examples' own gradients, (batch, *shape), each scaled to the limit."""
        return row_sum(rows_scaled(rows, self.factors(example_norm(rows))))


def product_norms(cotangent: Tensor, x: Tensor, *, exact: bool | None) -> Tensor:
    """Return upper bounds of `||sum_t g_t x_t^T||` for every example, (batch,).

    Takes (batch, T, out) and (batch, T, in). `exact`: to within rounding; with False, the sum of
    the positions' own norms. By default exact: that never costs more than the weight's gradient.
    """
    position_norms = _position_norms(cotangent) * _position_norms(x)
    upper = position_norms.sum(dim=1) * (1 + x.shape[1] * _unit(x))
    positions, outputs, inputs = x.shape[1], cotangent.shape[2], x.shape[2]
    if positions == 1 or exact is False:
        return upper
    # Of norm one each: their products neither overflow nor vanish.
    own = [_normalised(each) for each in (cotangent, x)]
    if positions * (outputs + inputs) <= outputs * inputs:
        found, terms = _by_gram(*own), outputs + inputs + 4
        relative = (found + terms * _unit(x)).sqrt()
    else:
        relative = _by_examples(*own) + (positions + 4) * _unit(x)
    scale = example_norm(cotangent) * example_norm(x)
    # An upper bound that is not finite stays one: such an example is left out.
    return torch.where(upper.isfinite(), torch.minimum(upper, relative * scale), upper)


def chunked(norms: Callable[[slice], Tensor], x: Tensor, entries: int) -> Tensor:
    """Return what `norms` finds for the examples of x, in parts that `entries` each fit into."""
    size = max(1, _CHUNK // max(entries, 1))
    parts = [norms(slice(begin, begin + size)) for begin in range(0, x.shape[0], size)]
    return torch.cat(parts) if parts else x.new_zeros(0)


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


def _by_gram(cotangent: Tensor, x: Tensor) -> Tensor:
    """The squares of the norms, by the inner products of positions; at least 0."""
    positions = x.shape[1]

    def squares(part: slice) -> Tensor:
        outputs, inputs = cotangent[part], x[part]
        products = (outputs @ outputs.mT).mul_(inputs @ inputs.mT)
        return products.sum(dim=(1, 2), dtype=torch.float64).to(x.dtype).clamp_(min=0.0)

    return chunked(squares, x, 2 * positions * positions)


def _by_examples(cotangent: Tensor, x: Tensor) -> Tensor:
    """The norms of the examples' own gradients, which are formed some at a time, and dropped."""
    return chunked(
        lambda part: example_norm(cotangent[part].mT @ x[part]),
        x,
        cotangent.shape[2] * x.shape[2],
    )
