"""Where the examples of a batch are in a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Rows:
    """The axis that counts examples: it runs over `outer` x batch x `inner` entries, in that order.

    An entry of the tensor depends on no example but the one that its place on this axis names.
    """

    axis: int
    outer: int = 1
    inner: int = 1

    @property
    def first(self) -> bool:
        """Whether examples lie one after the other on the first axis."""
        return self.axis == 0 and self.outer == 1

    def at(self, axis: int) -> Rows:
        """The same examples on another axis."""
        return replace(self, axis=axis)


def reshaped(rows: Rows, batch: int, old: Sequence[int], new: Sequence[int]) -> Rows | None:
    """Return where the examples are after a reshape; None if they are not whole on one axis.

    An entry's place in memory is `(p B + b) Q + q` for example b, p entries of what lies before it
    and q of what lies behind. The new shape keeps the examples together if one of its axes begins
    at a divisor of P, ends at a divisor of Q, and has the whole batch in between.
    """
    before = math.prod(old[: rows.axis]) * rows.outer
    behind = rows.inner * math.prod(old[rows.axis + 1 :])
    for axis, size in enumerate(new):
        ahead, after = math.prod(new[:axis]), math.prod(new[axis + 1 :])
        if min(ahead, after) == 0 or before % ahead or behind % after:
            continue
        outer, inner = before // ahead, behind // after
        if size == outer * batch * inner:
            return Rows(axis, outer, inner)
    return None
