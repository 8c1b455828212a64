"""Small parameters of any network: embeddings, scales and shifts, parameters that stand alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clipless.kernels._bounded_gradients import example_norm
from clipless.kernels._weight_sums import rows_scaled
from clipless.kernels.enforced._norms import Threshold, in_float32
from clipless.kernels.enforced._operators import by_position


def enforced_embedding(
    tokens: Tensor,
    table: Tensor,
    limit: Threshold | None,
    *,
    padding: int,
    exact: bool | None,
    dtype: torch.dtype,
) -> Tensor:
    """`F.embedding` on (batch, ...); the gradient of one example keeps to its threshold.

    Of `dtype`, whatever the table is. It is the sum over the positions of each token: exactly that
    is measured, unless `exact` is False; then it is taken to be `sqrt(largest multiplicity)` times
    the cotangent's norm.
    """
    rows: Tensor = _Embedding.apply(  # type: ignore[no-untyped-call]
        tokens, table, limit, padding, exact, dtype
    )
    return rows


def enforced_scale_shift(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    limits: tuple[Threshold | None, Threshold | None],
    *,
    axis: int,
) -> Tensor:
    """`x * scale + shift`, parameters laid along the axes of x from `axis` on, with thresholds."""
    output: Tensor = _ScaleShift.apply(x, scale, shift, limits, axis)  # type: ignore[no-untyped-call]
    return output


def enforced_copies(
    parameter: Tensor, rows: int, limit: Threshold | None, dtype: torch.dtype
) -> Tensor:
    """Return the parameter once for every example, (rows, *shape), with a threshold for each."""
    copies: Tensor = _Copies.apply(parameter, rows, limit, dtype)  # type: ignore[no-untyped-call]
    return copies


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, table: Tensor, limit: Threshold | None, padding: int,
        exact: bool | None, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(tokens)
        ctx.entries, ctx.limit, ctx.padding, ctx.exact = table.shape[0], limit, padding, exact
        return F.embedding(tokens, table.to(dtype), padding if padding >= 0 else None)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        (tokens,) = ctx.saved_tensors
        if ctx.limit is None:
            return None, None, None, None, None, None
        places = tokens.flatten(1) if tokens.ndim > 1 else tokens.unsqueeze(1)
        rows = by_position(in_float32(cotangents[0]))
        if ctx.padding >= 0:
            rows = torch.where((places == ctx.padding).unsqueeze(2), 0.0, rows)
        factors = ctx.limit.factors(_embedding_norms(places, rows, exact=ctx.exact))
        gradient = torch.ops.aten.embedding_dense_backward(
            rows_scaled(rows, factors).double(), places, ctx.entries, ctx.padding, False
        )
        return None, gradient, None, None, None, None


def _embedding_norms(tokens: Tensor, rows: Tensor, *, exact: bool | None) -> Tensor:
    """Upper bounds of the norm of the table's gradient, for every example."""
    norms = example_norm(rows)
    positions = tokens.shape[1]
    if positions <= 1:
        return norms
    alike = tokens.unsqueeze(2) == tokens.unsqueeze(1)
    most = alike.sum(dim=2).amax(dim=1).to(rows.dtype)
    upper = most.sqrt() * norms
    if exact is False:
        return upper
    first = alike.to(torch.uint8).argmax(dim=2)  # where a token occurs first in its example
    sums = torch.zeros_like(rows).scatter_add_(1, first.unsqueeze(2).expand_as(rows), rows)
    rounding = most * torch.finfo(rows.dtype).eps
    own = example_norm(sums) + rounding * upper
    return torch.where(upper.isfinite(), torch.minimum(own, upper), upper)


class _ScaleShift(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor | None, shift: Tensor | None,
        limits: tuple[Threshold | None, Threshold | None], axis: int,
    ) -> Tensor:  # fmt: skip
        some = shift if scale is None else scale
        if some is None:
            raise ValueError("neither a scale nor a shift was given")
        ctx.shape = (*some.shape, *[1] * (x.ndim - axis - some.ndim))
        ctx.own = some.shape
        scale = None if scale is None else scale.detach().to(x.dtype).view(ctx.shape)
        ctx.save_for_backward(x, scale)
        ctx.limits = limits
        output = x if scale is None else x * scale
        return output if shift is None else output + shift.to(x.dtype).view(ctx.shape)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        x, scale = ctx.saved_tensors
        cotangent = in_float32(cotangents[0])
        to_scale, to_shift = None, None
        of_scale, of_shift = ctx.limits
        if ctx.needs_input_grad[1] and of_scale is not None:
            to_scale = of_scale.row_sum(_sum_positions(cotangent * x, ctx.shape, ctx.own))
        if ctx.needs_input_grad[2] and of_shift is not None:
            to_shift = of_shift.row_sum(_sum_positions(cotangent, ctx.shape, ctx.own))
        to_input = None
        if ctx.needs_input_grad[0]:
            to_input = (cotangent if scale is None else cotangent * scale).to(x.dtype)
        return to_input, to_scale, to_shift, None, None


def _sum_positions(rows: Tensor, shape: tuple[int, ...], own: torch.Size) -> Tensor:
    """Sum each example over its positions, to the shape of a parameter: (batch, *own)."""
    batch = rows.shape[0]
    lead = rows.ndim - 1 - len(shape)
    wide = (batch, *[1] * lead, *shape)
    axes = [i for i in range(1, rows.ndim) if wide[i] == 1 and rows.shape[i] != 1]
    summed = rows.sum(dim=axes, keepdim=True) if axes else rows
    return summed.reshape(batch, *own)


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, rows: int, limit: Threshold | None, dtype: torch.dtype
    ) -> Tensor:
        ctx.limit = limit
        return parameter.to(dtype).expand(rows, *parameter.shape).clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        limit = ctx.limit
        return (None if limit is None else limit.row_sum(cotangents[0])), None, None, None
