"""Colour spaces: maps of single images whose norms, and distances, are bounded.

The norm of the input is a factor of every sensitivity. Colour spaces differ in how widely the
norms of natural images spread below their bound, which is what makes one train better than
another; none of them looks at more than one pixel.
"""

from __future__ import annotations

import itertools
import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from clipless.data._pixels import ROUNDING, as_pixels

ColourName = Literal["rgb", "hsv", "yiq", "yuv", "grayscale"]

# Luma weights of ITU-R BT.601. Chroma: the NTSC axes for YIQ; 0.492 (B - Y), 0.877 (R - Y) for YUV.
_RED, _GREEN, _BLUE = 0.299, 0.587, 0.114
_LUMA = (_RED, _GREEN, _BLUE)
_MATRICES: dict[str, tuple[tuple[float, float, float], ...]] = {
    "rgb": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "yiq": (_LUMA, (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112)),
    "yuv": (
        _LUMA,
        (-0.492 * _RED, -0.492 * _GREEN, 0.492 * (1 - _BLUE)),
        (0.877 * (1 - _RED), -0.877 * _GREEN, -0.877 * _BLUE),
    ),
    "grayscale": (_LUMA,),
}


class ColourSpace:
    """A map from RGB images, (..., 3, height, width) in [0, 1], to another colour space.

    | space | channels | norm, one pixel | Lipschitz |
    |---|---|---|---|
    | `"rgb"` | red, green, blue | sqrt(3) | 1 |
    | `"yiq"` | luma, two of chroma | 1 | 0.8572 |
    | `"yuv"` | luma, two of chroma | 1 | 0.8570 |
    | `"grayscale"` | luma | 1 | 0.6686 |
    | `"hsv"` | hue, saturation, value, all in [0, 1] | sqrt(3) | none |

    `lipschitz` bounds the factor by which distances grow: divide a certified radius by it to have
    it in pixels. HSV has none (it is infinite): hue jumps at grey and where it wraps around, so
    that certificates do not pass through it. Values outside [0, 1] are clamped, NaN becomes 0.

    Example:
        >>> convert = ColourSpace("yuv")
        >>> convert(torch.ones(1, 3, 2, 2)).shape
        torch.Size([1, 3, 2, 2])
        >>> convert.norm_bound(pixels=32 * 32) < ColourSpace("rgb").norm_bound(pixels=32 * 32)
        True
        >>> ColourSpace("hsv").lipschitz
        inf
    """

    def __init__(self, name: ColourName) -> None:
        if name != "hsv" and name not in _MATRICES:
            known = ", ".join(sorted([*_MATRICES, "hsv"]))
            raise ValueError(f"no colour space {name!r}; there are {known}")
        self.name = name
        self._matrix = None if name == "hsv" else np.array(_MATRICES[name])

    @property
    def channels(self) -> int:
        """How many channels come out: 1 for grayscale, 3 otherwise."""
        return 3 if self._matrix is None else len(self._matrix)

    @property
    def lipschitz(self) -> float:
        """The spectral norm of the linear map of one pixel; infinite for HSV."""
        if self._matrix is None:
            return math.inf
        return float(np.linalg.norm(self._matrix, 2)) * (1 + ROUNDING)

    def norm_bound(self, *, pixels: int) -> float:
        """A bound of the norm of an image of `pixels` pixels, met by an image of one colour.

        The norm of a linear map is convex, so its maximum over the cube of colours is at one of
        the eight corners. For HSV it is that of (1, 1, 1), approached by reds just short of a
        full turn of hue.
        """
        corners = np.array(list(itertools.product((0.0, 1.0), repeat=3)))
        images = corners if self._matrix is None else corners @ self._matrix.T
        return math.sqrt(pixels) * float(np.linalg.norm(images, axis=1).max()) * (1 + ROUNDING)

    def __call__(self, x: Tensor) -> Tensor:
        """(..., 3, height, width) -> (..., channels, height, width)."""
        x = as_pixels(x, channels=3)
        if self._matrix is None:
            return _hsv(x)
        # Products and sums by hand: matrix products may run in TF32, beyond the stated rounding.
        red, green, blue = x.unbind(-3)
        rows = [float(r) * red + float(g) * green + float(b) * blue for r, g, b in self._matrix]
        return torch.stack(rows, dim=-3)

    def __repr__(self) -> str:
        return f"ColourSpace({self.name!r})"


def _hsv(x: Tensor) -> Tensor:
    """Hue in turns, saturation and value. Hue of grey, and saturation of black, are 0."""
    red, green, blue = x.unbind(-3)
    value, least = x.amax(-3), x.amin(-3)
    spread = value - least
    safe = torch.where(spread > 0, spread, 1.0)
    hue = torch.where(
        value == red,
        ((green - blue) / safe).remainder(6.0),
        torch.where(value == green, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    hue = torch.where(spread > 0, hue / 6, 0.0)
    saturation = spread / torch.where(value > 0, value, 1.0)
    # Rounding may carry a quotient past 1.
    return torch.stack((hue, saturation, value), dim=-3).clamp(0.0, 1.0)
