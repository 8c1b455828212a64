"""Sorting of pairs of channels: GroupSort2 and MaxMin, as cheap as a ReLU.

A pair is swapped or it is not. That one bit a pair is all that the backward pass needs, which sends
cotangents back the way the values came: exactly a permutation, at ties too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from clipless.kernels._dispatch import dense, is_compiling, kernels_for, needs_plain_operators
from clipless.kernels.layers._compiler_operators import sorted_pairs
from clipless.kernels.layers._memory import run_in_blocks


def sort_pairs(x: Tensor, dim: int, *, descending: bool) -> Tensor:
    """Sort consecutive pairs along `dim`; the layout in memory is kept.

    What is saved for the backward pass is one byte a pair. At a tie nothing is swapped, so that
    the Jacobian always is a permutation.
    """
    if is_compiling():
        return sorted_pairs(x, dim, descending)
    if needs_plain_operators(x) or x.numel() == 0 or x.shape[dim] % 2:
        return _plain(x, dim, descending)
    if torch.is_grad_enabled() and x.requires_grad:
        ordered: Tensor = _SortPairs.apply(x, dim, descending)  # type: ignore[no-untyped-call]
        return ordered
    x = dense(x)
    return _sort(x, _Pairs.of(x, dim), descending, None)


def _plain(x: Tensor, dim: int, descending: bool) -> Tensor:
    """In ordinary operators."""
    inner = dim + 1 if dim >= 0 else dim
    pairs = x.unflatten(dim, (-1, 2))
    first, second = pairs.unbind(inner)
    swapped = (first < second if descending else first > second).unsqueeze(inner)
    ordered = torch.where(swapped, pairs.flip(inner), pairs)
    return ordered.flatten(dim, dim + 1) if dim >= 0 else ordered.flatten(dim - 1, dim)


class _Pairs(NamedTuple):
    """Where the members of pairs lie in memory: `blocks` of two rows of `inner` entries."""

    blocks: int
    inner: int

    @classmethod
    def of(cls, x: Tensor, dim: int) -> _Pairs:
        """In a tensor without gaps, whatever the order of its axes."""
        inner = x.stride(dim)
        return cls(x.numel() // (2 * inner), inner)

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """First and second members, as views: (blocks, inner) each."""
        shape, strides = (self.blocks, 2, self.inner), (2 * self.inner, self.inner, 1)
        first, second = x.as_strided(shape, strides).unbind(1)
        return first, second


class _SortPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, descending: bool) -> Tensor:
        x = dense(x)
        pairs = _Pairs.of(x, dim)
        swapped = torch.empty(pairs, dtype=torch.bool, device=x.device)
        ordered = _sort(x, pairs, descending, swapped)
        ctx.save_for_backward(swapped)
        ctx.pairs, ctx.dim, ctx.strides = pairs, dim % x.ndim, x.stride()
        return ordered

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None, None]:
        (x,) = cotangents
        (swapped,) = ctx.saved_tensors
        if torch.is_grad_enabled() or needs_plain_operators(x):
            # A derivative of the derivative is wanted, or cotangents come in batches.
            return _plain_swap(x, swapped, ctx.dim, ctx.strides), None, None
        if x.stride() != ctx.strides:  # marks lie in memory as the entries did
            empty = torch.empty_strided(x.shape, ctx.strides, dtype=x.dtype, device=x.device)
            x = empty.copy_(x)
        return _swap(x, ctx.pairs, swapped), None, None


def _plain_swap(x: Tensor, swapped: Tensor, dim: int, strides: tuple[int, ...]) -> Tensor:
    """`_swap` in ordinary operators, for any layout of `x`."""
    shape = list(x.shape)
    shape[dim] //= 2
    # Half as many marks as entries: axes beyond that of the pairs lie half as far apart.
    halved = [stride // 2 if stride > strides[dim] else stride for stride in strides]
    marks = swapped.as_strided(shape, halved).unsqueeze(dim + 1)
    pairs = x.reshape(*shape[: dim + 1], 2, *shape[dim + 1 :])
    return torch.where(marks, pairs.flip(dim + 1), pairs).reshape(x.shape)


def _sort(x: Tensor, pairs: _Pairs, descending: bool, swapped: Tensor | None) -> Tensor:
    """Return the sorted pairs of `x`, and write which of them were swapped."""
    ordered = torch.empty_like(x)
    kernels = kernels_for(x)
    if kernels is not None:
        kernels.sort_pairs(x, ordered, swapped, pairs.inner, descending)
        return ordered
    first, second = pairs.rows(x.detach())
    low, high = pairs.rows(ordered)
    if descending:
        low, high = high, low
    exceeds = torch.lt if descending else torch.gt

    def work(part: slice) -> None:
        a, b = first[part], second[part]
        torch.minimum(a, b, out=low[part])
        torch.maximum(a, b, out=high[part])
        if swapped is not None:
            exceeds(a, b, out=swapped[part])

    if x.device.type == "cpu":
        run_in_blocks(work, pairs.blocks, entries=pairs.inner)
    else:
        work(slice(None))
    return ordered


def _swap(x: Tensor, pairs: _Pairs, swapped: Tensor) -> Tensor:
    """Return `x` with the members of marked pairs exchanged."""
    exchanged = torch.empty_like(x)
    kernels = kernels_for(x)
    if kernels is not None:
        kernels.swap_pairs(x, exchanged, swapped, pairs.inner)
        return exchanged
    first, second = pairs.rows(x)
    low, high = pairs.rows(exchanged)
    if x.device.type != "cpu":
        torch.where(swapped, second, first, out=low)
        torch.where(swapped, first, second, out=high)
        return exchanged
    # On the CPU torch chooses entry by entry; bits, in contrast, are exchanged many at a time.
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    first, second, low, high = (rows.view(bits) for rows in (first, second, low, high))

    def work(part: slice) -> None:
        a, b = first[part], second[part]
        difference = torch.bitwise_xor(a, b).mul_(swapped[part].to(bits))
        torch.bitwise_xor(a, difference, out=low[part])
        torch.bitwise_xor(b, difference, out=high[part])

    run_in_blocks(work, pairs.blocks, entries=pairs.inner)
    return exchanged
