"""Lipschitz layers with thresholds: their proved bounds stay, as the cap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clipless.kernels import enforced_convolution
from clipless.nn import (
    Embedding,
    FrobeniusLinear,
    Householder,
    SpectralConv1d,
    SpectralConv2d,
    SpectralLinear,
)
from clipless.privacy.enforced._passes import LayerPass
from clipless.privacy.enforced.layers._table import (
    Own,
    Thresholds,
    enforces,
    padded,
    use_embedding,
    use_linear,
)


@enforces(SpectralLinear, FrobeniusLinear)
def linear(module: Any, of: LayerPass, exact: bool | None, x: Tensor) -> Tensor:
    """`x W^T + b`."""
    return use_linear(of, x, module.weight, module.bias, exact)


@enforces(SpectralConv1d, SpectralConv2d)
def convolution(module: Any, of: LayerPass, exact: bool | None, x: Tensor) -> Tensor:
    """`scale * (kernel conv x) + bias`: the same as the convolution of `scale * x`."""
    mode = "circular" if module.padding_mode == "circular" else "constant"
    x = padded(x, module._flat_padding(), mode) * module.scale
    count = module.axes
    geometry = (list(module.stride), [0] * count, list(module.dilation), module.groups)

    def plain(x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        stride, padding, dilation, groups = geometry
        found: Tensor = torch.convolution(
            x, kernel, bias, stride, padding, dilation, False, padding, groups
        )
        return found

    def bounded(x: Tensor, own: Own, limits: Thresholds) -> Tensor:
        kernel, bias = own
        if kernel is None:
            raise ValueError("a convolution without a kernel")
        return enforced_convolution(
            x, kernel, bias, (limits[0], limits[1]), geometry, transposed=None, exact=exact
        )

    return of.use([module.weight, module.bias], x, plain, bounded, by_position=False)


class _Table:
    """An `Embedding` of ours as torch's own looks."""

    max_norm, scale_grad_by_freq, sparse, padding_idx = None, False, False, None

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


@enforces(Embedding)
def embedding(module: Any, of: LayerPass, exact: bool | None, tokens: Tensor) -> Tensor:
    """Rows of a table."""
    return use_embedding(of, _Table(module.weight), tokens, exact)


@enforces(Householder)
def householder(module: Any, of: LayerPass, exact: bool | None, x: Tensor) -> Tensor:
    """Reflections by angles, of which every example has a copy."""
    angles = of.copies(module.angles).copies
    positions = [1] * (x.ndim - 2)
    reflected: Tensor = module._reflect(x, angles.view(x.shape[0], *positions, -1))
    return reflected
