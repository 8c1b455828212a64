"""The pages: templates filled with the data of a report, and nothing but those data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clipless.common import MALFORMED_ERRORS, error_text
from clipless.report._format import NONE, number, percent, percent_upper, upper
from clipless.report._pages import PRIVATE_SECTIONS, PUBLIC_SECTIONS, Section
from clipless.report.drawing._figures import MOST_HISTOGRAMS, MOST_ROWS, Figures

_MOST_LINES = 200
_LONGEST_TEXT = 200_000


def render(report: Mapping[str, Any], *, private: bool = False) -> str:
    """Return the page for what `RunReport.to_dict` returned.

    A section whose data are not what they should be says so, and the others are shown.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, UndefinedError
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )

    def exactly(value: float | None, shown: str) -> Markup:
        """The number as it is, in the page, under the number as it is read."""
        return Markup("<data value='{}'>{}</data>").format(json.dumps(value), shown)

    filters: dict[str, Callable[..., Any]] = {
        "number": lambda value, digits=4: exactly(value, number(value, digits)),
        "upper": lambda value, digits=4: exactly(value, upper(value, digits)),
        "percent": lambda value, digits=1: exactly(value, percent(value, digits)),
        "percent_upper": lambda value: exactly(value, percent_upper(value)),
        "fixed": lambda value: exactly(value, NONE if value is None else f"{value:.3f}"),
        "pretty": _pretty,
        "flat": flat,
        "thinned": thinned,
        "code": _code,
    }
    environment.filters |= filters
    shared: dict[str, Any] = {
        "report": report,
        "private": private,
        "figures": Figures(report),
        "missing": {each["file"]: each for each in report["missing"]},
        "limits": {"lines": _MOST_LINES, "rows": MOST_ROWS, "histograms": MOST_HISTOGRAMS},
    }

    def shown(section: Section) -> Markup:
        own = {**shared, "section": section, "mark": section.mark}
        try:
            return Markup(environment.get_template(f"{section.name}.html.j2").render(own))
        except (*MALFORMED_ERRORS, UndefinedError) as error:
            if section.name in ("claim", "rests"):  # plan and ledger have been checked
                raise
            own["why"] = error_text(error)
            return Markup(environment.get_template("section.html.j2").render(own))

    sections = [
        (section, shown(section))
        for section in (PRIVATE_SECTIONS if private else PUBLIC_SECTIONS)
        if section.name != "columns" or report["columns"]  # of runs on tables alone
    ]
    return environment.get_template("page.html.j2").render(shared, sections=sections)


def thinned(lines: Sequence[Any]) -> Sequence[Any]:
    """Return all lines, or of too many an even choice that has the first and the last.

    Example:
        >>> found = thinned(range(1000))
        >>> len(found), found[0], found[-1]
        (200, 0, 999)
    """
    if len(lines) <= _MOST_LINES:
        return lines
    last = _MOST_LINES - 1
    return [lines[index * (len(lines) - 1) // last] for index in range(_MOST_LINES)]


def flat(mapping: Mapping[str, Any], above: str = "") -> list[tuple[str, str]]:
    """Return data as lines of a name and a text; what is inside something is named after it.

    Example:
        >>> flat({"torch_version": "2.13", "metrics": {"loss": 0.25}, "averaged": True})
        [('torch version', '2.13'), ('metrics: loss', '0.25'), ('averaged', 'yes')]
    """
    lines: list[tuple[str, str]] = []
    for key, value in mapping.items():
        name = f"{above}{key}".replace("_", " ")
        if isinstance(value, Mapping):
            lines += flat(value, f"{name}: ")
        elif isinstance(value, bool):
            lines.append((name, "yes" if value else "no"))
        elif value is None or isinstance(value, int | float):
            lines.append((name, number(value, 6)))
        else:
            lines.append((name, value if isinstance(value, str) else _pretty(value)))
    return lines


def _pretty(value: Any) -> str:
    """Data as text to read and to copy."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    if len(text) > _LONGEST_TEXT:
        text = text[:_LONGEST_TEXT] + "\n... the rest is in report.json"
    return text


def _code(text: str) -> Any:
    """Text in which what stands between backticks is code."""
    from markupsafe import Markup, escape

    parts = text.split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if index % 2 else escape(part)
        for index, part in enumerate(parts)
    )
