"""Weight gradients: sums over a batch in which every example's contribution has a factor.

`sum_i f_i g_i x_i^T` for a linear layer, the same on patches for a convolution. A factor of 0 takes
an example out of the sum, also where its entries are not finite. Nearly always all factors are 1,
and then the sum costs what it costs without them: factors are applied to the examples that need it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clipless.kernels._dispatch import kernels_for

ConvolutionGeometry = tuple[list[int], list[int], list[int], int]
"""Stride, padding and dilation of a convolution, and its groups."""

_LIBRARY = torch.library.Library("clipless", "FRAGMENT")
_FACTORS = "Tensor cotangent, Tensor x, Tensor? factors, bool in_place"
# Compilers need not copy operands into another layout for them; older releases have no such tag.
_TAGS = tuple(tag for tag in (getattr(torch.Tag, "flexible_layout", None),) if tag is not None)
_LIBRARY.define(f"linear_weight({_FACTORS}) -> Tensor", tags=_TAGS)
_LIBRARY.define(
    f"convolution_weight({_FACTORS}, Tensor kernel, int[] stride, int[] padding, int[] dilation, "
    "int groups) -> Tensor",
    tags=_TAGS,
)


def linear_weight(
    cotangent: Tensor, x: Tensor, factors: Tensor | None, *, in_place: bool
) -> Tensor:
    """Return the gradient of a linear weight, (out, in), from (batch, ..., out), (batch, ..., in).

    Without factors, all are 1. With `in_place`, rows whose factor is not 1 may be overwritten, in
    `cotangent` and in `x`: of an example that breaks its bound, only the bound has to be kept.
    """
    if torch.compiler.is_compiling() and not transformed():
        weight: Tensor = torch.ops.clipless.linear_weight(cotangent, x, factors, in_place)
        return weight
    return _linear_weight(cotangent, x, factors, in_place)


def convolution_weight(
    cotangent: Tensor,
    x: Tensor,
    factors: Tensor | None,
    kernel: Tensor,
    geometry: ConvolutionGeometry,
    *,
    in_place: bool,
) -> Tensor:
    """Return the gradient of a convolution's kernel; see `linear_weight`."""
    if torch.compiler.is_compiling() and not transformed():
        operator = torch.ops.clipless.convolution_weight
        weight: Tensor = operator(cotangent, x, factors, in_place, kernel, *geometry)
        return weight
    return _convolution_weight(cotangent, x, factors, in_place, kernel, *geometry)


def rows_scaled(rows: Tensor, factors: Tensor) -> Tensor:
    """Return every example times its factor: exact zeros for a factor of 0, whatever it held."""
    factors = factors.reshape(-1, *([1] * (rows.ndim - 1)))
    return torch.where(factors > 0, rows * factors, 0.0)


def _linear_weight(cotangent: Tensor, x: Tensor, factors: Tensor | None, in_place: bool) -> Tensor:
    cotangent, x = _with_factors(cotangent, x, factors, in_place)
    if x.ndim > 2:
        cotangent, x = cotangent.flatten(0, -2), x.flatten(0, -2)
    return cotangent.mT @ x


def _convolution_weight(
    cotangent: Tensor,
    x: Tensor,
    factors: Tensor | None,
    in_place: bool,
    kernel: Tensor,
    *geometry: Any,
) -> Tensor:
    cotangent, x = _with_factors(cotangent, x, factors, in_place)
    return _kernel_gradient(cotangent, x, kernel, *geometry)


def _kernel_gradient(
    cotangent: Tensor, x: Tensor, kernel: Tensor,
    stride: list[int], padding: list[int], dilation: list[int], groups: int,
) -> Tensor:  # fmt: skip
    _, weight, _ = torch.ops.aten.convolution_backward(
        cotangent, x, kernel, None, stride, padding, dilation, False, [0] * len(stride), groups,
        [False, True, False],
    )  # fmt: skip
    gradient: Tensor = weight
    return gradient


def _with_factors(
    cotangent: Tensor, x: Tensor, factors: Tensor | None, in_place: bool
) -> tuple[Tensor, Tensor]:
    """Return the two operands such that example i contributes `f_i` times what it did."""
    if factors is None:
        return cotangent, x
    if transformed():
        return rows_scaled(cotangent, factors), rows_scaled(x, (factors > 0).to(x.dtype))
    if may_look_at(factors):
        if bool((factors == 1).all()):
            return cotangent, x
        if bool((factors == 0).any()):
            x = rows_scaled(x, (factors > 0).to(x.dtype))
        return rows_scaled(cotangent, factors), x
    kernels = kernels_for(cotangent) if in_place and kernels_for(x) is not None else None
    if kernels is not None and lies_row_by_row(cotangent) and lies_row_by_row(x):
        kernels.scale_rows(cotangent, x, factors)
        return cotangent, x
    return rows_scaled(cotangent, factors), rows_scaled(x, (factors > 0).to(x.dtype))


def may_look_at(factors: Tensor) -> bool:
    """Whether a look at the values costs nothing; on a GPU it would wait for all that is queued."""
    return factors.device.type == "cpu"


def lies_row_by_row(x: Tensor) -> bool:
    """Whether each example's entries lie together in memory, without gaps, in any usual order."""
    return x.stride(0) == x.shape[1:].numel() and (
        x.is_contiguous() or (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last))
    )


def transformed() -> bool:
    """Whether a function transform, such as vmap, looks on."""
    return torch._C._are_functorch_transforms_active()


_LIBRARY.impl("linear_weight", _linear_weight, "CompositeExplicitAutograd")
_LIBRARY.impl("convolution_weight", _convolution_weight, "CompositeExplicitAutograd")


def _fake_linear_weight(
    cotangent: Tensor, x: Tensor, factors: Tensor | None, in_place: bool
) -> Tensor:  # fmt: skip
    return x.new_empty((cotangent.shape[-1], x.shape[-1]))


def _fake_convolution_weight(
    cotangent: Tensor,
    x: Tensor,
    factors: Tensor | None,
    in_place: bool,
    kernel: Tensor,
    *geometry: Any,
) -> Tensor:
    return _kernel_gradient(cotangent, x, kernel, *geometry)


torch.library.register_fake("clipless::linear_weight", _fake_linear_weight)
torch.library.register_fake("clipless::convolution_weight", _fake_convolution_weight)
