"""Exact sums of products of integers over a batch, by torch's float64: the kernels' twin.

Products of 8 and 16 bits are below 2^22, so that a float64 sum of up to 2^31 of them is exact in
whatever order it is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Windows:
    """Where a convolution's windows lie: a linear layer has one, of one place."""

    size: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    def counts(self, padded: tuple[int, int], found: tuple[int, int]) -> list[list[int]] | None:
        """How many windows each place of a padded image is in; None if every place is in one.

        `found`: how many windows there are, on either axis.
        """
        if self.size == self.stride == (1, 1):
            return None
        axes = []
        for axis in (0, 1):
            own = [0] * padded[axis]
            for first in range(found[axis]):
                for step in range(self.size[axis]):
                    own[first * self.stride[axis] + step * self.dilation[axis]] += 1
            axes.append(own)
        return [[line * column for column in axes[1]] for line in axes[0]]


def integer_products(cotangent: Tensor, x: Tensor, windows: Windows) -> Tensor:
    """Return `sum g x^T` for every group and place of the windows.

    From (batch, out height, out width, groups, out) and (batch, height, width, groups, in), padded;
    as (groups, out, window height, window width, in) of int64.
    """
    high, wide = cotangent.shape[1:3]
    rows = cotangent.double().flatten(0, 2).transpose(0, 1).mT  # (groups, out, positions)
    found = []
    for line in range(windows.size[0]):
        for column in range(windows.size[1]):
            top, left = line * windows.dilation[0], column * windows.dilation[1]
            seen = x[
                :,
                top : top + (high - 1) * windows.stride[0] + 1 : windows.stride[0],
                left : left + (wide - 1) * windows.stride[1] + 1 : windows.stride[1],
            ]
            found.append(rows @ seen.double().flatten(0, 2).transpose(0, 1))
    groups, outputs, inputs = found[0].shape
    together = torch.stack(found, dim=2).to(torch.int64)
    return together.view(groups, outputs, *windows.size, inputs)
