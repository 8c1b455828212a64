"""How tensors lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def dense(x: Tensor) -> Tensor:
    """Return `x` without gaps in memory: itself, unless it is a part of something larger."""
    return x if layout_of(x) == torch.channels_last else x.contiguous()


def layout_of(x: Tensor) -> torch.memory_format:
    """Whether images lie in memory with their channels last; everything else is contiguous."""
    last = torch.channels_last
    images = x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=last)
    return last if images else torch.contiguous_format
