"""Random changes of single images that never increase a norm: crops and flips."""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F


@runtime_checkable
class Augmentation(Protocol):
    """A random map of examples, drawn anew for every example of a batch.

    It maps (batch, ...) to the same shape. Each example gets its own draw from `generator` and is
    changed without a look at the others, so that one person's example stays one person's. For
    every draw, the map is `lipschitz`-Lipschitz and keeps zero: norms grow at most by that factor,
    and a bound of the input's norm survives where it is 1. Whoever writes one of their own vouches
    for this.
    """

    @property
    def lipschitz(self) -> float:
        """A bound of the factor by which norms and distances grow, for every draw."""
        ...

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """(batch, ...) -> the same shape, every example changed by a draw of its own."""
        ...


class RandomCrop:
    """Shift every image by up to `padding` pixels along both axes; zeros come in from outside.

    This is the usual crop, at a random place, from the image padded with zeros. Pixels are kept
    once, moved or dropped, and the rest is zero, so that for every draw the map is linear with
    norm at most 1. (Padding that repeats pixels has no such bound.)

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> RandomCrop(padding=1)(torch.ones(1, 1, 3, 3), generator)
        tensor([[[[0., 1., 1.],
                  [0., 1., 1.],
                  [0., 0., 0.]]]])
    """

    lipschitz = 1.0

    def __init__(self, padding: int) -> None:
        if isinstance(padding, bool) or not isinstance(padding, int) or padding < 1:
            raise ValueError(f"padding must be a whole number of pixels, 1 or more, got {padding}")
        self.padding = padding

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """(batch, channels, height, width) -> the same shape, norms not increased."""
        _check_images(x)
        places = 2 * self.padding + 1
        corners = torch.randint(
            places, (x.shape[0], 2), generator=generator, device=generator.device
        )
        top, left = corners.to(x.device).unbind(1)
        padded = F.pad(x, (self.padding,) * 4)
        # A view of all crops of all images; indexing then copies one crop of each.
        windows = padded.unfold(2, x.shape[2], 1).unfold(3, x.shape[3], 1)
        return windows[torch.arange(x.shape[0], device=x.device), :, top, left]

    def __repr__(self) -> str:
        return f"RandomCrop(padding={self.padding})"


class RandomFlip:
    """Mirror every image, left to right, with probability one half. An isometry.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> RandomFlip()(torch.arange(3.0).expand(2, 1, 1, 3), generator).squeeze()
        tensor([[0., 1., 2.],
                [2., 1., 0.]])
    """

    lipschitz = 1.0

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """(batch, channels, height, width) -> the same shape and norms."""
        _check_images(x)
        flip = torch.randint(2, (x.shape[0],), generator=generator, device=generator.device)
        return torch.where(flip.to(x.device).bool()[:, None, None, None], x.flip(3), x)

    def __repr__(self) -> str:
        return "RandomFlip()"


class Compose:
    """One augmentation after the other.

    Example:
        >>> augment = Compose(RandomFlip(), RandomCrop(padding=4))
        >>> images = torch.rand(8, 3, 32, 32)
        >>> changed = augment(images, generator=torch.Generator().manual_seed(0))
        >>> bool((changed.flatten(1).norm(dim=1) <= images.flatten(1).norm(dim=1)).all())
        True
    """

    def __init__(self, *augmentations: Augmentation) -> None:
        for augmentation in augmentations:
            if not isinstance(augmentation, Augmentation):
                raise TypeError(
                    f"{augmentation!r} is no augmentation: it must be callable with a batch and a "
                    "generator, and have an attribute `lipschitz`"
                )
        self.augmentations = augmentations

    @property
    def lipschitz(self) -> float:
        """The product of the parts' factors."""
        return math.prod(part.lipschitz for part in self.augmentations)

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """(batch, ...) -> the same shape."""
        for part in self.augmentations:
            x = part(x, generator=generator)
        return x

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.augmentations))})"


def _check_images(x: Tensor) -> None:
    if x.dim() != 4:
        raise ValueError(
            f"images must have shape (batch, channels, height, width), got {tuple(x.shape)}"
        )
