"""Anything as data that JSON holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """Return data that JSON holds: what is not finite becomes null, tuples lists, paths text.

    Example:
        >>> plain({"radii": (1.0, math.inf)})
        {'radii': [1.0, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
