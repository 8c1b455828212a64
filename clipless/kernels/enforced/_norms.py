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
    def number(self) -> float | None:
        """The limit, unless it is a tensor."""
        return None if isinstance(self.limit, Tensor) else self.limit

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
    return _upper(_position_norms(cotangent), _position_norms(x))


def gram_norms(cotangent: Tensor, x: Tensor) -> Tensor:
    """Return upper bounds of `||sum_t g_t x_t^T||` for every example, (batch,), by inner products.

    Never below `sqrt(n u) sum_t ||g_t|| ||x_t||`, n the length of a position, u half the spacing.
    In TF32 the operands must have been rounded to it (`rounded_to_tf32`): products are exact then.
    """
    positions = cotangent.shape[1]
    by_position = _position_norms(cotangent), _position_norms(x)
    upper = _upper(*by_position)
    sizes = [torch.linalg.vector_norm(each, dim=1) for each in by_position]
    scale = sizes[0] * sizes[1]
    # Where products may overflow or vanish, the bound that needs none of them is taken.
    usable = upper.isfinite() & (scale >= 2.0**-45)
    for each in sizes:
        usable = usable & (each >= 2.0**-40) & (each <= 2.0**30)
    terms = cotangent.shape[2] + x.shape[2] + positions + 8
    # What vanishes on the way is below the smallest normal number, 2^-126, each time.
    vanished = terms * positions * 2.0**-45 + positions**2 * 2.0**-36
    squares = _squares(cotangent, x) + terms * _unit(x) * upper.square()
    squares = squares + vanished * scale.square()
    found = torch.where(usable, torch.minimum(upper, squares.sqrt()), upper)
    # A float32 sum over the positions of the example itself may be off by this (`_triton_sums`).
    return found + 4 * positions * _unit(x) * upper


def _upper(of_cotangent: Tensor, of_input: Tensor) -> Tensor:
    """`sum_t ||g_t|| ||x_t||` from the norms of positions."""
    positions, unit = of_cotangent.shape[1], _unit(of_cotangent)
    return (of_cotangent * of_input).sum(dim=1) * (1 + positions * unit)


def rounded_to_tf32(x: Tensor) -> Tensor:
    """Return float32 numbers rounded to the ten binary digits that TF32 keeps, or as they are."""
    rounds = x.is_cuda and x.dtype == torch.float32
    if rounds and torch.get_float32_matmul_precision() != "highest":
        return to_ten_digits(x)
    return x


def to_ten_digits(x: Tensor) -> Tensor:
    """Return float32 numbers rounded to ten binary digits."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def _unit(x: Tensor) -> float:
    """Half the spacing at one of the format that sums of products are kept in."""
    return torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps / 2


def _position_norms(x: Tensor) -> Tensor:
    """Upper bounds of the norms of all positions, (batch, T)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norms = torch.linalg.vector_norm(x, dim=2, dtype=wide)
    return norms * (1 + x.shape[2] * _unit(x)) + torch.finfo(wide).tiny ** 0.5


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
