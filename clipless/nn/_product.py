"""Product clipping: bounding one example's weight gradient without ever forming it.

For one example with input x and cotangent g, the gradient of a linear or convolution weight has
norm at most `||g|| ||x||` (times a known gain). Scaling g down where that product exceeds a limit
C, inside the weight gradient only, bounds the weight's gradient by C at the price of two norms; the
cotangent that flows to earlier layers is untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clipless.nn._adaptive import ExceedanceCount


def clipped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    limit: float,
    count: ExceedanceCount | None = None,
) -> Tensor:
    """`F.linear`, with every example's part of the weight gradient of norm at most `limit`."""
    output: Tensor = _ClippedLinear.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, limit, count
    )
    return output


def clipped_convolution(
    x: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    *,
    input_norm: Tensor,
    limit: float,
    count: ExceedanceCount | None = None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """A convolution, with every example's cotangent scaled by `min(1, limit / (||g|| ||x||))`.

    The scaling applies to the gradient of the kernel only. `input_norm` holds ||x||, (batch,),
    taken before any padding.
    """
    geometry = (list(stride), list(padding), list(dilation), groups)
    output: Tensor = _ClippedConvolution.apply(  # type: ignore[no-untyped-call]
        x, kernel, bias, input_norm, limit, count, geometry
    )
    return output


def example_norm(x: Tensor) -> Tensor:
    """The Euclidean norm of every example, (batch,)."""
    # Not vector_norm, which loses a thousandth over millions of float32 entries on the CPU.
    return x.flatten(1).square().sum(dim=1).sqrt()


def _scaled(
    cotangent: Tensor,
    x: Tensor,
    input_norm: Tensor,
    limit: float,
    count: ExceedanceCount | None,
) -> tuple[Tensor, Tensor]:
    """Scale each example's g or x, whichever is smaller, by `min(1, limit / (||g|| ||x||))`.

    The weight's gradient is bilinear in the two, so that either will do.
    """
    product = example_norm(cotangent) * input_norm
    outside = product > limit
    if count is not None:
        count.add(outside)
    factor = torch.where(outside, limit / torch.where(outside, product, 1.0), 1.0)
    if x.numel() < cotangent.numel():
        return cotangent, x * factor.reshape(-1, *([1] * (x.ndim - 1)))
    return cotangent * factor.reshape(-1, *([1] * (cotangent.ndim - 1))), x


class _ClippedLinear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        limit: float,
        count: ExceedanceCount | None,
    ) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, weight, bias, ctx.limit, ctx.count = inputs
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        (cotangent,) = cotangents
        x, weight = ctx.saved_tensors
        rows, columns = _scaled(cotangent, x, example_norm(x), ctx.limit, ctx.count)
        if x.ndim > 2:
            rows, columns = rows.flatten(0, -2), columns.flatten(0, -2)
        positions = tuple(range(cotangent.ndim - 1))
        bias_gradient = cotangent.sum(dim=positions) if ctx.has_bias else None
        return cotangent @ weight, rows.mT @ columns, bias_gradient, None, None


class _ClippedConvolution(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        kernel: Tensor,
        bias: Tensor | None,
        input_norm: Tensor,
        limit: float,
        count: ExceedanceCount | None,
        geometry: tuple[list[int], list[int], list[int], int],
    ) -> Tensor:
        function = F.conv1d if x.ndim == 3 else F.conv2d
        return function(x, kernel, bias, *geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, kernel, bias, input_norm, ctx.limit, ctx.count, ctx.geometry = inputs
        ctx.save_for_backward(x, kernel, input_norm)
        ctx.has_bias = bias is not None

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        (cotangent,) = cotangents
        x, kernel, input_norm = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        options = (None, stride, padding, dilation, False, [0] * len(stride), groups)
        backward = torch.ops.aten.convolution_backward
        input_gradient, _, _ = backward(cotangent, x, kernel, *options, [True, False, False])
        scaled, inputs = _scaled(cotangent, x, input_norm, ctx.limit, ctx.count)
        _, kernel_gradient, _ = backward(scaled, inputs, kernel, *options, [False, True, False])
        axes = (0, *range(2, cotangent.ndim))
        bias_gradient = cotangent.sum(dim=axes) if ctx.has_bias else None
        return input_gradient, kernel_gradient, bias_gradient, None, None, None, None
