"""Operators that work along some axes: sums, statistics, softmax, normalisations, orders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clipless.bounds.rows._layout import Rows
from clipless.bounds.rows._rule import Layout, RowCall, register_rows
from clipless.bounds.rows.rules.views import _axis, _known

_WITH_ORDER = ("linalg_vector_norm", "norm")  # whose second argument is an order


def _dims(call: RowCall, ndim: int) -> list[int]:
    place = 2 if call.name.removeprefix("aten.") in _WITH_ORDER else 1
    asked: Any = call.argument(place, "dim", call.kwargs.get("dims"))
    if asked is None or asked == [] or (place == 2 and isinstance(asked, float)):
        return list(range(ndim))
    if isinstance(asked, bool):  # var(x, unbiased): all axes
        return list(range(ndim))
    return [_axis(each, ndim) for each in (asked if isinstance(asked, list | tuple) else [asked])]


@register_rows(
    "aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.max", "aten.min", "aten.any",
    "aten.all", "aten.argmax", "aten.argmin", "aten.var", "aten.std", "aten.var_mean",
    "aten.std_mean", "aten.logsumexp", "aten.linalg_vector_norm", "aten.norm", "aten.median",
    "aten.nansum", "aten.nanmean", "aten.mode", "aten.aminmax", "aten.count_nonzero",
)  # fmt: skip
def reduce(call: RowCall) -> Rows:
    """Statistics over the axes of the example itself."""
    x, rows = _known(call)
    dims = _dims(call, x.ndim)
    if rows.axis in dims:
        call.refuse("it is a statistic over the examples of the batch")
    if "median" in call.name and 0 in x.stride():
        # On the CPU, torch then reads other entries than those of the axis.
        call.refuse("its argument was expanded, which torch's median gets wrong. Call contiguous()")
    output = call.output[0] if isinstance(call.output, tuple | list) else call.output
    if output.ndim == x.ndim:
        return rows
    return rows.at(rows.axis - sum(each < rows.axis for each in dims))


@register_rows(
    "aten._softmax", "aten._log_softmax", "aten._safe_softmax", "aten.softmax", "aten.log_softmax",
    "aten.cumsum", "aten.logcumsumexp", "aten.cummax", "aten.cummin", "aten.sort",
    "aten.argsort", "aten.glu", "aten._softmax_backward_data",
)  # fmt: skip
def along(call: RowCall) -> Rows:
    """Results along one axis of the example."""
    x, rows = _known(call)
    stable = call.name.startswith("aten.sort") and "stable" in call.kwargs
    dim = call.kwargs.get("dim", -1) if stable else call.argument(1, "dim", -1)
    if rows.axis == _axis(int(dim), x.ndim):
        call.refuse("it works along the batch axis")
    return rows


@register_rows("aten.prod", "aten.cumprod")
def product(call: RowCall) -> Layout | Sequence[Layout]:
    """Products of an example's own entries, where nobody differentiates them."""
    if call.args[0].requires_grad:
        # It looks for zeros in the whole batch, and computes other roundings if there is one.
        call.refuse(
            "how torch differentiates products depends on whether any example of the batch has a "
            "zero in them. Use the exponential of a sum of logarithms, or multiply entry by entry"
        )
    return along(call) if call.name.startswith("aten.cumprod") else reduce(call)


@register_rows("aten.topk", "aten.kthvalue")
def largest(call: RowCall) -> Rows:
    """The largest entries along one axis of the example."""
    x, rows = _known(call)
    dim = _axis(call.argument(2, "dim", -1), x.ndim)
    if rows.axis == dim:
        call.refuse("it compares the examples of the batch")
    return rows if call.output[0].ndim == x.ndim else rows.at(rows.axis - (dim < rows.axis))


@register_rows("aten.native_layer_norm", "aten._fused_rms_norm", "aten.rms_norm")
def layer_norm(call: RowCall) -> Rows:
    """Statistics over the last axes, each position by itself."""
    x = call.args[0]
    call.only(x)
    rows = call.rows(x)
    if rows is None or rows.axis >= x.ndim - len(call.argument(1, "normalized_shape")):
        call.refuse("it normalises over the batch axis")
    return rows


@register_rows("aten.native_group_norm")
def group_norm(call: RowCall) -> Rows:
    """Statistics over groups of channels of each image; images are on the first axis."""
    x = call.args[0]
    call.only(x)
    rows = call.rows(x)
    if rows is None or rows.axis != 0:
        call.refuse("it normalises over the batch axis")
    return rows


@register_rows(
    "aten.native_batch_norm", "aten._native_batch_norm_legit", "aten.cudnn_batch_norm",
    "aten._native_batch_norm_legit_no_training", "aten._batch_norm_with_update",
    "aten._batch_norm_no_update", "aten.miopen_batch_norm",
)  # fmt: skip
def batch_norm(call: RowCall) -> list[Layout]:
    """Known statistics only; or those of every channel by itself, if examples are channels.

    (That is how torch computes instance normalisation.)
    """
    x = call.args[0]
    call.only(x)
    rows = call.rows(x)
    if rows is None:
        call.refuse("its scales or statistics depend on examples")
    flags = [each for each in call.args[3:] if isinstance(each, bool)]
    training = bool(flags and flags[0]) and "no_training" not in call.name
    running = [each for each in call.args[3:5] if each is not None and not isinstance(each, bool)]
    if training and (rows.axis != 1 or running):
        call.refuse(
            "batch normalisation in training mode uses, or keeps, statistics of the batch. Replace "
            "it by torch.nn.GroupNorm, or freeze it: call eval() on these modules after "
            "model.train()"
        )
    if not training and rows.axis == 1:
        call.refuse("its statistics are those of channels, and examples are on their axis")
    statistics = Rows(0, rows.outer, rows.inner) if training else None
    return [
        rows if place == 0 else (statistics if each.numel() else None)
        for place, each in enumerate(call.output)
    ]
