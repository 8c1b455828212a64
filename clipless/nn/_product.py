"""Products whose weight gradients keep to one example's bound: clipped, or summed in float32.

Product clipping bounds one example's weight gradient without ever forming it. For one example with
input x and cotangent g, the gradient of a linear or convolution weight has norm at most
`||g|| ||x||` (times a known gain). Scaling g down where that product exceeds a limit C, inside the
weight gradient only, bounds the weight's gradient by C at the price of two norms; the cotangent
that flows to earlier layers is untouched.

Products may be taken in bfloat16. Under autocast, torch rounds the gradient of a weight to bfloat16
after it was summed over the batch. That is a rounding of everybody's sum: where it jumps, one
example moves it by a whole spacing of bfloat16, however small its own gradient is, and no bound of
one example's gradient says anything about it. Here nothing is rounded but an example's own
activations and cotangents: gradients of weights are summed, and stay, in float32.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clipless.nn._adaptive import ExceedanceCount

Geometry = tuple[list[int], list[int], list[int], int]
"""Stride, padding and dilation of a convolution, and its groups."""


def rounds_products(x: Tensor) -> bool:
    """Whether products with `x` are to be taken in bfloat16, by autocast."""
    device = x.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16


def rounded(x: Tensor) -> Tensor:
    """Return `x` in bfloat16, for products in bfloat16."""
    return x.to(torch.bfloat16)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    limit: float | None,
    count: ExceedanceCount | None,
) -> Tensor:
    """`F.linear`, rounded if x is; every example's weight gradient has norm at most `limit`."""
    output: Tensor = _Linear.apply(x, weight, bias, limit, count)  # type: ignore[no-untyped-call]
    return output


def convolution(
    x: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    *,
    input_norm: Tensor | None,
    limit: float | None,
    count: ExceedanceCount | None,
) -> Tensor:
    """A convolution, rounded if x is; cotangents are scaled by `min(1, limit / (||g|| ||x||))`.

    The scaling applies to the gradient of the kernel only. `input_norm` holds ||x||, (batch,),
    taken before any padding; without a limit there is none.
    """
    output: Tensor = _Convolution.apply(  # type: ignore[no-untyped-call]
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


def _like(x: Tensor, operand: Tensor) -> Tensor:
    """The other operand of a product with `x`: rounded if x is."""
    return rounded(operand) if x.dtype == torch.bfloat16 else operand


def _summable(tensor: Tensor) -> Tensor:
    """What is added up over a batch, in float32 at least."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _without_casts(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A compiler traces backward passes under the autocast of the forward pass."""
    if x.dtype != torch.bfloat16:
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


class _Linear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        limit: float | None,
        count: ExceedanceCount | None,
    ) -> Tensor:
        return F.linear(x, _like(x, weight), None if bias is None else _like(x, bias))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, weight, bias, ctx.limit, ctx.count = inputs
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        (cotangent,) = cotangents
        x, weight = ctx.saved_tensors
        with _without_casts(x):
            rows, columns = _summable(cotangent), _summable(x)
            positions = tuple(range(cotangent.ndim - 1))
            bias_gradient = rows.sum(dim=positions) if ctx.has_bias else None
            if ctx.limit is not None:
                rows, columns = _scaled(rows, columns, example_norm(columns), ctx.limit, ctx.count)
            if x.ndim > 2:
                rows, columns = rows.flatten(0, -2), columns.flatten(0, -2)
            input_gradient = cotangent @ _like(x, weight)
            return input_gradient, rows.mT @ columns, bias_gradient, None, None


class _Convolution(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        kernel: Tensor,
        bias: Tensor | None,
        input_norm: Tensor | None,
        limit: float | None,
        count: ExceedanceCount | None,
        geometry: Geometry,
    ) -> Tensor:
        function = F.conv1d if x.ndim == 3 else F.conv2d
        shift = None if bias is None else _like(x, bias)
        return function(x, _like(x, kernel), shift, *geometry)

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
        with _without_casts(x):
            input_gradient, _, _ = backward(
                cotangent, x, _like(x, kernel), *options, [True, False, False]
            )
            rows, inputs = _summable(cotangent), _summable(x)
            axes = (0, *range(2, cotangent.ndim))
            bias_gradient = rows.sum(dim=axes) if ctx.has_bias else None
            if ctx.limit is not None:
                rows, inputs = _scaled(rows, inputs, input_norm, ctx.limit, ctx.count)
            _, kernel_gradient, _ = backward(rows, inputs, kernel, *options, [False, True, False])
            return input_gradient, kernel_gradient, bias_gradient, None, None, None, None
