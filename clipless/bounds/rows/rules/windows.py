"""Convolutions, pooling, and what else works on the places of an image."""

from __future__ import annotations

from clipless.bounds.rows._layout import Rows
from clipless.bounds.rows._rule import RowCall, register_rows


@register_rows("aten.convolution", "aten._convolution", "aten.mkldnn_convolution")
def convolution(call: RowCall) -> Rows:
    """One kernel for all images, which are on the first axis."""
    x = call.args[0]
    call.only(x)
    rows = call.rows(x)
    if rows is None or rows.axis != 0:
        call.refuse("a convolution needs its examples on the first axis")
    return rows


_PLACES = {"1d": 1, "2d": 2, "3d": 3}


@register_rows(
    "aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices", "aten.avg_pool1d",
    "aten.avg_pool2d", "aten.avg_pool3d", "aten._adaptive_avg_pool2d", "aten._adaptive_avg_pool3d",
    "aten.adaptive_max_pool2d", "aten.adaptive_max_pool3d", "aten.adaptive_avg_pool1d",
    "aten.adaptive_max_pool1d", "aten.max_pool1d", "aten.max_pool2d", "aten.reflection_pad1d",
    "aten.reflection_pad2d", "aten.reflection_pad3d", "aten.replication_pad1d",
    "aten.replication_pad2d", "aten.replication_pad3d", "aten.upsample_nearest1d",
    "aten.upsample_nearest2d", "aten.upsample_nearest3d", "aten.upsample_linear1d",
    "aten.upsample_bilinear2d", "aten.upsample_bicubic2d", "aten.upsample_trilinear3d",
    "aten._upsample_nearest_exact1d", "aten._upsample_nearest_exact2d",
    "aten._upsample_bilinear2d_aa", "aten._upsample_bicubic2d_aa", "aten.im2col", "aten.col2im",
)  # fmt: skip
def places(call: RowCall) -> Rows:
    """Windows of places, channel by channel; examples are on none of these axes."""
    x = call.args[0]
    call.only(x)
    rows = call.rows(x)
    count = next((n for name, n in _PLACES.items() if name in call.name), 3)
    if rows is None or rows.axis >= x.ndim - count:
        call.refuse("windows reach over the batch axis")
    return rows


@register_rows("aten.grid_sampler_2d", "aten.grid_sampler_3d")
def sampled(call: RowCall) -> Rows:
    """Each image is read at places of its own, or at the same for all."""
    rows = call.agreed([call.rows(each) for each in call.args[:2]])
    if rows.axis != 0:
        call.refuse("images and grids need their examples on the first axis")
    return rows
