"""Sorting of pairs while torch.compile traces: elementwise, so that it can be fused.

All that is written has the shape of x. A tensor of pairs, with one axis more, would be laid out in
its own way and then copied to the layout that a convolution wants.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def traced_sort(x: Tensor, dim: int, descending: bool) -> Tensor:
    """Sort consecutive pairs along `dim`, counted from the front."""
    if x.dtype == torch.float32 and torch.is_grad_enabled() and x.requires_grad:
        tagged: Tensor = _TaggedSort.apply(x, dim, descending)  # type: ignore[no-untyped-call]
        return tagged
    marked: Tensor = _MarkedSort.apply(x, dim, descending)[0]  # type: ignore[no-untyped-call]
    return marked


class _TaggedSort(torch.autograd.Function):
    """Every sorted entry carries, as its last bit, whether its pair was swapped.

    Sorted values are kept for the next layer's backward pass anyway, so that nothing is kept, and
    nothing written, besides them. They change by one unit in the last place at most, a relative
    2^-23 a layer, which is rounding like that of any product, and covered like it.
    """

    @staticmethod
    def forward(x: Tensor, dim: int, descending: bool) -> Tensor:
        other = _others(x, dim)
        leads = leading(x, dim)
        first, second = torch.where(leads, x, other), torch.where(leads, other, x)
        swapped = first < second if descending else first > second
        # The choice comes last, so that the result is more than bits under another name: of such,
        # compilers keep both.
        odd = (other.view(torch.int32) | 1).view(torch.float32)
        even = (x.view(torch.int32) & -2).view(torch.float32)
        return torch.where(swapped, odd, even)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.dim = inputs[1]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None, None]:
        (cotangent,) = cotangents
        (ordered,) = ctx.saved_tensors
        swapped = (ordered.view(torch.int32) & 1) != 0
        # Operators take the layout of their first operand: let it be that of the cotangent.
        swapped = (cotangent.abs() < 0) | swapped
        return torch.where(swapped, _others(cotangent, ctx.dim), cotangent), None, None


class _MarkedSort(torch.autograd.Function):
    """A byte of its own for every pair: shorter numbers have no bit to spare."""

    @staticmethod
    def forward(x: Tensor, dim: int, descending: bool) -> tuple[Tensor, Tensor]:
        other = _others(x, dim)
        low, high = torch.minimum(x, other), torch.maximum(x, other)
        if descending:
            low, high = high, low
        ordered = torch.where(leading(x, dim), low, high)
        first, second = x.unflatten(dim, (-1, 2)).unbind(dim + 1)
        return ordered, first < second if descending else first > second

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        ctx.dim = inputs[1]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None, None]:
        cotangent, _ = cotangents
        (marks,) = ctx.saved_tensors
        pair = torch.arange(cotangent.shape[ctx.dim], device=cotangent.device) // 2
        swapped = marks.index_select(ctx.dim, pair)
        # Operators take the layout of their first operand: let it be that of the cotangent.
        swapped = (cotangent.abs() < 0) | swapped
        return torch.where(swapped, _others(cotangent, ctx.dim), cotangent), None, None


def _others(x: Tensor, dim: int) -> Tensor:
    """For every entry the other one of its pair."""
    return x.unflatten(dim, (-1, 2)).flip(dim + 1).flatten(dim, dim + 1)


def leading(x: Tensor, dim: int) -> Tensor:
    """Whether entries are the first members of their pairs, to be broadcast to `x`.

    From short numbers: compilers never do again what makes eight bytes one.
    """
    places = torch.arange(x.shape[dim], dtype=torch.int32, device=x.device)
    return (places % 2 == 0).reshape(-1, *([1] * (x.ndim - 1 - dim)))


def members(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The first members of all pairs, each in both places of its pair, and the second members.

    In steps that compilers see through, and are willing to do again in the backward pass.
    """
    beside = x.stride(dim) == 1  # in memory, which is the order in which the results are laid out
    rows = x.movedim(dim, -1) if beside else x
    axis = rows.ndim if beside else dim + 1
    pairs = rows.unflatten(axis - 1, (-1, 2))

    def twice(member: int) -> Tensor:
        both = pairs.narrow(axis, member, 1).expand_as(pairs).flatten(axis - 1, axis)
        return both.movedim(-1, dim) if beside else both

    return twice(0), twice(1)
