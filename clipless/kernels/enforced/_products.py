"""Linear layers and convolutions of any network, each example's gradients below a threshold."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clipless.kernels._bounded_gradients import autocasts_to_bfloat16, to_bfloat16
from clipless.kernels._weight_sums import ConvolutionGeometry
from clipless.kernels.enforced._norms import Threshold, in_float32, upper_norms
from clipless.kernels.enforced._operators import (
    by_position,
    kernel_norms,
    summed_patches,
    summed_products,
    weight_sum_of_kernel,
    weight_sum_of_linear,
)
from clipless.kernels.exact._weights import (
    adds_integers,
    integer_convolution_weight,
    integer_linear_weight,
)


def enforced_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    limits: tuple[Threshold | None, Threshold | None],
    *,
    exact: bool | None,
) -> Tensor:
    """`F.linear` on (batch, ..., in): weight and bias keep to their thresholds, example by example.

    A parameter without a threshold gets no gradient.
    """
    if autocasts_to_bfloat16(x):
        x = to_bfloat16(x)
    output: Tensor = _Linear.apply(x, weight, bias, limits, exact)  # type: ignore[no-untyped-call]
    return output


def enforced_convolution(
    x: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    limits: tuple[Threshold | None, Threshold | None],
    geometry: ConvolutionGeometry,
    *,
    transposed: list[int] | None,
    exact: bool | None,
) -> Tensor:
    """A convolution in one to three dimensions, padded with zeros, with thresholds as above.

    `transposed`: the output padding of a transposed convolution; None for an ordinary one.
    """
    if autocasts_to_bfloat16(x):
        x = to_bfloat16(x)
    output: Tensor = _Convolution.apply(  # type: ignore[no-untyped-call]
        x, kernel, bias, limits, geometry, transposed, exact
    )
    return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None,
        limits: tuple[Threshold | None, Threshold | None], exact: bool | None,
    ) -> Tensor:  # fmt: skip
        weight, bias = weight.detach().to(x.dtype), _alike(bias, x)
        ctx.save_for_backward(x, weight)
        ctx.limits, ctx.exact = limits, exact
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        cotangent = cotangents[0].to(x.dtype)
        with without_casts(x):
            to_input, to_weight, to_bias = None, None, None
            if ctx.needs_input_grad[0]:
                to_input = cotangent @ weight
            rows, columns = by_position(cotangent), by_position(x)
            of_weight, of_bias = ctx.limits
            if ctx.needs_input_grad[2] and of_bias is not None:
                to_bias = of_bias.row_sum(in_float32(rows).sum(dim=1))
            if ctx.needs_input_grad[1] and of_weight is not None:
                if ctx.exact is False or rows.shape[1] == 1:
                    if adds_integers(rows, of_weight.number):
                        to_weight = of_weight.integer_sum(integer_linear_weight, rows, columns)
                        return to_input, to_weight, to_bias, None, None
                    rows, columns = in_float32(rows), in_float32(columns)
                    factors = of_weight.factors(upper_norms(rows, columns))
                    to_weight = summed_products(rows, columns, factors, of_weight)
                else:
                    to_weight, norms = weight_sum_of_linear(rows, columns, of_weight)
                    of_weight.counted(norms)
        return to_input, to_weight, to_bias, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kernel: Tensor, bias: Tensor | None,
        limits: tuple[Threshold | None, Threshold | None], geometry: ConvolutionGeometry,
        transposed: list[int] | None, exact: bool | None,
    ) -> Tensor:  # fmt: skip
        kernel, bias = kernel.detach().to(x.dtype), _alike(bias, x)
        ctx.save_for_backward(x, kernel)
        ctx.limits, ctx.geometry, ctx.transposed, ctx.exact = limits, geometry, transposed, exact
        stride, padding, dilation, groups = geometry
        output: Tensor = torch.convolution(
            x, kernel, bias, stride, padding,
            dilation, transposed is not None, transposed or [0] * len(stride), groups,
        )  # fmt: skip
        return output

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        x, kernel = ctx.saved_tensors
        cotangent = cotangents[0].to(x.dtype)
        stride, padding, dilation, groups = ctx.geometry
        to_input, to_kernel, to_bias = None, None, None
        with without_casts(x):
            if ctx.needs_input_grad[0]:
                to_input, _, _ = torch.ops.aten.convolution_backward(
                    cotangent, x, kernel, None, stride, padding, dilation,
                    ctx.transposed is not None, ctx.transposed or [0] * len(stride), groups,
                    [True, False, False],
                )  # fmt: skip
            of_kernel, of_bias = ctx.limits
            if ctx.needs_input_grad[2] and of_bias is not None:
                to_bias = of_bias.row_sum(in_float32(cotangent).flatten(2).sum(dim=2))
            if ctx.needs_input_grad[1] and of_kernel is not None:
                # Of a transposed convolution, the cotangent is cut into patches and x is not.
                outer, inner = (cotangent, x) if ctx.transposed is None else (x, cotangent)
                if (
                    ctx.exact is False
                    and len(stride) < 3
                    and adds_integers(outer, of_kernel.number)
                ):
                    to_kernel = of_kernel.integer_sum(
                        integer_convolution_weight, outer, inner, kernel.shape[2:], ctx.geometry
                    )
                elif ctx.exact is False and not (outer.is_cuda and of_kernel.traced):
                    outer, inner = in_float32(outer), in_float32(inner)
                    norms = kernel_norms(outer, inner, kernel, ctx.geometry)
                    to_kernel = summed_patches(
                        outer, inner, of_kernel.factors(norms), kernel, ctx.geometry, of_kernel
                    )
                else:
                    to_kernel, norms = weight_sum_of_kernel(
                        outer, inner, kernel, ctx.geometry, of_kernel
                    )
                    of_kernel.counted(norms)
        return to_input, to_kernel, to_bias, None, None, None, None


def without_casts(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """No autocast: backward passes may be traced under that of the forward pass."""
    if not torch.is_autocast_enabled(x.device.type):
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def _alike(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    """Return a parameter as numbers of x's kind: leaves are float64, as the sums for them are."""
    return None if parameter is None else parameter.detach().to(x.dtype)
