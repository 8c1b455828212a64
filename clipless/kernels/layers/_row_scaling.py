"""Scaling of examples to a ball or a sphere, for layers, losses and guards alike."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from clipless.kernels._dispatch import dense, kernels_for, needs_plain_operators

_HALVES = (torch.float16, torch.bfloat16)
_LONGEST_ROW = 1 << 14
"""Entries of one example that a single kernel takes in; longer ones go to torch's operators."""

_WORTH_BLOCKS, _BLOCK = 1 << 20, 1 << 17
"""From how many entries on a CPU works on blocks of how many: larger tensors are memory that the
operating system hands out anew for every operator."""


def scale_into_ball(rows: Tensor, radius: float) -> Tensor:
    """Return `x * min(1, radius / ||x||)` for every example x of a batch of any shape.

    The map is 1-Lipschitz. Rows inside the ball are returned bit for bit. Norms are taken of rows
    divided by their largest entry (or the radius, if that is larger), so nothing overflows and the
    derivative is finite everywhere, at zero too. The backward pass keeps the rows and no copies.
    Half precisions are scaled in float32, and so far that rounding the result keeps its norm.
    """
    return _scale(rows, radius, sphere=False)


def scale_to_sphere(rows: Tensor, radius: float) -> Tensor:
    """Return `x * radius / ||x||` for every example x of a batch of any shape; zero stays zero."""
    return _scale(rows, radius, sphere=True)


def make_finite_and_bounded(rows: Tensor, radius: float, *, sphere: bool = False) -> Tensor:
    """Return rows with zeros for entries that are not finite, scaled into a ball or to a sphere.

    Finite rows inside the ball are returned bit for bit.
    """
    if isinstance(rows, Tensor) and rows.is_cuda and _fits_one_kernel(rows):
        kernels = kernels_for(rows)
        if kernels is not None:
            rows = dense(rows)
            kernels.guard(rows, result := torch.empty_like(rows), radius, sphere)
            return result
    on_cpu = isinstance(rows, Tensor) and rows.device.type == "cpu"
    if on_cpu and rows.numel() > _WORTH_BLOCKS and _fits_one_kernel(rows):
        return _guarded_in_blocks(rows, radius, sphere)
    finite = torch.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0)
    return (scale_to_sphere if sphere else scale_into_ball)(finite, radius)


def _guarded_in_blocks(rows: Tensor, radius: float, sphere: bool) -> Tensor:
    """The same, some rows at a time: what is between stays in a cache."""
    result = torch.empty_like(rows)
    count = max(1, _BLOCK // rows.shape[1:].numel())
    for few, place in zip(rows.split(count), result.split(count), strict=True):
        # A sum is finite only if all its terms are, and entries are replaced only if they are not.
        if not math.isfinite(few.sum()):
            few = torch.nan_to_num(few, nan=0.0, posinf=0.0, neginf=0.0)
        place.copy_(_scaled(few, radius, sphere))
    return result


def _fits_one_kernel(rows: Tensor) -> bool:
    """Whether nobody looks on, and rows are of a kind that the fast ways are made for."""
    return (
        not needs_plain_operators(rows)
        and rows.dtype == torch.float32
        and rows.ndim > 1
        and 0 < rows.numel() <= rows.shape[0] * _LONGEST_ROW
        and not (torch.is_grad_enabled() and rows.requires_grad)
    )


def _scale(rows: Tensor, radius: float, *, sphere: bool) -> Tensor:
    if isinstance(rows, Tensor) and rows.dtype in _HALVES:
        return _scale_half(rows, radius, sphere=sphere)
    differentiated = isinstance(rows, Tensor) and rows.requires_grad and torch.is_grad_enabled()
    if not differentiated or needs_plain_operators(rows):
        return _scaled(rows, radius, sphere)
    if rows.ndim == 1:
        return _scale(rows.unsqueeze(-1), radius, sphere=sphere).squeeze(-1)
    scaled: Tensor = _Scale.apply(rows, radius, sphere)  # type: ignore[no-untyped-call]
    return scaled


def _scale_half(rows: Tensor, radius: float, *, sphere: bool) -> Tensor:
    """Return half-precision rows scaled in float32, with room for the rounding of those moved.

    Rounding to the nearest number adds at most `eps / 2` of every entry's size, or half the
    smallest number there is: to the norm, `(1 + eps / 2) r + sqrt(n) tiny / 2`.
    """
    x, axes = _examples(rows.float())
    limits = torch.finfo(rows.dtype)
    rounding = math.sqrt(math.prod(x.shape[1:])) * limits.smallest_normal * limits.eps / 2
    room = max(0.0, 1 - rounding / radius) / (1 + limits.eps)
    scaled = _scale(x, radius, sphere=sphere)
    moved = (scaled != x).flatten(1).any(dim=1).reshape(-1, *([1] * len(axes)))
    result = torch.where(moved, (scaled * room).clamp(-limits.max, limits.max), x)
    return result.to(rows.dtype).view_as(rows)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, radius: float, sphere: bool) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.radius, ctx.sphere = radius, sphere
        return _scaled(rows, radius, sphere)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None, None]:
        """With u = x / ||x||: `(r / ||x||) (g - u <u, g>)` where x was moved, elsewhere g."""
        (cotangent,) = cotangents
        x, axes = _examples(*ctx.saved_tensors)
        unit, scale, energy, moved = _polar(x, axes, ctx.radius, ctx.sphere)
        along = (unit * cotangent).sum(dim=axes, keepdim=True) / energy
        tangent = (cotangent - unit * along) * (ctx.radius / energy.sqrt()) / scale
        return torch.where(moved, tangent, cotangent), None, None


def _polar(
    x: Tensor, axes: tuple[int, ...], radius: float, sphere: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `x / scale`, the scale, the energy of the quotient, and which examples are moved.

    Where nothing is moved the energy is said to be one: derivatives of its root stay finite.
    """
    # `sum` adds squares to within a few units; norms of torch, on the CPU, lose digits.
    scale = _scale_of(x.detach().abs().amax(dim=axes, keepdim=True), radius, sphere)
    unit = x / scale
    energy = (unit * unit).sum(dim=axes, keepdim=True)
    moved = energy > (0.0 if sphere else (radius / scale) ** 2)
    return unit, scale, torch.where(moved, energy, 1.0), moved


def _scaled(rows: Tensor, radius: float, sphere: bool) -> Tensor:
    """The same in torch's operators, of which none works in place: a tracer may look on."""
    x, axes = _examples(rows)
    unit, _, energy, moved = _polar(x, axes, radius, sphere)
    scaled = torch.where(moved, unit * (radius / energy.sqrt()), x)
    return scaled if x is rows else scaled.view_as(rows)


def _scale_of(largest: Tensor, radius: float, sphere: bool) -> Tensor:
    """What entries are divided by, so that squares neither overflow nor vanish."""
    return torch.where(largest > 0, largest, 1.0) if sphere else largest.clamp(min=radius)


def _examples(rows: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the rows with at least one axis of their own, and the list of these axes."""
    if isinstance(rows, Tensor) and rows.ndim > 1:
        return rows, tuple(range(1, rows.ndim))
    return rows.unsqueeze(-1).flatten(1), (1,)
