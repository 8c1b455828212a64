"""Pages of the example programs in `examples/`: what each is for, how to run it, and its text."""

from __future__ import annotations

import ast
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "examples"


def pages() -> list[tuple[str, str, str]]:
    """Return titles, places and texts: an index, and a page for each program."""
    found = [_page(path) for path in sorted(FOLDER.glob("[!_]*.py"))]
    listed = "\n".join(f"- [{title}]({Path(uri).name})" for title, uri, _ in found)
    index = f"# Example programs\n\nEach runs as it is, and in the tests.\n\n{listed}\n"
    return [("All examples", "examples/index.md", index), *found]


def _page(path: Path) -> tuple[str, str, str]:
    text = path.read_text(encoding="utf-8")
    about = ast.get_docstring(ast.parse(text)) or ""
    first, _, rest = about.partition("\n")
    title = path.stem.replace("_", " ").capitalize()
    body = f"# {title}\n\n{first}\n{rest}\n\n`python examples/{path.name}`\n\n"
    return title, f"examples/{path.stem}.md", f"{body}```python\n{text.rstrip()}\n```\n"
