"""Operators that work entry by entry, and those whose result holds nothing of their argument."""

from __future__ import annotations

from clipless.bounds.rows._layout import Rows
from clipless.bounds.rows._rule import RowCall, register_pointwise_rows, register_rows


@register_pointwise_rows
@register_rows(
    "aten.clone", "aten._to_copy", "aten.detach", "aten.alias", "aten.lift_fresh",
    "aten.contiguous", "aten.where", "aten.masked_fill", "aten.nan_to_num", "aten.copy",
    "aten.bernoulli", "aten.clamp", "aten.fill", "aten.zero", "aten.complex", "aten.polar",
    "aten._thnn_fused_lstm_cell", "aten.celu", "aten.rrelu_with_noise",
)  # fmt: skip
def entry_by_entry(call: RowCall) -> Rows:
    """Shapes are aligned at their ends: examples must then be on one axis of the result.

    Masks of dropout are drawn entry by entry, so that an example's mask depends on its place alone.
    """
    return _aligned(call)


def _aligned(call: RowCall) -> Rows:
    output = call.output[0] if isinstance(call.output, tuple | list) else call.output
    aligned = []
    for each in call.tensors():
        rows = call.rows(each)
        if rows is not None:
            aligned.append(rows.at(rows.axis + output.ndim - each.ndim))
    return call.agreed(aligned)


@register_rows("aten.native_dropout")
def dropout(call: RowCall) -> tuple[Rows, None]:
    """The result, and its mask, which is drawn by place and holds nothing of any example."""
    return _aligned(call), None


@register_rows(
    "aten.empty_like", "aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.rand_like",
    "aten.randn_like", "aten.randint_like", "aten.new_zeros", "aten.new_ones", "aten.new_empty",
    "aten.new_full", "aten.new_empty_strided",
)  # fmt: skip
def shape_alone(call: RowCall) -> None:
    """A tensor of the same shape or kind, and of other values."""
    return


@register_rows(
    "aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten.nonzero",
    "aten.masked_select", "aten._unique2", "aten.unique_dim", "aten.unique_consecutive",
    "aten.bincount", "aten.histc", "aten.item",
)  # fmt: skip
def decision(call: RowCall) -> None:
    """Numbers and shapes that depend on the values of examples decide what happens to others."""
    call.refuse(
        "values of the examples become a Python number or a shape, on which what happens to other "
        "examples may depend (`if mask.all():`, `x[mask]`, `.item()`). Use torch.where or "
        "multiplication by a mask"
    )


@register_rows("aten.view_as_complex", "aten.view_as_real", "aten.real", "aten.imag")
def complex_numbers(call: RowCall) -> Rows:
    """Pairs of entries of the last axis become complex numbers, or the other way round."""
    x = call.args[0]
    rows = call.rows(x)
    if rows is None or (call.output.ndim < x.ndim and rows.axis == x.ndim - 1):
        call.refuse("pairs along the batch axis become complex numbers")
    return rows
