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
from clipless.kernels.enforced._norms import Threshold, chunked, product_norms


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
        ctx.save_for_backward(x, weight.detach())
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
            factors = of_weight.factors(product_norms(rows, columns, exact=ctx.exact))
            to_weight = linear_weight(rows, columns, factors, in_place=False)
        return to_input, to_weight, to_bias, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kernel: Tensor, bias: Tensor | None,
        limits: tuple[Threshold | None, Threshold | None], geometry: ConvolutionGeometry,
        transposed: list[int] | None, exact: bool | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, kernel.detach())
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
            norms = _kernel_norms(outer, inner, kernel, ctx.geometry, exact=ctx.exact)
            factors = of_kernel.factors(norms)
            to_kernel = convolution_weight(
                outer, inner, factors, kernel, ctx.geometry, in_place=False
            )
        return to_input, to_kernel, to_bias, None, None, None, None


def by_position(x: Tensor) -> Tensor:
    """Return (batch, ..., features) as (batch, positions, features)."""
    return x.unsqueeze(1) if x.ndim == 2 else x.flatten(1, -2)


def _kernel_norms(
    cotangent: Tensor, x: Tensor, kernel: Tensor, geometry: ConvolutionGeometry,
    *, exact: bool | None,
) -> Tensor:  # fmt: skip
    """Upper bounds of the norm of the kernel's gradient, for every example."""
    stride, _, dilation, groups = geometry
    window = kernel.shape[2:]
    if exact is False:
        patches = math.prod(
            math.ceil(k * math.gcd(s, d) / s)
            for k, s, d in zip(window, stride, dilation, strict=True)
        )
        return example_norm(cotangent) * example_norm(x) * math.sqrt(patches)

    def norms(part: slice) -> Tensor:
        columns = _patches(x[part], window, geometry)
        rows = cotangent[part].flatten(2).unflatten(1, (groups, -1)).mT
        found = product_norms(rows.flatten(0, 1), columns.flatten(0, 1), exact=exact)
        return torch.linalg.vector_norm(found.view(-1, groups), dim=1)

    positions = math.prod(cotangent.shape[2:])
    return chunked(norms, x, positions * x.shape[1] * math.prod(window))


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
