"""Counts of examples above a clipping threshold, taken where they are clipped."""

from __future__ import annotations

import math

from torch import Tensor


class ExceedanceCount:
    """A counter, on the device, of the examples clipped since it was last read."""

    __slots__ = ("_count", "_rows", "_uses")

    def __init__(self) -> None:
        self._count: Tensor | None = None
        self.expect()

    def expect(self, uses: float = math.inf, rows: int | None = None) -> None:
        """Reset the counter, and count no more than so many uses, each of so many examples."""
        self._count, self._uses, self._rows = None, uses, rows

    def add(self, exceeded: Tensor) -> None:
        """Count the True entries, one for each example, of a use that is expected."""
        if self._uses < 1 or self._rows not in (None, exceeded.numel()):
            return
        self._uses -= 1
        count = exceeded.detach().sum().float()
        self._count = count if self._count is None else self._count + count

    def take(self) -> Tensor | None:
        """Return the count so far, and reset it."""
        count = self._count
        self.expect()
        return count
