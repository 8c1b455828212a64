"""Rules of operations that move entries around, split or join them.

Signatures follow torch's own, so that positional and keyword arguments land where they should.
X bounds the norm of the input.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clipless.bounds._rule import Bound, CallSite, Signal, register, scaling


@register(torch.clone, Tensor.clone, Tensor.contiguous, Tensor.float, Tensor.double)
def rearrange(site: CallSite, x: Signal) -> Bound:
    """The same entries, perhaps in another place: l = 1, output X."""
    return scaling(site, x, 1.0, roundings=0)


@register(torch.reshape, Tensor.reshape, Tensor.view)
def reshape(site: CallSite, x: Signal, *shape: Any) -> Bound:
    """A new shape in the same order: l = 1, output X.

    That the batch axis stays the first and whole is checked for every tensor of the model, by
    running it with two batch sizes; so no other size may depend on the batch.
    """
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    if any(isinstance(size, torch.dtype) for size in sizes):
        site.refuse("viewing entries as another dtype has no Lipschitz constant.")
    for position, size in enumerate(sizes):
        if not isinstance(size, int) and not (position == 0 and getattr(size, "exact", False)):
            site.refuse(
                "a size depends on the batch. Only the first may, and it must be the size of the "
                "batch itself."
            )
    return rearrange(site, x)


reshape.shapes_only = True  # type: ignore[attr-defined]


@register(Tensor.view_as, Tensor.reshape_as)
def reshape_as(site: CallSite, x: Signal, other: Signal) -> Bound:
    """A new shape in the same order: l = 1, output X; the model of the shape gets no cotangent."""
    return Bound(lipschitz=(1.0, 0.0), output=x.norm, roundings=0, rows_apart=True)


@register(torch.flatten, Tensor.flatten)
def flatten(site: CallSite, x: Signal, start_dim: int = 0, end_dim: int = -1) -> Bound:
    """l = 1, output X; flattening may not include the batch axis."""
    site.own_axes((start_dim, end_dim), x)
    return rearrange(site, x)


@register(torch.unflatten, Tensor.unflatten)
def unflatten(site: CallSite, x: Signal, dim: int, sizes: Any = None) -> Bound:
    """l = 1, output X."""
    site.own_axes(dim, x)
    return rearrange(site, x)


@register(
    torch.transpose,
    torch.swapaxes,
    torch.swapdims,
    Tensor.transpose,
    Tensor.swapaxes,
    Tensor.swapdims,
)
def transpose(site: CallSite, x: Signal, dim0: int, dim1: int) -> Bound:
    """Swaps two axes of the example: l = 1, output X."""
    site.own_axes((dim0, dim1), x)
    return rearrange(site, x)


@register(torch.permute, Tensor.permute)
def permute(site: CallSite, x: Signal, *dims: Any) -> Bound:
    """Reorders axes of the example; the batch axis stays first: l = 1, output X."""
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], Sequence) else dims
    if order[0] % len(order) != 0:
        site.own_axes(0, x)
    return rearrange(site, x)


@register(torch.movedim, torch.moveaxis, Tensor.movedim, Tensor.moveaxis)
def movedim(site: CallSite, x: Signal, source: Any, destination: Any) -> Bound:
    """Moves axes of the example: l = 1, output X."""
    site.own_axes(source, x)
    site.own_axes(destination, x)
    return rearrange(site, x)


@register(torch.squeeze, Tensor.squeeze)
def squeeze(site: CallSite, x: Signal, dim: Any = None) -> Bound:
    """Drops axes of size one, named so that a batch of one keeps its axis: l = 1, output X."""
    if dim is None:
        site.refuse("squeeze() without an axis would also drop a batch of size one. Name the axis.")
    site.own_axes(dim, x)
    return rearrange(site, x)


@register(torch.unsqueeze, Tensor.unsqueeze)
def unsqueeze(site: CallSite, x: Signal, dim: int) -> Bound:
    """Adds an axis of size one to the example: l = 1, output X."""
    site.own_axes(dim, Signal(x.norm, site.output_shape))
    return rearrange(site, x)


@register(operator.getitem)
def getitem(site: CallSite, x: Any, index: Any) -> Bound:
    """Takes a part of the example, no entry twice: l = 1, output X."""
    if not isinstance(x, Signal):  # one of several results
        return rearrange(site, x[0])
    parts = index if isinstance(index, tuple) else (index,)
    if not parts:
        return rearrange(site, x)
    if not all(p is None or p is Ellipsis or isinstance(p, int | slice) for p in parts):
        site.refuse("only integers and slices may index a tensor: others can repeat entries.")
    if parts[0] != slice(None) and parts[0] is not Ellipsis:
        site.own_axes(0, x)
    if parts[0] is Ellipsis and sum(p is not None for p in parts[1:]) > len(x.shape):
        site.own_axes(0, x)
    return rearrange(site, x)


@register(torch.chunk, torch.split, Tensor.chunk, Tensor.split)
def split(site: CallSite, x: Signal, sizes: Any, dim: int = 0) -> Bound:
    """Parts of the example: l = 1, each output X."""
    site.own_axes(dim, x)
    return rearrange(site, x)


@register(torch.unbind, Tensor.unbind)
def unbind(site: CallSite, x: Signal, dim: int = 0) -> Bound:
    """Parts of the example: l = 1, each output X."""
    return split(site, x, None, dim)


@register(torch.cat, torch.concat, torch.concatenate)
def concatenate(site: CallSite, tensors: Sequence[Signal], dim: int = 0) -> Bound:
    """l = 1 in every part, output sqrt(sum X_i^2)."""
    if not all(isinstance(part, Signal) for part in tensors):
        site.refuse("one of the parts is a constant, which is not covered.")
    site.own_axes(dim, Signal(0.0, site.output_shape))
    return Bound(
        lipschitz=1.0,
        output=math.sqrt(sum(part.norm**2 for part in tensors)),
        forward_roundings=0,
        roundings=len(tensors) - 1,  # the sums of cotangents where the parts come from one tensor
        rows_apart=True,
    )


@register(torch.stack)
def stack(site: CallSite, tensors: Sequence[Signal], dim: int = 0) -> Bound:
    """l = 1 in every part, output sqrt(sum X_i^2)."""
    return concatenate(site, tensors, dim)
