"""Linear layers and convolutions of any network, each example's gradients below a threshold."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clipless.kernels._bounded_gradients import example_norm
from clipless.kernels._weight_sums import ConvolutionGeometry, convolution_weight, linear_weight
from clipless.kernels.enforced._norms import Threshold, upper_norms
from clipless.kernels.enforced._sums import weight_sum
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
        (cotangent,) = cotangents
        x, weight = ctx.saved_tensors
        to_input, to_weight, to_bias = None, None, None
        if ctx.needs_input_grad[0]:
            to_input = cotangent @ weight
        rows, columns = by_position(cotangent), by_position(x)
        of_weight, of_bias = ctx.limits
        if ctx.needs_input_grad[2] and of_bias is not None:
            to_bias = of_bias.row_sum(rows.sum(dim=1))
        if ctx.needs_input_grad[1] and of_weight is not None:
            if ctx.exact is False or rows.shape[1] == 1:
                if adds_integers(cotangent, of_weight.limit):
                    to_weight = of_weight.integer_sum(integer_linear_weight, rows, columns)
                else:
                    factors = of_weight.factors(upper_norms(rows, columns))
                    to_weight = linear_weight(rows, columns, factors, in_place=False)
            else:
                to_weight = weight_sum(
                    lambda part: (rows[part].unsqueeze(1), columns[part].unsqueeze(1)),
                    rows.shape[0],
                    of_weight,
                )
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
            x, kernel, bias, stride, padding, dilation, transposed is not None,
            transposed or [0] * len(stride), groups,
        )  # fmt: skip
        return output

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        (cotangent,) = cotangents
        x, kernel = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        to_input, to_kernel, to_bias = None, None, None
        if ctx.needs_input_grad[0]:
            to_input, _, _ = torch.ops.aten.convolution_backward(
                cotangent, x, kernel, None, stride, padding, dilation, ctx.transposed is not None,
                ctx.transposed or [0] * len(stride), groups, [True, False, False],
            )  # fmt: skip
        of_kernel, of_bias = ctx.limits
        if ctx.needs_input_grad[2] and of_bias is not None:
            to_bias = of_bias.row_sum(cotangent.flatten(2).sum(dim=2))
        if ctx.needs_input_grad[1] and of_kernel is not None:
            # Of a transposed convolution, the cotangent is cut into patches and x is not.
            outer, inner = (cotangent, x) if ctx.transposed is None else (x, cotangent)
            if ctx.exact is False and len(stride) < 3 and adds_integers(outer, of_kernel.limit):
                to_kernel = of_kernel.integer_sum(
                    integer_convolution_weight, outer, inner, kernel.shape[2:], ctx.geometry
                )
            elif ctx.exact is False:
                factors = of_kernel.factors(_kernel_norms(outer, inner, kernel, ctx.geometry))
                to_kernel = convolution_weight(
                    outer, inner, factors, kernel, ctx.geometry, in_place=False
                )
            else:
                to_kernel = _kernel_sum(outer, inner, kernel, ctx.geometry, of_kernel)
        return to_input, to_kernel, to_bias, None, None, None, None


def _alike(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    """Return a parameter as numbers of x's kind: leaves are float64, as the sums for them are."""
    return None if parameter is None else parameter.detach().to(x.dtype)


def by_position(x: Tensor) -> Tensor:
    """Return (batch, ..., features) as (batch, positions, features)."""
    return x.unsqueeze(1) if x.ndim == 2 else x.flatten(1, -2)


def _kernel_norms(
    cotangent: Tensor, x: Tensor, kernel: Tensor, geometry: ConvolutionGeometry
) -> Tensor:
    """Upper bounds of the norm of the kernel's gradient, for every example."""
    stride, _, dilation, _ = geometry
    patches = math.prod(
        math.ceil(k * math.gcd(s, d) / s)
        for k, s, d in zip(kernel.shape[2:], stride, dilation, strict=True)
    )
    return example_norm(cotangent) * example_norm(x) * math.sqrt(patches)


def _kernel_sum(
    cotangent: Tensor, x: Tensor, kernel: Tensor, geometry: ConvolutionGeometry, limit: Threshold
) -> Tensor:
    """The kernel's gradient: that of a linear layer on patches, in each group of channels."""
    groups = geometry[3]

    def operands(part: slice) -> tuple[Tensor, Tensor]:
        rows = cotangent[part].flatten(2).unflatten(1, (groups, -1)).mT
        return rows, _patches(x[part], kernel.shape[2:], geometry)

    return weight_sum(operands, x.shape[0], limit).view(kernel.shape)


def _patches(x: Tensor, window: torch.Size, geometry: ConvolutionGeometry) -> Tensor:
    """Return the patches of an image, (batch, groups, positions, entries of a patch)."""
    stride, padding, dilation, groups = geometry
    both = list(itertools.chain.from_iterable((p, p) for p in reversed(padding)))
    padded = F.pad(x, both)
    for axis, (size, step, gap) in enumerate(zip(window, stride, dilation, strict=True), start=2):
        padded = padded.unfold(axis, gap * (size - 1) + 1, step)
    cut: Any = (..., *(slice(None, None, gap) for gap in dilation))
    count = len(window)
    patches = padded[cut].unflatten(1, (groups, -1))  # (batch, groups, channels, places, window)
    patches = patches.movedim(2, 2 + count)  # (batch, groups, places, channels, window)
    return patches.flatten(2 + count).flatten(2, 1 + count)
