"""Sums over a batch: how far one example moves them is proved, rounding included.

`sum_i f_i g_i x_i^T` for a linear layer, the same on patches for a convolution. A factor of 0 takes
an example out of the sum, also where its entries are not finite. Nearly always all factors are 1,
and then the sum costs what it costs without them: factors are applied to the examples that need it.

A float32 sum over a large batch rounds by more than an example adds. So products are summed in
float32 over parts of few rows, whose rounding is small against one example's bound, and the parts
in float64 (`docs/arithmetic.md`). The parts are cut by place, so that an example that is emptied
changes its own part and no other. `sum_slack` says what is left of rounding.

Where a unit of privacy has several rows (a user with several records), the rows' gradients are
bounded one by one and averaged: each row has a share, and is multiplied by it here. Whoever runs a
backward pass says what the shares are (`row_shares`), the sums take them, and how often they were
taken is counted, so that a sum which did not is found out.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from clipless.kernels._dispatch import kernels_for

SUM_SLACK = 2.0**-11
"""What the rounding of a part may add to one example's bound, relative to it."""
_TERMS_AT_ONCE = 4096
"""So many squared rows times positions are in a part: 2 * 4096 * 2^-24 is `SUM_SLACK`."""

_MOST_POSITIONS = 2 * _TERMS_AT_ONCE
"""Convolutions over more positions are summed in float64 altogether."""

ConvolutionGeometry = tuple[list[int], list[int], list[int], int]
"""Stride, padding and dilation of a convolution, and its groups."""

_LIBRARY = torch.library.Library("clipless", "FRAGMENT")
_FACTORS = "Tensor cotangent, Tensor x, Tensor? factors, bool in_place"
# Compilers need not copy operands into another layout for them; older releases have no such tag.
_TAGS = tuple(tag for tag in (getattr(torch.Tag, "flexible_layout", None),) if tag is not None)
_LIBRARY.define(f"linear_weight_sum({_FACTORS}) -> Tensor", tags=_TAGS)
_LIBRARY.define(
    f"convolution_weight_sum({_FACTORS}, Tensor kernel, "
    "int[] stride, int[] padding, int[] dilation, int groups) -> Tensor",
    tags=_TAGS,
)


def rows_at_once(positions: int) -> int:
    """Return how many rows a float32 part may have whose entries are sums over `positions` each.

    m rows with T positions are m T terms, each rounded by 2^-24 of what was added up, which is m
    bounds at most: two neighbours' parts are off by `2 m^2 T 2^-24` bounds (`T 2^-24` if the row is
    alone in its part, since an empty part is exactly zero).
    """
    return max(1, math.isqrt(_TERMS_AT_ONCE // max(1, positions)))


def sum_slack(*, positions: int | None, rows: int, records: int = 1) -> float:
    """Return what rounding may add to one example's part of a sum, relative to its bound.

    `positions`: the most terms that one row has in an entry, None if that is not known; `rows`: the
    most rows of a step. The last term is the float64 sum of the parts. With `records`, a unit has
    up to so many rows for each of `rows`, one after the other, each with a part of the unit's
    bound: it shares the first and the last of its parts with others, and has those between to
    itself, whose errors are together below half of what is allowed for one.
    """
    at_once = 1 if positions is None else rows_at_once(positions)
    own = 2 * at_once**2 * positions if positions and at_once > 1 else positions or _MOST_POSITIONS
    own = min(own, _MOST_POSITIONS)  # longer ones are summed in float64, or in pieces
    alone = 1.0 if records == 1 else 2.5
    return alone * own * 2.0**-24 * 1.001 + rows * (rows * records / at_once + 2) * 2.0**-52


def linear_weight(
    cotangent: Tensor, x: Tensor, factors: Tensor | None, *, in_place: bool
) -> Tensor:
    """Return the gradient of a linear weight, (out, in), from (batch, ..., out), (batch, ..., in).

    In float64. Without factors, all are 1. With `in_place`, rows whose factor is not 1 may be
    overwritten, in `cotangent` and in `x`: of an example that breaks its bound, only the bound has
    to be kept.
    """
    if torch.compiler.is_compiling() and not transformed():
        weight: Tensor = torch.ops.clipless.linear_weight_sum(cotangent, x, factors, in_place)
        return weight
    return _linear_weight(cotangent, x, factors, in_place)


def convolution_weight(
    cotangent: Tensor,
    x: Tensor,
    factors: Tensor | None,
    kernel: Tensor,
    geometry: ConvolutionGeometry,
    *,
    in_place: bool,
) -> Tensor:
    """Return the gradient of a convolution's kernel, in float64; see `linear_weight`."""
    if torch.compiler.is_compiling() and not transformed():
        operator = torch.ops.clipless.convolution_weight_sum
        weight: Tensor = operator(cotangent, x, factors, in_place, kernel, *geometry)
        return weight
    return _convolution_weight(cotangent, x, factors, in_place, kernel, *geometry)


def row_sum(rows: Tensor) -> Tensor:
    """Return the sum of the examples' own gradients, (batch, *shape) -> (*shape), in float64."""
    return rows.sum(dim=0, dtype=torch.float64)


def rows_scaled(rows: Tensor, factors: Tensor) -> Tensor:
    """Return every example times its factor: exact zeros for a factor of 0, whatever it held."""
    factors = factors.reshape(-1, *([1] * (rows.ndim - 1)))
    return torch.where(factors > 0, rows * factors, 0.0)


def _linear_weight(cotangent: Tensor, x: Tensor, factors: Tensor | None, in_place: bool) -> Tensor:
    cotangent, x = _with_factors(cotangent, x, factors, in_place)
    positions = x.shape[1:-1].numel()
    if x.ndim > 2:
        cotangent, x = cotangent.flatten(0, -2), x.flatten(0, -2)
    if x.device.type != "cpu":  # where many small products cost more than one of float64
        return cotangent.double().mT @ x.double()
    at_once = min(rows_at_once(positions) * positions, _TERMS_AT_ONCE)
    return (
        _added(g.mT @ y for g, y in zip(cotangent.split(at_once), x.split(at_once), strict=True))
        if len(x)
        else x.new_zeros(cotangent.shape[-1], x.shape[-1], dtype=torch.float64)
    )


def _added(parts: Iterator[Tensor]) -> Tensor:
    """Add up float32 parts in float64."""
    total = next(parts).to(torch.float64)
    for part in parts:
        total = total + part if transformed() else total.add_(part)
    return total


def _convolution_weight(
    cotangent: Tensor,
    x: Tensor,
    factors: Tensor | None,
    in_place: bool,
    kernel: Tensor,
    *geometry: Any,
) -> Tensor:
    cotangent, x = _with_factors(cotangent, x, factors, in_place)
    if x.device.type != "cpu" or not len(x):
        return _kernel_gradient(cotangent, x, kernel, *geometry).double().contiguous()
    positions = cotangent.shape[2:].numel()
    if positions > _MOST_POSITIONS:
        cotangent, x, kernel = cotangent.double(), x.double(), kernel.double()
    at_once = rows_at_once(positions)
    total = _added(
        _kernel_gradient(g, y, kernel, *geometry)
        for g, y in zip(cotangent.split(at_once), x.split(at_once), strict=True)
    )
    return total.contiguous()  # whatever layout the library chose for parts of this size


def _kernel_gradient(
    cotangent: Tensor, x: Tensor, kernel: Tensor,
    stride: list[int], padding: list[int], dilation: list[int], groups: int,
) -> Tensor:  # fmt: skip
    _, weight, _ = torch.ops.aten.convolution_backward(
        cotangent, x, kernel, None, stride, padding, dilation, False, [0] * len(stride), groups,
        [False, True, False],
    )  # fmt: skip
    gradient: Tensor = weight
    return gradient


def _with_factors(
    cotangent: Tensor, x: Tensor, factors: Tensor | None, in_place: bool
) -> tuple[Tensor, Tensor]:
    """Return the two operands such that example i contributes `f_i` times what it did."""
    if factors is None:
        return cotangent, x
    if transformed():
        return rows_scaled(cotangent, factors), rows_scaled(x, (factors > 0).to(x.dtype))
    if may_look_at(factors):
        if bool((factors == 1).all()):
            return cotangent, x
        if bool((factors == 0).any()):
            x = rows_scaled(x, (factors > 0).to(x.dtype))
        return rows_scaled(cotangent, factors), x
    kernels = kernels_for(cotangent) if in_place and kernels_for(x) is not None else None
    if kernels is not None and lies_row_by_row(cotangent) and lies_row_by_row(x):
        kernels.scale_rows(cotangent, x, factors)
        return cotangent, x
    return rows_scaled(cotangent, factors), rows_scaled(x, (factors > 0).to(x.dtype))


class _Shares(threading.local):
    """The shares of the backward pass that this thread runs."""

    values: Tensor | None = None
    taken = 0


_HERE = _Shares()


class UsedShares:
    """How often the sums of a backward pass have taken shares into account."""

    count = 0


@contextmanager
def row_shares(values: Tensor | None) -> Iterator[UsedShares]:
    """Let the sums over rows of this thread weigh each row by its share; None stands for ones."""
    before = _HERE.values, _HERE.taken
    _HERE.values, _HERE.taken = values, 0
    used = UsedShares()
    try:
        yield used
        used.count = _HERE.taken
    finally:
        _HERE.values, _HERE.taken = before


def has_shares() -> bool:
    """Whether rows have shares here. (Compiled code and transforms have none.)"""
    return not torch.compiler.is_compiling() and _HERE.values is not None


def times_shares(factors: Tensor | None, rows: Tensor, part: slice | None = None) -> Tensor | None:
    """Return the factors of some rows times their shares; no factors stand for ones.

    `part`: which of the batch's rows these are, if a sum takes them part by part. Products that are
    not normal numbers have few digits, and become zeros.
    """
    if not has_shares() or _HERE.values is None:
        return factors
    shares = _HERE.values
    if part is None or part.start == 0:
        _HERE.taken += 1
    if part is not None:
        shares = shares[part]
    if shares.shape != rows.shape[:1]:
        raise RuntimeError(f"there are shares for {len(shares)} rows, in a sum over {len(rows)}")
    # In float32 at least: shares rounded to bfloat16 would weigh a unit's rows by more than one.
    kind = rows.dtype if factors is None else factors.dtype
    dtype = torch.promote_types(kind, torch.float32)
    shares = shares.to(device=rows.device, dtype=dtype)
    if factors is None:
        return shares
    product = factors * shares
    return torch.where(product >= torch.finfo(product.dtype).tiny, product, 0.0)


def may_look_at(factors: Tensor) -> bool:
    """Whether a look at the values costs nothing; on a GPU it would wait for all that is queued."""
    return factors.device.type == "cpu"


def lies_row_by_row(x: Tensor) -> bool:
    """Whether each example's entries lie together in memory, without gaps, in any usual order."""
    return x.stride(0) == x.shape[1:].numel() and (
        x.is_contiguous() or (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last))
    )


def transformed() -> bool:
    """Whether a function transform, such as vmap, looks on."""
    return torch._C._are_functorch_transforms_active()


_LIBRARY.impl("linear_weight_sum", _linear_weight, "CompositeExplicitAutograd")
_LIBRARY.impl("convolution_weight_sum", _convolution_weight, "CompositeExplicitAutograd")


def _fake_linear_weight(
    cotangent: Tensor, x: Tensor, factors: Tensor | None, in_place: bool
) -> Tensor:  # fmt: skip
    return x.new_empty((cotangent.shape[-1], x.shape[-1]), dtype=torch.float64)


def _fake_convolution_weight(
    cotangent: Tensor,
    x: Tensor,
    factors: Tensor | None,
    in_place: bool,
    kernel: Tensor,
    *geometry: Any,
) -> Tensor:
    return kernel.new_empty(kernel.shape, dtype=torch.float64)


torch.library.register_fake("clipless::linear_weight_sum", _fake_linear_weight)
torch.library.register_fake("clipless::convolution_weight_sum", _fake_convolution_weight)
