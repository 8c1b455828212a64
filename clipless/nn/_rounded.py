"""Products in bfloat16 whose weight gradients are summed, and stay, in float32.

Under autocast, torch rounds the gradient of a weight to bfloat16 after it was summed over the
batch. That is a rounding of everybody's sum: where it jumps, one example moves it by a whole
spacing of bfloat16, however small its own gradient is, and no bound of one example's gradient
says anything about it. Here nothing is rounded but an example's own activations and cotangents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clipless.nn._adaptive import ExceedanceCount
from clipless.nn._product import _scaled, example_norm

_Geometry = tuple[list[int], list[int], list[int], int]


def rounds_products(x: Tensor) -> bool:
    """Whether products with `x` are to be taken in bfloat16, by autocast."""
    device = x.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16


def rounded_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    limit: float | None,
    count: ExceedanceCount | None,
) -> Tensor:
    """`F.linear` in bfloat16; with a limit, it clips as `clipped_linear` does."""
    output: Tensor = _RoundedLinear.apply(  # type: ignore[no-untyped-call]
        x.to(torch.bfloat16), weight, bias, limit, count
    )
    return output


def rounded_convolution(
    x: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    *,
    input_norm: Tensor | None,
    limit: float | None,
    count: ExceedanceCount | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """A convolution in bfloat16; with a limit, it clips as `clipped_convolution` does."""
    geometry = (list(stride), list(padding), list(dilation), groups)
    output: Tensor = _RoundedConvolution.apply(  # type: ignore[no-untyped-call]
        x.to(torch.bfloat16), kernel, bias, input_norm, limit, count, geometry
    )
    return output


def _half(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(torch.bfloat16)


class _RoundedLinear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        limit: float | None,
        count: ExceedanceCount | None,
    ) -> Tensor:
        return F.linear(x, weight.to(torch.bfloat16), _half(bias))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, weight, bias, ctx.limit, ctx.count = inputs
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        (cotangent,) = cotangents
        x, weight = ctx.saved_tensors
        # A compiler traces this under the autocast of the forward pass.
        with torch.autocast(x.device.type, enabled=False):
            rows, columns = cotangent.float(), x.float()
            positions = tuple(range(cotangent.ndim - 1))
            bias_gradient = rows.sum(dim=positions) if ctx.has_bias else None
            if ctx.limit is not None:
                rows, columns = _scaled(rows, columns, example_norm(columns), ctx.limit, ctx.count)
            if x.ndim > 2:
                rows, columns = rows.flatten(0, -2), columns.flatten(0, -2)
            input_gradient = cotangent @ weight.to(torch.bfloat16)
            return input_gradient, rows.mT @ columns, bias_gradient, None, None


class _RoundedConvolution(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        kernel: Tensor,
        bias: Tensor | None,
        input_norm: Tensor | None,
        limit: float | None,
        count: ExceedanceCount | None,
        geometry: _Geometry,
    ) -> Tensor:
        function = F.conv1d if x.ndim == 3 else F.conv2d
        return function(x, kernel.to(torch.bfloat16), _half(bias), *geometry)

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
        with torch.autocast(x.device.type, enabled=False):
            rounded = kernel.to(torch.bfloat16)
            input_gradient, _, _ = backward(cotangent, x, rounded, *options, [True, False, False])
            rows, inputs = cotangent.float(), x.float()
            axes = (0, *range(2, cotangent.ndim))
            bias_gradient = rows.sum(dim=axes) if ctx.has_bias else None
            if ctx.limit is not None:
                rows, inputs = _scaled(rows, inputs, input_norm, ctx.limit, ctx.count)
            _, kernel_gradient, _ = backward(rows, inputs, kernel, *options, [False, True, False])
            return input_gradient, kernel_gradient, bias_gradient, None, None, None, None
