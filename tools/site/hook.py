"""What the site adds to the pages in `docs/` while MkDocs builds it: events of MkDocs.

Generated and never committed: the reference of every public name and command, the results from
`benchmarks/results/*.json`, the notebooks with their outputs, the pictures, the changelog, the
example programs.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT)]

import commands  # noqa: E402 (siblings, found by the line above)
import notebooks  # noqa: E402
import pictures  # noqa: E402
import programs  # noqa: E402
import reference  # noqa: E402
import results  # noqa: E402
from drawing import both  # noqa: E402

MISSING = "..."
WIDE = 480
"""Points from which on a picture is too wide for a phone."""
_generated: dict[str, str | bytes] = {}


def on_config(config: Any) -> Any:
    """Make all generated pages, and put them where the navigation says `...`."""
    _generated.clear()
    from clipless import __version__

    config.site_description = f"clipless {__version__}: {config.site_description}"
    config.copyright = f"clipless {__version__}, MIT licence"
    if os.environ.get("CLIPLESS_SITE_VERSIONS") == "1":  # to be published beside other versions
        config.extra["version"] = {"provider": "mike"}
    run = os.environ.get("CLIPLESS_SITE_NOTEBOOKS", "run") == "run"
    lists: dict[str, list[Any]] = {}
    for name, pages in (
        ("Python", reference.pages()),
        ("Results", results.pages()),
        ("Notebooks", notebooks.pages(run=run)),
        ("Example programs", programs.pages()),
    ):
        lists[name] = [{title: uri} for title, uri, _ in pages if uri.endswith(".md")]
        _generated.update({uri: content for _, uri, content in pages})
    _generated["reference/commands.md"] = commands.page()
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    _generated["changelog.md"] = changelog.replace("](docs/", "](")
    _generated.update(pictures.files())
    for picture in sorted((ROOT / "benchmarks" / "results").glob("*.svg")):
        drawn = both(picture.read_text(encoding="utf-8"), picture.stem)
        _generated.update({f"results/{name}": content for name, content in drawn.items()})
    config.nav = _fill(config.nav, lists)
    return config


def _fill(entries: list[Any], lists: dict[str, list[Any]]) -> list[Any]:
    filled: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            ((title, value),) = entry.items()
            if value == MISSING:
                value = lists[title]
            elif isinstance(value, list):
                value = _fill(value, lists)
            entry = {title: value}
        filled.append(entry)
    return filled


def on_files(files: Any, config: Any) -> Any:
    """Add what was generated."""
    from mkdocs.structure.files import File

    for uri, content in _generated.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lists as GitHub reads them, pictures for light and dark, paths outside of `docs/`."""
    up = "../" * page.file.src_uri.count("/")
    markdown = markdown.replace("](../benchmarks/results/", f"]({up}results/")
    markdown = re.sub(r"\]\(\.\./examples/(\w+)\.py\)", rf"]({up}examples/\1.md)", markdown)
    markdown = re.sub(
        r"!\[([^\]]*)\]\(([\w/.-]*?)((?:pictures|results)/[\w-]+)\.svg\)", _both_schemes, markdown
    )
    return github_lists(markdown)


def _both_schemes(found: re.Match[str]) -> str:
    """A picture for each scheme; those that are wide scroll on a phone."""
    text, up, place = found.groups()
    path = ROOT / "docs" / f"{place}.light.svg"
    drawing = _generated.get(f"{place}.light.svg") or path.read_text(encoding="utf-8")
    width = re.search(r"<svg[^>]* width=\"([\d.]+)pt\"", str(drawing))
    wide = "{ .wide }" if width and float(width[1]) > WIDE else ""
    return "".join(
        f"![{text}]({up}{place}.{scheme}.svg#only-{scheme}){wide}" for scheme in ("light", "dark")
    )


ITEM = re.compile(r"( *)(?:[-*]|\d+\.) ")


def github_lists(markdown: str) -> str:
    """Return the text with an empty line before each list and four spaces for each level.

    That is what Python's Markdown asks for; GitHub asks for neither.
    """
    lines: list[str] = []
    fenced = False
    inside = False
    for line in markdown.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        item = None if fenced else ITEM.match(line)
        depth = len(line) - len(line.lstrip(" "))
        if item and not inside and lines and lines[-1].strip() and depth < 4:
            lines.append("")
        if item:
            inside = True
        elif line.strip() and depth == 0:
            inside = bool(inside and lines and lines[-1].strip())
        if inside and not fenced and 2 <= depth < 8 and depth % 4:
            line = " " * (depth + 4 - depth % 4 if depth % 4 > 1 else depth) + line.lstrip(" ")
        lines.append(line)
    return "\n".join(lines) + "\n"
