"""Checks of arguments that layers and losses share."""

from __future__ import annotations

import math
from numbers import Real


def positive(name: str, value: float) -> float:
    """Return `value` as a float, or refuse what is not a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {value!r}.")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and greater than 0, got {value!r}.")
    return float(value)
