"""Counts of examples above a clipping threshold, taken where they are clipped."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class ExceedanceCount:
    """A counter, on the device, of the examples clipped since it was last read."""

    __slots__ = ("_count", "_rows", "_shares", "_uses")

    def __init__(self) -> None:
        self._count: Tensor | None = None
        self.expect()

    def expect(
        self, uses: float = math.inf, rows: int | None = None, shares: Tensor | None = None
    ) -> None:
        """Reset the counter, and count no more than so many uses, each of so many examples.

        With `shares`, each row counts as much as its share, so that all rows of a user count as
        one at most.
        """
        self._count, self._uses, self._rows, self._shares = None, uses, rows, shares

    def add(self, exceeded: Tensor) -> None:
        """Count the True entries, one for each example, of a use that is expected."""
        if self._uses < 1 or self._rows not in (None, exceeded.numel()):
            return
        self._uses -= 1
        if self._shares is None:
            count = exceeded.detach().sum().float()
        else:  # in float64: parts of one are not exact, and are added up for many rows
            shares = self._shares.to(exceeded.device, torch.float64)
            count = torch.where(exceeded.detach().view(len(shares)), shares, 0.0).sum()
        self._count = count if self._count is None else self._count + count

    def add_counted(self, count: Tensor, rows: int) -> None:
        """Take a count of all uses of a pass over so many examples, made by compiled code."""
        if self._shares is None and self._rows in (None, rows) and self._uses > 0:
            self._uses = 0
            self._count = count if self._count is None else self._count + count

    def take(self) -> Tensor | None:
        """Return the count so far, and reset it."""
        count = self._count
        self.expect()
        return count
