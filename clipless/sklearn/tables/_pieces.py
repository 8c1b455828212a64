"""Knots of piecewise-linear features, from statistics that are released already: at no cost.

A column's knots lie around its centre in steps of its spread, and, farther out, at the ends of the
octaves that hold rows. A column that is zero for most rows and a few thousand for others, such as
capital gains, has its knots among the latter, where the steps of a spread would not reach.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipless.statistics import Scaling

_REACH = 1.5  # spreads from the centre to the last knot of even steps
_APART = 0.5  # of a spread, at least, between two knots: it bounds slopes
_FEWEST, _MOST = 3, 16  # knots of a column; with fewer it goes without


def find_knots(scaling: Scaling, *, step: float) -> tuple[Tensor, ...]:
    """Return the knots of each numeric column in order, none where there is nothing to bend.

    `step` is their distance around the centre, in spreads.
    """
    return tuple(
        torch.zeros(0, dtype=torch.float64) if switch else _column_knots(center, spread, ends, step)
        for center, spread, switch, ends in zip(
            scaling.center.tolist(),
            scaling.spread.tolist(),
            scaling.switches.tolist(),
            scaling.occupied,
            strict=True,
        )
    )


def piecewise(numbers: Tensor, knots: tuple[Tensor, ...]) -> Tensor:
    """Return for each piece between two knots how far a number is across it, from -1/2 to 1/2.

    (n, p) numbers -> (n, pieces), each row by itself. A missing number is in the middle of all.
    """
    parts = [numbers.new_zeros(len(numbers), 0)]
    for column, places in enumerate(knots):
        if len(places):
            low, high = places[:-1], places[1:]
            across = ((numbers[:, column, None] - low) / (high - low)).clamp(0, 1)
            parts.append(torch.nan_to_num(across, nan=0.5) - 0.5)
    return torch.cat(parts, 1)


def steepest(knots: tuple[Tensor, ...], spread: Tensor) -> float:
    """Return the largest slope of a piece, over the move of a number in spreads.

    The pieces of a column do not overlap: a number moves one of them at a time.
    """
    slopes = [
        float(unit / (places[1:] - places[:-1]).min())
        for places, unit in zip(knots, spread, strict=True)
        if len(places)
    ]
    return max(slopes, default=0.0)


def _column_knots(center: float, spread: float, ends: Tensor, step: float) -> Tensor:
    reach = _REACH * spread
    middle = center + torch.arange(-_REACH, _REACH + step / 2, step, dtype=torch.float64) * spread
    if len(ends):
        middle = middle[(middle >= ends.min()) & (middle <= ends.max())]
    low, high = ends[:, 0], ends[:, 1]
    far = ((high <= 0) & (low < center - reach)) | ((low >= 0) & (high > center + reach))
    far |= (low == 0) & (high == 0)
    wanted = torch.cat([middle, ends[far].flatten()]).sort().values.tolist()
    kept = list[float]()
    for place in wanted:
        if not kept or place - kept[-1] >= _APART * spread:
            kept.append(place)
    if len(kept) > _MOST:
        chosen = torch.linspace(0, len(kept) - 1, _MOST).round().long().tolist()
        kept = [kept[index] for index in chosen]
    return torch.tensor(kept if len(kept) >= _FEWEST else [], dtype=torch.float64)
