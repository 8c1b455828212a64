"""Certified radii before the input guard, from radii behind it.

Let z be what the guard receives, n its norm, R the guard's radius, and suppose that decisions are
certified for every change of the guard's OUTPUT of norm below c. Points of the sphere of radius R
at a distance of at most c span an angle of at most `a = 2 arcsin(c / 2R)`.

- On the sphere (`z -> R z / n`). A change of z of norm d < n turns it by at most `arcsin(d / n)`,
  so that d may grow to `n sin(a)` as long as a <= pi / 2. Beyond a right angle the limit is n,
  where z can reach the origin and from there any direction.
- Clipping (`z -> z min(1, R / n)`). Inside the ball nothing is stretched and nothing gained: d = c.
  Outside, the nearest point with an image c away lies on the ray at angle a, as on the sphere, or
  where that ray meets the ball: `d^2 = (n - R)^2 + n c^2 / R`, once `n cos(a) < R`.

Both are exact: there is an input at that distance whose image has moved by c. Where c exceeds all
distances between images (2 R, or n + R inside the ball), the decision is certified everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor


def radius_before_sphere(change: Tensor, norm: Tensor, radius: float) -> Tensor:
    """How far inputs of the given norms may move if points of the sphere may move by `change`.

    Args:
        change: (batch,) the certified change c of the guard's output.
        norm: (batch,) the norms n of what the guard receives. Zero has no direction, and radius 0.

    Example:
        >>> one = torch.ones(1, dtype=torch.float64)
        >>> radius_before_sphere(2**0.5 * one, 3.0 * one, 1.0)  # a right angle: up to the origin
        tensor([3.], dtype=torch.float64)
    """
    half = (change / (2 * radius)).clamp(max=0.5**0.5)  # the sine of half the angle
    sine = 2 * half * (1 - half * half).sqrt()
    moved = norm * sine
    everywhere = (change > 2 * radius) & (norm > 0)
    return torch.where(everywhere, torch.inf, moved)


def radius_before_clip(change: Tensor, norm: Tensor, radius: float) -> Tensor:
    """How far inputs of the given norms may move if points of the ball may move by `change`.

    Args:
        change: (batch,) the certified change c of the guard's output.
        norm: (batch,) the norms n of what the guard receives.

    Example:
        >>> one = torch.ones(1, dtype=torch.float64)
        >>> radius_before_clip(0.5 * one, 0.2 * one, 1.0)  # inside the ball: the same
        tensor([0.5000], dtype=torch.float64)
    """
    cosine = 1 - change.square() / (2 * radius**2)
    turned = radius_before_sphere(change, norm, radius)
    met = ((norm - radius).square() + norm * change.square() / radius).sqrt()
    outside = torch.where(norm * cosine >= radius, turned, met)
    moved = torch.where(norm > radius, outside, change)
    everywhere = change > radius + norm.clamp(max=radius)
    return torch.where(everywhere, torch.inf, moved)
