"""Fused attention: each example attends to itself."""

from __future__ import annotations

from torch import Tensor

from clipless.bounds.rows._layout import Rows
from clipless.bounds.rows._rule import Layout, RowCall, register_rows


@register_rows(
    "aten._scaled_dot_product_flash_attention_for_cpu", "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
def attention(call: RowCall) -> list[Layout]:
    """Queries, keys, values and masks have their examples on the first axis, or the second."""
    rows = call.agreed([call.rows(each) for each in call.tensors()])
    if rows.axis > 1:
        call.refuse("attention runs along the batch axis")
    for each in call.args[:3]:
        if each.shape[rows.axis] != rows.outer * call.batch * rows.inner:
            call.refuse("queries, keys and values are of different batches")
    return [_of(each, rows, place) for place, each in enumerate(call.output)]


def _of(output: object, rows: Rows, place: int) -> Layout:
    held = isinstance(output, Tensor) and output.ndim > rows.axis and output.is_floating_point()
    return rows if held and place < 2 else None
