"""Checks of arguments that layers and losses share."""

from __future__ import annotations

import sys
from numbers import Real


def missing(what: str) -> RuntimeError:
    """Return the error for something that an earlier stage must have set, and has not."""
    return RuntimeError(f"{what} is not set, which an earlier stage should have done.")


def positive(name: str, value: float) -> float:
    """Return `value` as a float, or refuse what is not a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {value!r}.")
    if not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name} must be finite and greater than 0, got {value!r:.40}.")
    return float(value)
