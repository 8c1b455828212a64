"""Activations that preserve gradient norms: 1-Lipschitz, zero at zero, Jacobian of norm one.

All of them act on pairs or groups of channels of the same example and position.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from clipless.kernels import GradientLimits, per_example_parameter, sort_pairs
from clipless.nn._base import BoundedModule


class GroupSort(nn.Module):
    """Sort every group of `group_size` consecutive channels along `dim`, in ascending order.

    A sort is a permutation, so norms of outputs and cotangents are preserved exactly, at ties too.

    Example:
        >>> GroupSort(2)(torch.tensor([[3.0, 1.0, 5.0, 7.0]]))
        tensor([[1., 3., 5., 7.]])
    """

    def __init__(self, group_size: int = 2, *, dim: int = 1) -> None:
        super().__init__()
        if group_size < 2:
            raise ValueError(f"group_size must be at least 2, got {group_size}")
        self.group_size = group_size
        self.dim = own_axis(dim)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ...) -> the same shape; the size of `dim` must be a multiple of the group's."""
        if self.group_size == 2:
            return sort_pairs(x, self.dim, descending=False)
        groups = x.unflatten(self.dim, (-1, self.group_size))
        return _merge(groups.sort(dim=_inner(self.dim)).values, self.dim)

    def extra_repr(self) -> str:
        """The arguments, for printing."""
        return f"{self.group_size}, dim={self.dim}"


class MaxMin(nn.Module):
    """Replace every pair of consecutive channels by its maximum and its minimum, in this order."""

    def __init__(self, *, dim: int = 1) -> None:
        super().__init__()
        self.dim = own_axis(dim)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ...) -> the same shape; the size of `dim` must be even."""
        return sort_pairs(x, self.dim, descending=True)

    def extra_repr(self) -> str:
        """The arguments, for printing."""
        return f"dim={self.dim}"


class FullSort(nn.Module):
    """Sort all channels along `dim`, in ascending order."""

    def __init__(self, *, dim: int = 1) -> None:
        super().__init__()
        self.dim = own_axis(dim)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ...) -> the same shape."""
        return x.sort(dim=self.dim).values

    def extra_repr(self) -> str:
        """The arguments, for printing."""
        return f"dim={self.dim}"


class Absolute(nn.Module):
    """The absolute value, entry by entry."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ...) -> the same shape."""
        return x.abs()


class Householder(BoundedModule):
    """Reflect pairs of channels at a learnable line: the Householder activation.

    A pair z lying on the side of `(sin(a/2), -cos(a/2))` is kept, otherwise it is reflected onto
    that side, by `[[cos a, sin a], [sin a, -cos a]]`. One angle a pair, shared over positions. The
    map is continuous, preserves norms, and the derivative in the angles is at most ||x||.
    """

    def __init__(
        self,
        channels: int,
        *,
        dim: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if channels < 2 or channels % 2:
            raise ValueError(f"channels must be even, got {channels}")
        self.channels = channels
        self.dim = own_axis(dim)
        # A quarter turn: the map then is MaxMin.
        self.angles = nn.Parameter(
            torch.full((channels // 2,), torch.pi / 2, device=device, dtype=dtype)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ...) with `channels` along `dim` -> the same shape."""
        return self._reflect(x, self.angles)

    def forward_bounded(
        self, x: Tensor, parameters: Mapping[str, Tensor], limits: GradientLimits
    ) -> Tensor:
        """Compute what `forward` does, with limits: see `BoundedModule`."""
        angles = per_example_parameter(
            parameters["angles"], x.shape[0], limits.get("angles"), self.angles.dtype
        )
        # One angle for each pair of each example, the same at all positions.
        positions = [1] * (x.ndim - 2)
        return self._reflect(x, angles.view(x.shape[0], *positions, -1))

    def _reflect(self, x: Tensor, angles: Tensor) -> Tensor:
        pairs = x.movedim(self.dim, -1).unflatten(-1, (self.channels // 2, 2))
        first, second = pairs.unbind(-1)
        half = angles / 2
        kept = first * torch.sin(half) - second * torch.cos(half) > 0
        cosine, sine = torch.cos(angles), torch.sin(angles)
        reflected = (cosine * first + sine * second, sine * first - cosine * second)
        chosen = (
            torch.where(kept, first, reflected[0]),
            torch.where(kept, second, reflected[1]),
        )
        return torch.stack(chosen, dim=-1).flatten(-2).movedim(-1, self.dim)

    def extra_repr(self) -> str:
        """The arguments, for printing."""
        return f"{self.channels}, dim={self.dim}"


def own_axis(dim: int) -> int:
    """Return `dim` unless it is the batch axis, whose entries must never meet."""
    if dim == 0:
        raise ValueError("dim=0 is the batch axis: an operation along it would mix examples")
    return dim


def _inner(dim: int) -> int:
    """Where the members of a group lie once `dim` has been split into (groups, members)."""
    return dim + 1 if dim >= 0 else dim


def _merge(groups: Tensor, dim: int) -> Tensor:
    return groups.flatten(dim, dim + 1) if dim >= 0 else groups.flatten(dim - 1, dim)
