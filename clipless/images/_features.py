"""The fixed front end of image recipes: scattering coefficients, of the image and its mirror image.

A linear layer on the average of the features of an image and of its mirror image is a classifier
that does not care for left and right. Half of what could be learned is given up, namely what
changes its sign in a mirror, and with it half of the noise; nothing is trained twice, as it would
be with mirrored views.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from clipless import nn as lip
from clipless.bounds import Bound, CallSite, Signal, register
from clipless.common import DurationNote


class ImageFeatures(nn.Module):
    """Scattering coefficients (J = 2, L = 8, order 2), averaged with those of the mirror image.

    (batch, colours, height, width) -> (batch, 81 * colours, height / 4, width / 4). A mirror image
    has the same norm and an average of maps of constant l has constant l: non-expansive, like
    `Scattering2d`, as long as `root` is off.

    Args:
        shape: (colours, height, width) of the images.
        mirror: average over the image and its mirror image.
        root: take square roots of the coefficients (negative ones count as zero), which evens out
            their sizes. A root has no Lipschitz constant: no certificate passes through it.

    Example:
        >>> front = ImageFeatures((3, 8, 8), mirror=True, root=False)
        >>> x = torch.rand(2, 3, 8, 8)
        >>> front(x).shape, torch.allclose(front(x), front(x.flip(-1)))
        (torch.Size([2, 243, 2, 2]), True)
    """

    def __init__(self, shape: tuple[int, int, int], *, mirror: bool, root: bool) -> None:
        super().__init__()
        self.shape = shape
        self.mirror = mirror
        self.root = root
        self.scattering = lip.Scattering2d(shape[1:])

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """(channels, rows, columns) of the features of one image."""
        rows, columns = self.scattering.output_size
        return self.shape[0] * self.scattering.paths, rows, columns

    @property
    def largest(self) -> float:
        """The root mean square over positions that no channel exceeds for pixels from 0 to 1.

        One colour's pixels have norm at most `sqrt(height width)`, and so has each of its channels.
        """
        _, height, width = self.shape
        _, rows, columns = self.output_shape
        norm = self.scattering.design().lipschitz * math.sqrt(height * width / (rows * columns))
        return math.sqrt(norm) if self.root else norm

    @property
    def lipschitz(self) -> float:
        """The certified constant: that of the scattering transform, infinite with roots."""
        return math.inf if self.root else self.scattering.design().lipschitz

    def forward(self, x: Tensor) -> Tensor:
        """(batch, colours, height, width) -> (batch, channels, rows, columns)."""
        features = self._one(x)
        return (features + self._one(x.flip(-1))) / 2 if self.mirror else features

    def _one(self, x: Tensor) -> Tensor:
        coefficients: Tensor = self.scattering(x)
        return coefficients.clamp(min=0).sqrt() if self.root else coefficients

    @torch.no_grad()
    def compute(self, images: Tensor, *, batch_size: int = 500, note: bool = False) -> Tensor:
        """Return the features of many images, in batches, on the device that the images are on.

        With `note`, a line on the standard error says how long it will take, if that is minutes.
        """
        out = images.new_empty(len(images), *self.output_shape)
        duration = DurationNote(f"Computing features of {len(images):,} images", total=len(images))
        for start in range(0, len(images), batch_size):
            part = slice(start, start + batch_size)
            out[part] = self(images[part])
            if note:
                duration.update(start + batch_size)
        return out

    def extra_repr(self) -> str:
        """The arguments, for printing."""
        return f"mirror={self.mirror}, root={self.root}"


@register(ImageFeatures)
def image_features(site: CallSite, x: Signal) -> Bound:
    """Average of scattering transforms of two isometric copies: l of one; with roots, none.

    Roots of n coefficients of norm at most l X have a norm of at most the root of their sum, at
    most `(sqrt(n) l X)^(1/2)`; the average has no larger one.
    """
    layer = site.module
    if not layer.scattering.is_intact():
        site.refuse("the filters of its scattering transform are not the ones that were certified.")
    constant = layer.scattering.design().lipschitz
    if layer.root:
        output = math.sqrt(math.sqrt(site.output_size) * constant * x.norm)
        return Bound(lipschitz=math.inf, output=output, rows_apart=True)
    return Bound(lipschitz=constant, output=constant * x.norm, rows_apart=True)
