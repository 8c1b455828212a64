"""Normalisation within each example: centring, and projection onto a ball."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from clipless.common import require_positive
from clipless.kernels import scale_into_ball
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
        if axes == ():
            raise ValueError("dim names no axis; torch would average over all, the batch included")
        self.dim = None if axes is None else tuple(own_axis(axis) for axis in axes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ...) -> the same shape."""
        if self.dim is not None:
            return x - x.mean(dim=self.dim, keepdim=True)
        flat = x.unsqueeze(-1).flatten(1)
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
        self.radius = require_positive("radius", radius)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ...) -> the same shape, every example of norm at most `radius`."""
        return scale_into_ball(x, self.radius)

    def extra_repr(self) -> str:
        """The arguments, for printing."""
        return f"radius={self.radius:g}"
