"""Conversion of images to floating-point pixels in [0, 1]."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDING = 1e-6
"""Relative slack in the bounds of preprocessing, for its own float32 arithmetic (a few 6e-8)."""


def as_pixels(x: Tensor, *, channels: int) -> Tensor:
    """Return (..., channels, height, width) in [0, 1], in float32 at least; NaN becomes 0.

    Clamping is per entry and 1-Lipschitz: a stray value changes its own image only.
    """
    if x.dim() < 3 or x.shape[-3] != channels:
        raise ValueError(
            f"images must have shape (..., {channels}, height, width), got {tuple(x.shape)}"
        )
    if not x.is_floating_point():
        raise TypeError(
            f"pixels must be floating-point numbers in [0, 1], got {x.dtype}; divide bytes by 255"
        )
    if torch.finfo(x.dtype).bits < 32:
        x = x.float()
    return torch.nan_to_num(x, nan=0.0).clamp(0.0, 1.0)
