"""Bounds of columns that the user declares, which cost nothing to scale by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from clipless.sklearn.tables._table import Schema
from clipless.statistics import Scaling

Bounds = dict[int, tuple[float, float]]
"""The lowest and highest value of some columns, by their positions."""


def public_bounds(given: Any, schema: Schema) -> Bounds:
    """Public bounds by the position of the column."""
    if given is None:
        return {}
    numeric = [index for index, kind in enumerate(schema.kinds) if kind == "number"]
    if isinstance(given, Mapping):
        pairs = {}
        for key, pair in given.items():
            index = schema.names.index(key) if schema.names and key in schema.names else key
            if index not in numeric:
                raise ValueError(f"feature_bounds names {key!r}, which is no numeric column")
            pairs[int(index)] = pair
    else:
        if schema.undecided:
            raise ValueError(
                f"columns {list(schema.undecided)} have no type, so that it is not known which "
                "of them the rows of feature_bounds are about: give a mapping from columns to "
                "(low, high), or a table with types"
            )
        array = np.asarray(given, dtype=np.float64)
        if array.shape != (2, len(numeric)):
            raise ValueError(
                f"feature_bounds must be a mapping from columns to (low, high), or two rows of "
                f"{len(numeric)} numbers, the lower and the upper bounds; got shape {array.shape}"
            )
        pairs = dict(zip(numeric, zip(*array, strict=True), strict=True))
    for index, (low, high) in pairs.items():
        if not (np.isfinite(low) and np.isfinite(high) and low < high):
            raise ValueError(
                f"feature_bounds of column {index} are {low} and {high}: they must be finite "
                "numbers, the lower one first"
            )
    return {index: (float(low), float(high)) for index, (low, high) in pairs.items()}


def with_bounds(
    found: Scaling, asked: list[int], bounds: dict[int, tuple[float, float]], numeric: int,
    extra: int,
) -> Scaling:  # fmt: skip
    """Put columns with public bounds, which nobody asked about, between those asked about."""
    size = numeric + extra
    center, spread, missing = (torch.zeros(size, dtype=torch.float64) for _ in range(3))
    for index, (low, high) in bounds.items():
        # The standard deviation of a uniform column.
        center[index], spread[index] = (low + high) / 2, (high - low) / 12**0.5
    places = torch.tensor([*asked, *range(numeric, size)], dtype=torch.long)
    center[places], spread[places], missing[places] = found.center, found.spread, found.missing
    switches = torch.zeros(size, dtype=torch.bool)
    switches[places] = found.switches
    given = {index: torch.tensor([pair], dtype=torch.float64) for index, pair in bounds.items()}
    given |= dict(zip(places.tolist(), found.occupied, strict=True))
    occupied = tuple(given[index] for index in range(size))
    return Scaling(center, spread, missing, switches, found.categories, found.resolution, occupied)
