"""Updates as whole numbers: bounded, rounded towards zero, and checked exactly."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ROOM = 1 - 2.0**-40
_HALF_BITS = 31


@torch.no_grad()
def encoded_update(update: Tensor, *, bound: float, limit: int) -> Tensor:
    """Return an update in steps of `bound / limit`, (entries,) int64, of norm at most `limit`.

    What is longer than `bound` is scaled to it. Rounding towards zero makes no entry larger, so
    that the norm stays below; it is checked in whole numbers. Of an update that is not finite
    nothing is left.

    Example:
        >>> encoded_update(torch.tensor([3.0, -4.0]), bound=1.0, limit=1000)
        tensor([ 599, -799])
        >>> encoded_update(torch.tensor([float("nan"), 1.0]), bound=1.0, limit=1000)
        tensor([0, 0])
    """
    flat = update.detach().flatten().to("cpu", torch.float64)
    largest = float(flat.abs().max()) if len(flat) else 0.0
    # Divided by the larger of both, entries are at most 1. What has an entry above the bound is
    # then of norm 1 or more, and loses its length; of the rest the bound has become 1.
    flat = flat / max(largest, bound)
    steps = flat * (limit * _ROOM / max(float(flat.norm()), 1.0))
    if not (math.isfinite(largest) and bool(steps.isfinite().all())):
        return torch.zeros(flat.shape, dtype=torch.int64)
    found = steps.trunc().to(torch.int64)
    while excess(found, limit=limit):
        found = (found.to(torch.float64) * (1 - 2.0**-20)).trunc().to(torch.int64)
    return found


def excess(steps: Tensor, *, limit: int) -> bool:
    """Return whether a vector of whole numbers is longer than `limit`: exactly, without rounding.

    Example:
        >>> excess(torch.tensor([3, 4]), limit=5), excess(torch.tensor([3, 4]), limit=4)
        (False, True)
        >>> excess(torch.tensor([-(2**63)]), limit=5)
        True
    """
    if not len(steps):
        return False
    if int(steps.max()) > limit or int(steps.min()) < -limit:
        return True
    squares = steps * steps  # below 2^62: a limit is at most 2^31
    high, low = squares >> _HALF_BITS, squares & ((1 << _HALF_BITS) - 1)
    return (int(high.sum()) << _HALF_BITS) + int(low.sum()) > limit**2


def decoded_update(steps: Tensor, *, bound: float, limit: int) -> Tensor:
    """Return what whole numbers of steps stand for, in float64."""
    return steps.to(torch.float64) * (bound / limit)
