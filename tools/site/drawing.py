"""Figures as SVG for light and for dark pages."""

from __future__ import annotations

import io
import re
from typing import Any

from clipless.plots import COLOURS, EDGE, GRID, INK

DARK = {
    INK: "#e3e6ea",
    EDGE: "#8a94a0",
    GRID: "#3a414a",
    COLOURS[0]: "#6fb1f2",
    COLOURS[1]: "#f3a05c",
    COLOURS[2]: "#9aa5b1",
    COLOURS[3]: "#6fcf8d",
    "#000000": "#e3e6ea",
    "#ffffff": "#1e2129",
}
"""What each colour of the style becomes on a dark page."""


def save(figure: Any, name: str) -> dict[str, str]:
    """Return the files `NAME.light.svg` and `NAME.dark.svg` of a matplotlib figure."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return both(buffer.getvalue(), name)


def both(svg: str, name: str) -> dict[str, str]:
    """Return a drawing in the colours of the style, for light and for dark pages."""
    svg = re.sub(r"font: ([^;\"]*)(?:'DejaVu Sans'|DejaVu Sans)[^;\"]*", r"font: \1sans-serif", svg)
    # Text that is black by default has no colour of its own in the file.
    svg = svg.replace("</style>", f"text {{fill: {INK}}}</style>", 1)
    dark = re.sub(r"#[0-9a-f]{6}", lambda found: DARK.get(found.group(), found.group()), svg)
    return {f"{name}.light.svg": svg, f"{name}.dark.svg": dark}
