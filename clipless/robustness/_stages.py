"""Preprocessing as layers, so that certificates hold for raw inputs.

    torch.nn.Sequential(Normalize(mean=..., std=...), colour_transform(matrix=...), model)

is certified, attacked and measured in the units of its own input. Any other module of known
operations works as well. Only what cannot be written this way (a resampling, say) needs its
Lipschitz constant given as `input_lipschitz`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from clipless.nn import SpectralConv2d
from clipless.spectral import spectral_norm_bound


class Normalize(nn.Module):
    """`(x - mean) / std` for every channel: Lipschitz with constant `1 / min(std)`.

    Shape: (batch, channels, ...) -> the same, for one mean and std a channel, or one for all.

    Example:
        >>> Normalize(mean=[0.5], std=[0.25])(torch.ones(1, 1, 2))
        tensor([[[2., 2.]]])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, *, mean: Sequence[float], std: Sequence[float], axes: int = 2) -> None:
        """`axes` is the number of axes behind the channels: 2 for images, 0 for plain features."""
        super().__init__()
        deviations = torch.tensor(std, dtype=torch.float32).reshape(-1, *([1] * axes))
        if not bool((deviations > 0).all()):
            raise ValueError(f"std must be positive, got {list(std)}")
        means = torch.tensor(mean, dtype=torch.float32).reshape(-1, *([1] * axes))
        self.register_buffer("mean", means)
        self.register_buffer("std", deviations)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, ...) -> the same shape."""
        return (x - self.mean) / self.std


def colour_transform(
    *, matrix: Sequence[Sequence[float]] | Tensor, offset: Sequence[float] | Tensor | None = None
) -> nn.Module:
    """Return the layer `M x + offset` on the channels of images, for a change of colour space.

    It is a frozen 1 x 1 convolution whose norm is certified from the matrix.

    Shape: (batch, C, height, width) -> (batch, C', height, width), for a matrix (C', C).

    Example:
        >>> gray = colour_transform(matrix=[[0.299, 0.587, 0.114]])
        >>> gray(torch.ones(1, 3, 2, 2)).shape
        torch.Size([1, 1, 2, 2])
    """
    weights = torch.as_tensor(matrix, dtype=torch.float32)
    if weights.ndim != 2 or not bool(torch.isfinite(weights).all()):
        raise ValueError(f"matrix must be a finite table of numbers, got {matrix!r}")
    shift = None if offset is None else torch.as_tensor(offset, dtype=torch.float32)
    size = 1.0 if shift is None else max(1.0, 1.001 * float(torch.linalg.vector_norm(shift)))
    layer = SpectralConv2d(
        weights.shape[1],
        weights.shape[0],
        1,
        bias=shift is not None,
        norm=1.000001 * float(spectral_norm_bound(weights)),
        bias_norm=size,
        constraint="ball",
    )
    with torch.no_grad():
        layer.weight.copy_(weights[:, :, None, None])
        if shift is not None and layer.bias is not None:
            layer.bias.copy_(shift)
    return layer.requires_grad_(False)
