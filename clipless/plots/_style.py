"""The one style of all figures: colours that differ in lightness too, no frame, a light grid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#24292f"
"""Text."""
EDGE = "#8a94a0"
"""Axes, and lines that are no data."""
GRID = "#e3e6ea"
"""Lines of the grid."""
COLOURS = ("#1f66b0", "#c4560b", "#6b7683", "#2f7d4f")
"""Series, in this order: the one that matters, what it is compared with, and others."""


def new_figure(
    *, panels: int = 1, width: float = 5.6, height: float = 3.6
) -> tuple[Figure, list[Any]]:
    """Return an empty figure and the axes of its panels, side by side.

    The figure belongs to no window and to no global state of matplotlib: show it as the last line
    of a notebook's cell, or `figure.savefig("name.png")`.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'clipless[plots]'") from error
    figure = Figure(figsize=(width * panels, height), layout="constrained")
    found = []
    for number in range(panels):
        axes: Any = figure.add_subplot(1, panels, number + 1)
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(EDGE)
        axes.set_prop_cycle(color=COLOURS)
        axes.tick_params(color=EDGE, labelcolor=INK)
        for label in (axes.xaxis.label, axes.yaxis.label, axes.title):
            label.set_color(INK)
        axes.title.set_fontsize(11)
        found.append(axes)
    return figure, found


def finish_legend(axes: Any, **settings: Any) -> None:
    """Draw the legend without a frame, in the colour of text, if there is anything to name."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, labelcolor=INK, fontsize=9, **settings)
