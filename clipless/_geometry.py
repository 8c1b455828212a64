"""The projection onto a Euclidean ball, row by row, for layers, losses and guards alike."""

from __future__ import annotations

import torch
from torch import Tensor


def scale_into_ball(rows: Tensor, radius: float) -> Tensor:
    """Return `x * min(1, radius / ||x||)` for every example x of a batch of any shape.

    The map is 1-Lipschitz. Rows inside the ball are returned bit for bit. Norms are taken of rows
    divided by their largest entry (or the radius, if that is larger), so nothing overflows and the
    derivative is finite everywhere, at zero too.
    """
    flat = rows.unsqueeze(-1).flatten(1)
    scale = flat.detach().abs().amax(dim=1, keepdim=True).clamp(min=radius)
    unit = flat / scale
    energy = (unit * unit).sum(dim=1, keepdim=True)
    outside = energy > (radius / scale) ** 2
    # The root is taken outside only, where the energy is not zero: derivatives stay finite.
    length = torch.where(outside, energy, 1.0).sqrt()
    return torch.where(outside, unit * (radius / length), flat).view_as(rows)
