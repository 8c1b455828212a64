"""Operators that read or write at indices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clipless.bounds.rows._layout import Rows
from clipless.bounds.rows._rule import RowCall, register_rows
from clipless.bounds.rows.rules.views import _axis

_ROUTING = "examples are looked up by an index, so that one may be read in the place of another"


@register_rows("aten.embedding")
def embedding(call: RowCall) -> Rows:
    """Rows of a table that is the same for all, one for every token."""
    tokens = call.args[1]
    call.only(tokens)
    rows = call.rows(tokens)
    if rows is None:
        call.refuse(_ROUTING)
    return rows


@register_rows("aten.index_select")
def index_select(call: RowCall) -> Rows:
    """Places of another axis that are the same for all; or of a table, one for every example."""
    x, dim, index = call.args[:3]
    rows, places = call.rows(x), call.rows(index)
    dim = _axis(dim, x.ndim)
    if rows is None and places is not None:
        return places.at(dim)
    if rows is None or places is not None or rows.axis == dim:
        call.refuse(_ROUTING)
    return rows


@register_rows("aten.gather", "aten.take_along_dim")
def gather(call: RowCall) -> Rows:
    """`x[i, index[i, j]]`: each example reads places of its own along another axis."""
    x, dim, index = call.args[:3]
    rows = call.agreed([call.rows(x), call.rows(index)])
    if rows.axis == _axis(dim, x.ndim):
        call.refuse(_ROUTING)
    return rows


@register_rows("aten.scatter", "aten.scatter_add", "aten.scatter_reduce")
def scatter(call: RowCall) -> Rows:
    """`x[i, index[i, j]] = source[i, j]`: each example writes places of its own."""
    x, dim, index = call.args[:3]
    source: Any = call.argument(3, "src")
    given = [x, index, *([source] if isinstance(source, Tensor) else [])]
    rows = call.agreed([call.rows(each) for each in given])
    if rows.axis == _axis(dim, x.ndim):
        call.refuse(_ROUTING)
    return rows


@register_rows("aten.index", "aten._unsafe_index")
def index(call: RowCall) -> Rows:
    """`x[:, i, j]`, where the indices may depend on the example.

    An index on the batch axis itself has to be `arange(batch)`: then each example reads itself.
    """
    x, given = call.args[0], list(call.args[1])
    rows = call.rows(x)
    known = [(axis, each) for axis, each in enumerate(given) if each is not None]
    if any(each.dtype in (torch.bool, torch.uint8) for _, each in known):
        call.refuse("a mask chooses how much is read. Use torch.where")
    wide = torch.broadcast_shapes(*(each.shape for _, each in known))
    axes = [axis for axis, _ in known]
    together = axes == list(range(axes[0], axes[0] + len(axes)))
    place = axes[0] if together else 0  # where the axes of the indices come to stand
    found = [
        each_rows.at(place + each_rows.axis + len(wide) - each.ndim)
        for _, each in known
        if (each_rows := call.rows(each)) is not None
    ]
    if rows is not None and rows.axis not in axes:
        kept = [axis for axis in range(x.ndim) if axis not in axes]
        order = kept.index(rows.axis)
        before = sum(axis < place for axis in kept) if together else 0
        found.append(rows.at(order if order < before else order + len(wide)))
        if len(found) > 1:
            call.refuse(_ROUTING)
    elif rows is not None:
        own = given[rows.axis]
        here = call.rows(own) is None and _counts_up(own, call.batch) and rows == Rows(rows.axis)
        if not here:
            call.refuse(_ROUTING)
        axis = own.shape.index(call.batch)
        found.append(Rows(place + axis + len(wide) - own.ndim))
    return call.agreed(found)


def _counts_up(index: Tensor, batch: int) -> bool:
    """Whether an index is 0, 1, 2, ... along one axis, and there is no other."""
    return index.numel() == batch and bool(
        (index.flatten() == torch.arange(batch, device=index.device)).all()
    )
