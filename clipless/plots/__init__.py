"""Figures in one style, returned as matplotlib figures: `pip install 'clipless[plots]'`.

They draw plain numbers and know nothing of other rooms, whose results have a `plot()` of their own.
"""

from clipless.plots._figures import (
    bounds_figure,
    calibration_figure,
    certificate_figure,
    privacy_utility_figure,
    training_figure,
)
from clipless.plots._style import COLOURS, EDGE, GRID, INK, new_figure

__all__ = [
    "training_figure",
    "bounds_figure",
    "privacy_utility_figure",
    "certificate_figure",
    "calibration_figure",
    "new_figure",
    "INK",
    "EDGE",
    "GRID",
    "COLOURS",
]
