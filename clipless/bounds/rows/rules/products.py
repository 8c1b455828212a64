"""Matrix products: examples may be on an axis that survives, never on one that is summed over."""

from __future__ import annotations

from torch import Tensor

from clipless.bounds.rows._layout import Rows
from clipless.bounds.rows._rule import Layout, RowCall, register_rows

_SUMMED = "a matrix product sums over the batch axis, or multiplies examples with one another"


def _product(call: RowCall, a: Tensor, b: Tensor, added: Tensor | None = None) -> Rows:
    """Return where the examples are in `a @ b (+ added)`, with batch axes in front."""
    found: list[Layout] = []
    ndim = call.output.ndim
    left, right = call.rows(a), call.rows(b)
    if left is not None:
        if left.axis == a.ndim - 1:
            call.refuse(_SUMMED)
        found.append(left)
    if right is not None:
        if b.ndim == 1 or right.axis == b.ndim - 2:
            call.refuse(_SUMMED)
        found.append(right.at(ndim - 1) if right.axis == b.ndim - 1 else right)
    if added is not None and (rows := call.rows(added)) is not None:
        found.append(rows.at(rows.axis + ndim - added.ndim))
    if left is not None and right is not None and left != right:
        call.refuse(_SUMMED)
    return call.agreed(found)


@register_rows("aten.mm", "aten.bmm", "aten.mv", "aten.matmul")
def product(call: RowCall) -> Rows:
    """`a @ b`."""
    return _product(call, call.args[0], call.args[1])


@register_rows("aten.addmm", "aten.baddbmm", "aten.addmv", "aten.addbmm")
def product_and_sum(call: RowCall) -> Rows:
    """`c + a @ b`."""
    if call.name.startswith("aten.addbmm"):
        call.refuse("it sums over the batch axis")
    return _product(call, call.args[1], call.args[2], call.args[0])


@register_rows("aten.linear", "aten.mkldnn_linear", "mkldnn._linear_pointwise")
def linear(call: RowCall) -> Rows:
    """`x @ W^T + b`, with the same weights for all."""
    x = call.args[0]
    call.only(x)
    rows = call.rows(x)
    if rows is None or rows.axis == x.ndim - 1:
        call.refuse(_SUMMED)
    return rows


@register_rows("aten.dot", "aten.vdot", "aten.ger", "aten.outer")
def refused(call: RowCall) -> Rows:
    """Products of vectors, whose axis is that of the examples."""
    call.refuse(_SUMMED)
