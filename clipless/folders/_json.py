"""Conversion of values to data that JSON holds."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def json_data(value: Any) -> Any:
    """Return data that JSON holds: what no float holds becomes null, tuples lists, paths text.

    Example:
        >>> json_data({"radii": (1.0, float("inf"))})
        {'radii': [1.0, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): json_data(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [json_data(part) for part in value]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return value if abs(value) <= sys.float_info.max else None
    return str(value)
