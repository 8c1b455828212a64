"""Euclidean norms, with a backward pass that keeps nothing but input and output."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from clipless.kernels.compilation._tracing import is_compiling, needs_plain_operators
from clipless.kernels.layers._compiler_operators import window_norms
from clipless.kernels.layers._window_norms import WindowNorms, wide


class Norms(Protocol):
    """Euclidean norms of parts of every example's channels."""

    def plain(self, x: Tensor) -> Tensor:
        """The norms of `x`, float32 or float64, in torch operators that autograd understands."""

    def forward(self, x: Tensor) -> Tensor:
        """The norms of `x`."""

    def backward(self, x: Tensor, norms: Tensor, cotangent: Tensor) -> Tensor:
        """The gradient of `x`."""


def euclidean_norms(x: Tensor, norms: Norms) -> Tensor:
    """Return `norms` of `x`. Half precisions are squared and summed in float32."""
    if is_compiling() and isinstance(norms, WindowNorms):
        return window_norms(x, norms)
    if not needs_plain_operators(x) and x.numel() > 0:
        result: Tensor = _EuclideanNorms.apply(x, norms)  # type: ignore[no-untyped-call]
        return result
    return norms.plain(wide(x)).to(x.dtype) if isinstance(x, Tensor) else norms.plain(x)


class _EuclideanNorms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norms: Norms) -> Tensor:
        result = norms.forward(x)
        ctx.save_for_backward(x, result)
        ctx.norms = norms
        return result

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        (cotangent,) = cotangents
        x, result = ctx.saved_tensors
        norms: Norms = ctx.norms
        further = torch.is_grad_enabled()
        if not further and not needs_plain_operators(cotangent):
            return norms.backward(x, result, cotangent), None
        # A derivative of the derivative is wanted, or cotangents come in batches.
        with torch.enable_grad():
            value = norms.plain(wide(x)).to(x.dtype)
            (gradient,) = torch.autograd.grad(value, x, cotangent, create_graph=further)
        return gradient, None
