"""Norms of one example's gradient, taken from its activations and cotangents, and never too small.

A weight that is used on T positions has the gradient `sum_t g_t x_t^T`. Its norm is exactly
`sqrt(sum_{s,t} (g_s . g_t)(x_s . x_t))`, and at most `sum_t ||g_t|| ||x_t||`. The first needs two
products of T x T entries, which round, and what rounding may hide is added: an entry of a product
of n terms is off by at most `n u` times the sum of their magnitudes (u half the spacing at one),
for whatever order the terms are added in. (Or the gradient itself, one example after the other:
`_sums`.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from clipless.kernels._bounded_gradients import _factors, example_norm
from clipless.kernels._exceedance import ExceedanceCount
from clipless.kernels._weight_sums import row_sum, rows_scaled, times_shares

CHUNK = 1 << 23
"""So many entries of the examples' own gradients, or patches, are formed at a time."""


class TracedCount:
    """Counts the examples above a threshold as a tensor, for who traces a pass for a compiler."""

    def __init__(self) -> None:
        self.count: Tensor | None = None

    def add(self, exceeded: Tensor) -> None:
        """Count the True entries."""
        count = exceeded.sum(dtype=torch.float32)
        self.count = count if self.count is None else self.count + count


@dataclass(frozen=True)
class Threshold:
    """What one example may contribute to a parameter's gradient, and who counts those above it."""

    limit: float | Tensor
    """A number; where a compiler traces the pass, a tensor, so that it may move."""
    count: ExceedanceCount | TracedCount | None = None
    only_counted: bool | Tensor = False
    """Whether nothing is contributed: the threshold is still searched for. (Or 1.0 and 0.0.)"""

    @property
    def traced(self) -> tuple[Tensor, Tensor] | None:
        """The limit, and what contributions are multiplied by, where these are tensors."""
        if not isinstance(self.limit, Tensor):
            return None
        only = self.only_counted
        if not isinstance(only, Tensor):
            only = torch.full_like(self.limit, float(only))
        return self.limit, only

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

    def factors_of_some(self, bounds: Tensor, part: slice | None = None) -> Tensor:
        """Return the factors of a part of a batch, without counting."""
        if self.only_counted is True:
            own = torch.zeros_like(bounds)
        else:
            own = _factors(bounds, self.limit)
        if isinstance(self.only_counted, Tensor):
            own = torch.where(self.only_counted > 0, 0.0, own)
        shared = times_shares(own, bounds, part)
        return own if shared is None else shared

    def row_sum(self, rows: Tensor) -> Tensor:
        """Add up the examples' own gradients, (batch, *shape), each scaled to the limit."""
        rows = in_float32(rows)
        return row_sum(rows_scaled(rows, self.factors(example_norm(rows))))


def in_float32(x: Tensor) -> Tensor:
    """Return what was rounded to bfloat16 in float32, and everything else as it is."""
    return x.float() if x.dtype == torch.bfloat16 else x


def upper_norms(cotangent: Tensor, x: Tensor) -> Tensor:
    """Return `sum_t ||g_t|| ||x_t||` for every example, (batch,), from (batch, T, ...)."""
    position_norms = _position_norms(cotangent) * _position_norms(x)
    return position_norms.sum(dim=1) * (1 + x.shape[1] * _unit(x))


def gram_norms(cotangent: Tensor, x: Tensor) -> Tensor:
    """Return upper bounds of `||sum_t g_t x_t^T||` for every example, (batch,), by inner products.

    Never below `sqrt(n u) sum_t ||g_t|| ||x_t||`, n the length of a position, u half the spacing.
    In TF32 the operands must have been rounded to it (`rounded_to_tf32`): products are exact then.
    """
    upper = upper_norms(cotangent, x)
    # Of norm at most one each, by powers of two: their products neither overflow nor vanish.
    sizes = [example_norm(each) for each in (cotangent, x)]
    exponents = [_exponents(each) for each in sizes]
    own = [
        _scaled(each, -exponent)
        for each, exponent in zip((cotangent, x), exponents, strict=True)
    ]  # fmt: skip
    left = [torch.ldexp(each, -by) for each, by in zip(sizes, exponents, strict=True)]
    terms = cotangent.shape[2] + x.shape[2] + 4
    relative = (_squares(*own) + terms * _unit(x) * (left[0] * left[1]).square()).sqrt()
    found = torch.ldexp(relative, exponents[0] + exponents[1])
    # An upper bound that is not finite stays one: such an example is left out.
    return torch.where(upper.isfinite(), torch.minimum(upper, found), upper)


def rounded_to_tf32(x: Tensor) -> Tensor:
    """Return float32 numbers rounded to the ten binary digits that TF32 keeps, or as they are."""
    rounds = x.is_cuda and x.dtype == torch.float32
    if rounds and torch.get_float32_matmul_precision() != "highest":
        return to_ten_digits(x)
    return x


def to_ten_digits(x: Tensor) -> Tensor:
    """Return float32 numbers rounded to ten binary digits; what is not finite stays so."""
    bits = x.contiguous().view(torch.int32)
    rounded = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(x.abs() < 2.0**127, rounded, torch.where(x.isfinite(), math.inf, x))


def _unit(x: Tensor) -> float:
    """Half the spacing at one of the format that sums of products are kept in."""
    return torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps / 2


def _position_norms(x: Tensor) -> Tensor:
    """Upper bounds of the norms of all positions, (batch, T)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norms = torch.linalg.vector_norm(x, dim=2, dtype=wide)
    return norms * (1 + x.shape[2] * _unit(x)) + torch.finfo(wide).tiny ** 0.5


def _exponents(norms: Tensor) -> Tensor:
    """Powers of two, as exponents, that norms are at most; 0 where there is none."""
    usable = norms.isfinite() & (norms > 0)
    return torch.frexp(torch.where(usable, norms, 0.5)).exponent


def _scaled(x: Tensor, exponents: Tensor) -> Tensor:
    """Every example times a power of two, in two steps, since one may be too large a number."""
    half = exponents // 2
    for some in (half, exponents - half):
        x = x * torch.ldexp(torch.ones_like(some, dtype=torch.float32), some).to(x.dtype).view(
            -1, *[1] * (x.ndim - 1)
        )
    return x


def _squares(cotangent: Tensor, x: Tensor) -> Tensor:
    """The squares of the norms, at least 0."""
    positions = x.shape[1]
    found = []
    for rows, columns in zip(
        cotangent.split(size := max(1, CHUNK // (2 * positions * positions))), x.split(size),
        strict=True,
    ):  # fmt: skip
        products = products_of(rows, rows.mT).mul_(products_of(columns, columns.mT))
        summed = products.sum(dim=(1, 2), dtype=torch.float64)
        found.append(summed.to(products.dtype).clamp_(min=0.0))
    return torch.cat(found) if found else in_float32(x.new_zeros(0))


def products_of(one: Tensor, other: Tensor) -> Tensor:
    """Matrix products, example by example, that are not rounded to bfloat16 at their end."""
    if one.dtype != torch.bfloat16:
        return one @ other
    if one.is_cuda and one.ndim == 3:
        return torch.bmm(one, other, out_dtype=torch.float32)
    return one.float() @ other.float()
