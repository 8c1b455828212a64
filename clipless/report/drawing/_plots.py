"""Plots as inline SVG: no picture files, no scripts; colours come from the style of the page.

Marks carry classes (`line`, `mark`, `area`, with `s0`, `s1`, ... for the series) that the page's
style turns into colours, for light and dark screens and for paper. Series also differ in the shape
of their marks, so that they can be told apart without colours. All text is escaped.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from clipless.report.drawing._scale import Axis
from clipless.report.drawing._svg import Canvas, element, shape

_LETTER = 6.7
_LINE = 16


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one kind. `look` is the number of their colour and shape."""

    name: str
    points: Sequence[tuple[float, float]]
    look: int = 0
    kind: Literal["line", "steps", "points"] = "line"
    titles: Sequence[str] = ()
    """What to say of each point when the pointer rests on it."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A straight line across the plot at some value, with a name."""

    value: float
    name: str


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A point in a row, with the ends of an interval if there are any."""

    value: float
    look: int
    title: str
    low: float | None = None
    high: float | None = None
    hollow: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of a plot of rows: its name, and marks on it."""

    name: str
    marks: Sequence[Mark]


def chart(
    *,
    title: str,
    description: str,
    x: Axis,
    y: Axis,
    series: Sequence[Series],
    rules: Sequence[Rule] = (),
    width: int = 760,
    height: int = 300,
) -> Markup:
    """Return lines or points over two axes; `rules` are horizontal."""
    labels = [y.text(value) for value in y.ticks(5)]
    left = 14 + _LETTER * max(map(len, labels))
    canvas = Canvas(width, height, left=left, top=40, right=18, bottom=44)
    canvas.text(2, 14, y.label, kind="label")
    _legend(canvas, [(each.name, each.look, each.kind) for each in series if each.name])
    _grid(canvas, x, y, labels)
    for rule in rules:
        place = canvas.y(y, rule.value)
        canvas.segment(canvas.left, place, canvas.width - canvas.right, place, "rule")
        below = place + 14 if place < canvas.top + 14 else place - 5
        canvas.text(canvas.left + 6, below, rule.name, kind="note")
    for each in series:
        _draw_series(canvas, x, y, each)
    return canvas.finish(title, description)


def _grid(canvas: Canvas, x: Axis, y: Axis, labels: Sequence[str]) -> None:
    base, end = canvas.height - canvas.bottom, canvas.width - canvas.right
    for value, label in zip(y.ticks(5), labels, strict=True):
        place = canvas.y(y, value)
        canvas.segment(canvas.left, place, end, place, "grid")
        canvas.text(canvas.left - 7, place + 4, label, kind="tick", anchor="end")
    _bottom_axis(canvas, x, base, end)


def _bottom_axis(canvas: Canvas, x: Axis, base: float, end: float, most: int = 8) -> None:
    canvas.segment(canvas.left, base, end, base, "axis")
    for value in x.ticks(most):
        place = canvas.x(x, value)
        canvas.segment(place, base, place, base + 5, "axis")
        canvas.text(place, base + 18, x.text(value), kind="tick", anchor="middle")
    canvas.text((canvas.left + end) / 2, base + 38, x.label, kind="label", anchor="middle")


def _legend(canvas: Canvas, entries: Sequence[tuple[str, int, str]]) -> None:
    """Names of the series, right to left along the top."""
    if len(entries) < 2:
        return
    place = canvas.width - canvas.right
    for name, look, kind in reversed(entries):
        place -= _LETTER * len(name)
        canvas.text(place, 14, name, kind="legend")
        place -= 14
        if kind != "points":
            canvas.segment(place - 12, 10, place + 8, 10, f"line s{look}")
        canvas.parts.append(shape(place - 2, 10, look, size=4.0))
        place -= 32


def _draw_series(canvas: Canvas, x: Axis, y: Axis, series: Series) -> None:
    places = [(canvas.x(x, a), canvas.y(y, b)) for a, b in series.points]
    if series.kind != "points" and len(places) > 1:
        corners = places
        if series.kind == "steps":
            corners = [places[0]]
            for before, after in itertools.pairwise(places):
                corners += [(after[0], before[1]), after]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
        canvas.add("polyline", {"points": path, "class": f"line s{series.look}"})
    if series.kind == "points" or len(places) <= 40:
        size = 3.4 if series.kind == "points" else 2.8
        for index, (a, b) in enumerate(places):
            title = series.titles[index] if series.titles else ""
            canvas.parts.append(shape(a, b, series.look, size=size, title=title))


def rows(
    *,
    title: str,
    description: str,
    x: Axis,
    rows: Sequence[Row],
    names: Sequence[tuple[str, int]] = (),
    rules: Sequence[Rule] = (),
    width: int = 760,
) -> Markup:
    """Return one line for every row, with marks along one axis; `rules` are vertical."""
    longest = min(max((len(row.name) for row in rows), default=0), 34)
    top = 34 if len(names) > 1 else 12
    top += _LINE if rules else 0
    canvas = Canvas(
        width, top + 26 * len(rows) + 50, left=16 + _LETTER * longest, top=top, right=24, bottom=50
    )
    _legend(canvas, [(name, look, "points") for name, look in names])
    base, end = canvas.height - canvas.bottom, canvas.width - canvas.right
    for value in x.ticks(8):
        place = canvas.x(x, value)
        canvas.segment(place, canvas.top, place, base, "grid")
    _bottom_axis(canvas, x, base, end)
    for rule in rules:
        place = canvas.x(x, rule.value)
        canvas.segment(place, canvas.top - 4, place, base, "rule")
        anchor = "end" if place > (canvas.left + end) / 2 else "start"
        canvas.text(place, canvas.top - 9, rule.name, kind="note", anchor=anchor)
    for index, row in enumerate(rows):
        middle = canvas.top + 26 * index + 13.0
        canvas.segment(canvas.left, middle, end, middle, "grid")
        shown = row.name if len(row.name) <= longest else f"{row.name[:15]}…{row.name[-18:]}"
        attributes = {"x": canvas.left - 8, "y": middle + 4, "class": "tick", "text-anchor": "end"}
        canvas.add("text", attributes, shown, element("title", {}, row.name))
        for position, mark in enumerate(row.marks):  # side by side, lest one hides another
            place = middle + 8.0 * (position - (len(row.marks) - 1) / 2)
            if mark.low is not None and mark.high is not None:
                reach = (canvas.x(x, mark.low), canvas.x(x, mark.high))
                canvas.segment(reach[0], place, reach[1], place, f"line s{mark.look}")
            canvas.parts.append(
                shape(canvas.x(x, mark.value), place, mark.look, size=4.6, title=mark.title,
                      hollow=mark.hollow)
            )  # fmt: skip
    return canvas.finish(title, description)


def histograms(
    *,
    title: str,
    description: str,
    x: Axis,
    edges: Sequence[float],
    first: Sequence[float],
    second: Sequence[float],
    names: tuple[str, str],
    width: int = 360,
    height: int = 180,
) -> Markup:
    """Return two histograms over the same bins, as parts of their sums: an outline and an area.

    What lies below the axis is drawn at its low end.
    """
    shares = [_shares(x, edges, counts) for counts in (first, second)]
    top = max(max(each) for each in shares) or 1.0
    y = Axis(label="", low=0.0, high=top * 1.05, percent=True)
    canvas = Canvas(width, height, left=40, top=40, right=18, bottom=44)
    canvas.text(2, 14, title, kind="heading")
    for value in y.ticks(3):
        place = canvas.y(y, value)
        canvas.segment(canvas.left, place, width - canvas.right, place, "grid")
        canvas.text(canvas.left - 6, place + 4, y.text(value), kind="tick", anchor="end")
    places = (2.0, 30.0 + _LETTER * len(names[0]))
    for look, (name, place) in enumerate(zip(names, places, strict=True)):
        canvas.parts.append(shape(place + 5, 26, look, size=4.0))
        canvas.text(place + 14, 30, name, kind="legend")
    base, end = float(height - canvas.bottom), float(width - canvas.right)
    bins = [(max(edges[i], x.low), edges[i + 1]) for i in range(len(edges) - 1)]
    for look, kind in ((1, "area"), (0, "line")):
        corners = [(canvas.left, base)]
        for (low, high), share in zip(bins, shares[look], strict=True):
            if high > x.low:
                tall = canvas.y(y, share)
                corners += [(canvas.x(x, low), tall), (canvas.x(x, high), tall)]
        corners.append((canvas.x(x, min(edges[-1], x.high)), base))
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
        canvas.add("polyline", {"points": path, "class": f"{kind} s{look}"})
    bound = canvas.x(x, 1.0)
    canvas.segment(bound, canvas.top, bound, base, "rule")
    _bottom_axis(canvas, x, base, end, most=5)
    return canvas.finish(title, description)


def _shares(x: Axis, edges: Sequence[float], counts: Sequence[float]) -> list[float]:
    """Counts over their sum, those below the axis joined to the first bin on it."""
    total = sum(counts) or 1
    found = [count / total for count in counts]
    hidden = [index for index in range(len(counts)) if edges[index + 1] <= x.low * (1 + 1e-9)]
    if hidden and hidden[-1] + 1 < len(found):
        found[hidden[-1] + 1] += sum(found[index] for index in hidden)
        for index in hidden:
            found[index] = 0.0
    return found
