"""The parts of a drawing: elements with everything escaped, a canvas, and marks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from clipless.report.drawing._scale import Axis

Attributes = Mapping[str, object]
_BLANK: Attributes = {}


def element(name: str, attributes: Attributes = _BLANK, *content: str) -> Markup:
    """Return one element; attributes and text are escaped, markup inside is kept.

    Example:
        >>> str(element("text", {"x": 1.25}, "a < b"))
        '<text x="1.2">a &lt; b</text>'
    """
    listed = "".join(f' {key}="{escape(_short(value))}"' for key, value in attributes.items())
    inner = "".join(escape(part) for part in content)
    return Markup(f"<{name}{listed}>{inner}</{name}>")


def _short(value: object) -> object:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


@dataclass
class Canvas:
    """A drawing in progress: its size, the margins of its axes, and what is on it."""

    width: int
    height: int
    left: float
    top: float
    right: float
    bottom: float
    parts: list[Markup] = field(default_factory=list)

    def x(self, axis: Axis, value: float) -> float:
        """Where a value lies from the left."""
        return self.left + axis.place(value) * (self.width - self.left - self.right)

    def y(self, axis: Axis, value: float) -> float:
        """Where a value lies from the top."""
        return (
            self.height - self.bottom - axis.place(value) * (self.height - self.top - self.bottom)
        )

    def add(self, name: str, attributes: Attributes, *content: str) -> None:
        """Draw an element."""
        self.parts.append(element(name, attributes, *content))

    def text(self, x: float, y: float, text: str, *, kind: str, anchor: str = "start") -> None:
        """Write something; the class `kind` sets its size and colour."""
        self.add("text", {"x": x, "y": y, "class": kind, "text-anchor": anchor}, text)

    def segment(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """Draw a straight line."""
        self.add("line", {"x1": x1, "y1": y1, "x2": x2, "y2": y2, "class": kind})

    def finish(self, title: str, description: str) -> Markup:
        """Return the drawing, named and described for those who cannot see it."""
        head = [element("title", _BLANK, title), element("desc", _BLANK, description)]
        attributes = {
            "viewBox": f"0 0 {self.width} {self.height}",
            "role": "img",
            "aria-label": f"{title}. {description}",
            "style": f"max-width:{self.width}px",
        }
        return element("svg", attributes, *head, *self.parts)


def shape(
    x: float, y: float, look: int, *, size: float, title: str = "", hollow: bool = False
) -> Markup:
    """A disc, a square or a diamond, by the number of the series."""
    kind = f"mark s{look}" + (" hollow" if hollow else "")
    inner = [element("title", _BLANK, title)] if title else []
    if look % 3 == 0:
        return element("circle", {"cx": x, "cy": y, "r": size, "class": kind}, *inner)
    half = size * (0.95 if look % 3 == 1 else 1.35)
    if look % 3 == 1:
        box = {"x": x - half, "y": y - half, "width": 2 * half, "height": 2 * half, "class": kind}
        return element("rect", box, *inner)
    corners = ((x, y - half), (x + half, y), (x, y + half), (x - half, y))
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
    return element("polygon", {"points": path, "class": kind}, *inner)
