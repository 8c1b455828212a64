"""Normalisations that keep examples apart and have a bounded Jacobian."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from clipless._arguments import positive
from clipless.nn._activation import own_axis


class LayerCentering(nn.Module):
    """Subtract the mean over axes of the example itself: an orthogonal projection, 1-Lipschitz.

    `dim` names the axes averaged over, by default all but the batch. It never includes the batch.

    Example:
        >>> LayerCentering()(torch.tensor([[1.0, 3.0]]))
        tensor([[-1.,  1.]])
    """

    def __init__(self, dim: int | Sequence[int] | None = None) -> None:
        super().__init__()
        axes = None if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
        self.dim = None if axes is None else tuple(own_axis(axis) for axis in axes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ...) -> the same shape."""
        if self.dim is not None:
            return x - x.mean(dim=self.dim, keepdim=True)
        flat = x.flatten(1)
        return (flat - flat.mean(dim=1, keepdim=True)).view_as(x)

    def extra_repr(self) -> str:
        """The arguments, for printing."""
        return f"dim={self.dim}"


class BallProjection(nn.Module):
    """Scale examples of norm above `radius` down to it: `x * min(1, radius / ||x||)`.

    The Euclidean projection onto a ball, hence 1-Lipschitz; it caps the norm of what follows.
    """

    def __init__(self, radius: float) -> None:
        super().__init__()
        self.radius = positive("radius", radius)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ...) -> the same shape, every example of norm at most `radius`."""
        flat = x.flatten(1)
        norm = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
        # The clamp stands below the fraction so that a zero example has a finite derivative.
        return (flat * (self.radius / norm.clamp_min(self.radius))).view_as(x)

    def extra_repr(self) -> str:
        """The arguments, for printing."""
        return f"radius={self.radius:g}"
