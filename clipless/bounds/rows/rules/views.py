"""Operators that arrange entries anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from clipless.bounds.rows._layout import Rows, reshaped
from clipless.bounds.rows._rule import Layout, RowCall, register_rows


def _known(call: RowCall) -> tuple[Tensor, Rows]:
    """The first argument, which holds examples; no other may."""
    x: Tensor = call.args[0]
    call.only(x)
    rows = call.rows(x)
    if rows is None:
        call.refuse("an argument that should be the same for all examples depends on them")
    return x, rows


def _axis(axis: int, ndim: int) -> int:
    return axis + ndim if axis < 0 else axis


@register_rows(
    "aten.view", "aten._unsafe_view", "aten.reshape", "aten._reshape_alias", "aten.flatten",
    "aten._reshape_copy", "aten.unflatten",
)  # fmt: skip
def reshape(call: RowCall) -> Rows:
    """See `reshaped`: examples stay whole, and on one axis."""
    x, rows = _known(call)
    if call.output.dtype != x.dtype:
        call.refuse("its memory is read as another kind of number")
    found = reshaped(rows, call.batch, x.shape, call.output.shape)
    if found is None:
        call.refuse("a reshape cuts the batch axis into pieces, or mixes it with another one")
    return found


@register_rows("aten.permute", "aten.transpose", "aten.t", "aten.movedim", "aten.swapaxes")
def permute(call: RowCall) -> Rows:
    """Axes change their order."""
    x, rows = _known(call)
    order = list(range(x.ndim))
    if call.name.startswith("aten.permute"):
        order = [_axis(each, x.ndim) for each in call.argument(1, "dims")]
    elif call.name in ("aten.t", "aten.t_"):
        order.reverse()
    else:
        one, other = (_axis(call.argument(n, f"dim{n - 1}"), x.ndim) for n in (1, 2))
        order[one], order[other] = order[other], order[one]
    return rows.at(order.index(rows.axis))


@register_rows("aten.unsqueeze")
def unsqueeze(call: RowCall) -> Rows:
    """An axis of size one is put in."""
    x, rows = _known(call)
    place = _axis(call.argument(1, "dim"), x.ndim + 1)
    return rows.at(rows.axis + (place <= rows.axis))


@register_rows("aten.squeeze")
def squeeze(call: RowCall) -> Rows:
    """Axes of size one are left out; that of the examples has more, in a trace."""
    x, rows = _known(call)
    asked: Any = call.argument(1, "dim", list(range(x.ndim)))
    dims = [_axis(each, x.ndim) for each in (asked if isinstance(asked, list | tuple) else [asked])]
    return rows.at(rows.axis - sum(x.shape[each] == 1 and each < rows.axis for each in dims))


@register_rows("aten.expand")
def expand(call: RowCall) -> Rows:
    """Axes of size one are repeated, and new ones put in front."""
    x, rows = _known(call)
    return rows.at(rows.axis + call.output.ndim - x.ndim)


@register_rows("aten.repeat")
def repeat(call: RowCall) -> Rows:
    """The tensor is repeated along other axes than that of the examples."""
    x, rows = _known(call)
    times: Sequence[int] = call.argument(1, "repeats")
    axis = rows.axis + len(times) - x.ndim
    if times[axis] != 1:
        call.refuse("the batch is repeated along its own axis")
    return rows.at(axis)


@register_rows("aten.select", "aten.unbind")
def select(call: RowCall) -> Rows:
    """One place, or each, of another axis."""
    x, rows = _known(call)
    dim = _axis(call.argument(1, "dim", 0), x.ndim)
    if dim == rows.axis:
        call.refuse("it takes single examples out of the batch")
    return rows.at(rows.axis - (dim < rows.axis))


@register_rows(
    "aten.slice", "aten.split", "aten.split_with_sizes", "aten.chunk", "aten.narrow", "aten.flip",
    "aten.roll", "aten.constant_pad_nd", "aten.unfold", "aten.tril", "aten.triu", "aten.diagonal",
    "aten.unsafe_split", "aten.unsafe_chunk", "aten.slice_copy",
)  # fmt: skip
def along_other_axes(call: RowCall) -> Rows:
    """Parts, paddings and orders along the axes of the example itself."""
    x, rows = _known(call)
    name = call.name.removeprefix("aten.").removesuffix("_")
    if any(each in _axes_of(name, call, x.ndim) for each in (rows.axis, None)):
        outputs = call.output if isinstance(call.output, tuple | list) else (call.output,)
        whole = name == "slice" and call.argument(4, "step", 1) == 1
        if not (whole and all(each.shape == x.shape for each in outputs)):
            call.refuse("it takes parts of the batch, pads it, or changes its order")
    if name == "diagonal":
        gone = _axes_of(name, call, x.ndim)
        return rows.at(rows.axis - sum(each is not None and each < rows.axis for each in gone))
    return rows


def _axes_of(name: str, call: RowCall, ndim: int) -> list[int | None]:
    """The axes that an operator works along; None for all of them."""
    if name in ("tril", "triu"):
        return [ndim - 2, ndim - 1]
    if name == "diagonal":
        return [_axis(call.argument(2, "dim1", 0), ndim), _axis(call.argument(3, "dim2", 1), ndim)]
    if name == "constant_pad_nd":
        pad = call.argument(1, "pad")
        return [ndim - 1 - place // 2 for place, each in enumerate(pad) if each]
    places = {"slice": 1, "slice_copy": 1, "narrow": 1, "flip": 1, "unfold": 1}
    asked: Any = call.argument(
        places.get(name, 2), "dims" if name in ("flip", "roll") else "dim", 0
    )
    if name == "roll" and call.argument(2, "dims", None) is None:
        return [None]  # all entries, whatever axis they are on
    dims = list(asked) if isinstance(asked, list | tuple) else [asked]
    return [_axis(each, ndim) for each in dims] or [None]


@register_rows("aten.cat", "aten.stack", "aten._unsafe_cat")
def join(call: RowCall) -> Rows:
    """Tensors side by side along another axis; what holds no example is the same for all."""
    parts = [each for each in call.args[0] if each.numel() or each.ndim > 1]
    rows = call.agreed([call.rows(each) for each in parts])
    ndim = call.output.ndim
    dim = _axis(call.argument(1, "dim", 0), ndim)
    if call.name.startswith("aten.stack"):
        return rows.at(rows.axis + (dim <= rows.axis))
    if dim == rows.axis:
        call.refuse("it puts something beside the examples, on the batch axis")
    return rows


@register_rows("aten.pixel_shuffle", "aten.pixel_unshuffle", "aten.channel_shuffle")
def trailing_axes(call: RowCall) -> Layout:
    """Entries of an image change places."""
    x, rows = _known(call)
    if rows.axis >= x.ndim - 3:
        call.refuse("it changes the order along the batch axis")
    return rows
