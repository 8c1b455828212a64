"""Norm clipping, normalisation and standardisation: functions of one example at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from clipless.common import require_positive
from clipless.data._pixels import ROUNDING, as_pixels
from clipless.nn import BoundedInput


def clip_norm(x: Tensor, *, norm: float) -> Tensor:
    """Project every example of a batch onto the ball of radius `norm`: 1-Lipschitz.

    (batch, ...) -> the same shape. NaN and infinite entries become zeros. A model that begins
    with `nn.BoundedInput(norm)` does the same to whatever it is given; this is for data that is
    prepared once.

    Example:
        >>> clip_norm(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), norm=1.0)
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """
    return BoundedInput(norm)(x)


def normalize(x: Tensor, *, norm: float = 1.0) -> Tensor:
    """Scale every example of a batch to norm `norm`, except that zero stays zero.

    (batch, ...) -> the same shape. All norms equal means that the bound is used by every example
    rather than by the longest one. There is no Lipschitz constant (short examples are stretched):
    robustness certificates hold in units of the normalised input only.

    Example:
        >>> normalize(torch.tensor([[3.0, 4.0], [0.3, 0.4]]))
        tensor([[0.6000, 0.8000],
                [0.6000, 0.8000]])
    """
    return BoundedInput(norm, "sphere")(x)


class Standardize:
    """Subtract `mean` and divide by `deviation`, channel by channel: PUBLIC constants.

    The guarantee does not cover constants computed from the training data, the customary ones of
    MNIST and CIFAR-10 included. Take round numbers, figures of another data set, or private
    statistics. Values are clamped to [0, 1] first, so that the norm bound holds for whatever
    arrives, and NaN becomes 0.

    Example:
        >>> standardize = Standardize(mean=[0.5, 0.5, 0.5], deviation=[0.25, 0.25, 0.25])
        >>> standardize(torch.ones(1, 3, 32, 32)).unique()
        tensor([2.])
        >>> round(standardize.norm_bound(pixels=32 * 32), 3), round(standardize.lipschitz, 3)
        (110.851, 4.0)
    """

    def __init__(self, *, mean: Sequence[float], deviation: Sequence[float]) -> None:
        if len(mean) != len(deviation) or not mean:
            raise ValueError(
                f"mean and deviation need one value per channel, got {len(mean)} and "
                f"{len(deviation)}"
            )
        self.deviation = tuple(require_positive("deviation", value) for value in deviation)
        self.mean = tuple(float(value) for value in mean)
        if not all(map(math.isfinite, self.mean)):
            raise ValueError(f"mean must be finite, got {self.mean}")

    @property
    def lipschitz(self) -> float:
        """The largest factor by which distances grow: 1 over the smallest deviation."""
        return (1 + ROUNDING) / min(self.deviation)

    def norm_bound(self, *, pixels: int) -> float:
        """A bound of the norm of an image of `pixels` pixels, met by a constant one.

        `sqrt(pixels * sum over channels of max(m, 1 - m)^2 / s^2)`, and |m| for means outside
        [0, 1].
        """
        extremes = (
            max(abs(m), abs(1 - m)) / s for m, s in zip(self.mean, self.deviation, strict=True)
        )
        return math.sqrt(pixels) * math.hypot(*extremes) * (1 + ROUNDING)

    def __call__(self, x: Tensor) -> Tensor:
        """(..., channels, height, width), in [0, 1] -> the same shape."""
        x = as_pixels(x, channels=len(self.mean))
        shape = (-1, 1, 1)
        mean = torch.tensor(self.mean, dtype=x.dtype, device=x.device).view(shape)
        return (x - mean) / torch.tensor(self.deviation, dtype=x.dtype, device=x.device).view(shape)

    def __repr__(self) -> str:
        return f"Standardize(mean={list(self.mean)}, deviation={list(self.deviation)})"
