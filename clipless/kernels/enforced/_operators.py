"""Sums over a batch of examples' gradients, as operators where a compiler traces them.

How examples are measured and added up part by part (`_sums`) is not for a compiler to look into:
it would unroll every part, and choose its own ways to sum. A traced pass has one operator for each
weight, with the threshold as a tensor; an ordinary one calls the functions behind them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clipless.kernels._bounded_gradients import example_norm
from clipless.kernels._weight_sums import ConvolutionGeometry, convolution_weight, linear_weight
from clipless.kernels.enforced._norms import Threshold, rounded_to_tf32
from clipless.kernels.enforced._sums import weight_sum


def by_position(x: Tensor) -> Tensor:
    """Return (batch, ..., features) as (batch, positions, features)."""
    return x.unsqueeze(1) if x.ndim == 2 else x.flatten(1, -2)


def weight_sum_of_linear(cotangent: Tensor, x: Tensor, limit: Threshold) -> tuple[Tensor, Tensor]:
    """The weight's gradient, (out, in) in float64, from (batch, T, out) and (batch, T, in).

    With it, the norms of the examples' own gradients: see `weight_sum`.
    """
    cotangent, x = rounded_to_tf32(cotangent), rounded_to_tf32(x)
    if limit.traced is not None:
        found: tuple[Tensor, Tensor] = _operators().enforced_linear_sum(cotangent, x, *limit.traced)
        return found
    return _of_linear(cotangent, x, limit)


def weight_sum_of_kernel(
    outer: Tensor, inner: Tensor, kernel: Tensor, geometry: ConvolutionGeometry, limit: Threshold
) -> tuple[Tensor, Tensor]:
    """The kernel's gradient in float64: that of a linear layer on patches of `inner`."""
    outer, inner = rounded_to_tf32(outer), rounded_to_tf32(inner)
    if limit.traced is not None:
        found: tuple[Tensor, Tensor] = _operators().enforced_kernel_sum(
            outer, inner, *limit.traced, list(kernel.shape), *geometry
        )
        return found
    return _of_kernel(outer, inner, list(kernel.shape), geometry, limit)


def summed_products(cotangent: Tensor, x: Tensor, factors: Tensor, limit: Threshold) -> Tensor:
    """The sum of the examples' gradients of a linear weight, each times its factor, in float64."""
    if limit.traced is not None:
        weight: Tensor = torch.ops.clipless.linear_weight_sum(cotangent, x, factors, False)
        return weight
    return linear_weight(cotangent, x, factors, in_place=False)


def summed_patches(
    outer: Tensor, inner: Tensor, factors: Tensor, kernel: Tensor, geometry: ConvolutionGeometry,
    limit: Threshold,
) -> Tensor:  # fmt: skip
    """The same of a convolution's kernel."""
    if limit.traced is not None:
        operator: Any = torch.ops.clipless.convolution_weight_sum
        weight: Tensor = operator(outer, inner, factors, False, kernel, *geometry)
        return weight
    return convolution_weight(outer, inner, factors, kernel, geometry, in_place=False)


def kernel_norms(
    cotangent: Tensor, x: Tensor, kernel: Tensor, geometry: ConvolutionGeometry
) -> Tensor:
    """Upper bounds of the norm of the kernel's gradient, for every example."""
    stride, _, dilation, _ = geometry
    patches = math.prod(
        math.ceil(k * math.gcd(s, d) / s)
        for k, s, d in zip(kernel.shape[2:], stride, dilation, strict=True)
    )
    return example_norm(cotangent) * example_norm(x) * math.sqrt(patches)


def _of_linear(cotangent: Tensor, x: Tensor, limit: Threshold) -> tuple[Tensor, Tensor]:
    return weight_sum(
        lambda part: (cotangent[part].unsqueeze(1), x[part].unsqueeze(1)), x.shape[0], limit
    )


def _of_kernel(
    outer: Tensor, inner: Tensor, kernel: Sequence[int], geometry: ConvolutionGeometry,
    limit: Threshold,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    groups = geometry[3]

    def operands(part: slice) -> tuple[Tensor, Tensor]:
        rows = outer[part].flatten(2).unflatten(1, (groups, -1)).mT
        return rows, _patches(inner[part], kernel[2:], geometry)

    total, norms = weight_sum(operands, inner.shape[0], limit)
    return total.view(list(kernel)), norms


def _patches(x: Tensor, window: Sequence[int], geometry: ConvolutionGeometry) -> Tensor:
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


def _linear_operator(
    cotangent: Tensor, x: Tensor, limit: Tensor, only_counted: Tensor
) -> tuple[Tensor, Tensor]:
    return _of_linear(cotangent, x, Threshold(limit, only_counted=only_counted))


def _kernel_operator(
    outer: Tensor, inner: Tensor, limit: Tensor, only_counted: Tensor, kernel: list[int],
    stride: list[int], padding: list[int], dilation: list[int], groups: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    threshold = Threshold(limit, only_counted=only_counted)
    return _of_kernel(outer, inner, kernel, (stride, padding, dilation, groups), threshold)


def _fake_linear(
    cotangent: Tensor, x: Tensor, limit: Tensor, only_counted: Tensor
) -> tuple[Tensor, Tensor]:
    weight = x.new_empty((cotangent.shape[-1], x.shape[-1]), dtype=torch.float64)
    return weight, x.new_empty(x.shape[0], dtype=_format_of_norms(x))


def _fake_kernel(
    outer: Tensor, inner: Tensor, limit: Tensor, only_counted: Tensor, kernel: list[int],
    *geometry: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    norms = inner.new_empty(inner.shape[0], dtype=_format_of_norms(inner))
    return inner.new_empty(kernel, dtype=torch.float64), norms


def _format_of_norms(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


_LIMIT = "Tensor limit, Tensor only_counted"


@functools.cache
def _operators() -> Any:
    """Define the operators when they are first needed: that takes longer than it should."""
    library = torch.library.Library("clipless", "FRAGMENT")
    # Compilers need not copy operands into another layout for them; older releases lack the tag.
    tags = tuple(tag for tag in (getattr(torch.Tag, "flexible_layout", None),) if tag is not None)
    library.define(
        f"enforced_linear_sum(Tensor cotangent, Tensor x, {_LIMIT}) -> (Tensor, Tensor)", tags=tags
    )
    library.define(
        f"enforced_kernel_sum(Tensor outer, Tensor inner, {_LIMIT}, int[] kernel, int[] stride, "
        "int[] padding, int[] dilation, int groups) -> (Tensor, Tensor)",
        tags=tags,
    )
    library.impl("enforced_linear_sum", _linear_operator, "CompositeExplicitAutograd")
    library.impl("enforced_kernel_sum", _kernel_operator, "CompositeExplicitAutograd")
    torch.library.register_fake("clipless::enforced_linear_sum", _fake_linear)
    torch.library.register_fake("clipless::enforced_kernel_sum", _fake_kernel)
    _KEPT.append(library)
    return torch.ops.clipless


_KEPT: list[torch.library.Library] = []
"""A library's operators are gone with it."""
