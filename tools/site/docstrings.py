"""Prepares docstrings for Markdown: examples as they stand in `>>>` become blocks of code."""

from __future__ import annotations

from typing import Any

import griffe


def fenced(text: str) -> str:
    """Return a docstring in which every run of `>>>` lines, with its outputs, is a fenced block."""
    lines: list[str] = []
    indent = None
    for line in [*text.splitlines(), ""]:
        stripped = line.lstrip(" ")
        if indent is None and stripped.startswith(">>>"):
            indent = line[: len(line) - len(stripped)]
            if lines and lines[-1].strip() and not lines[-1].rstrip().endswith(":"):
                lines.append("")
            lines.append(f"{indent}```pycon")
        elif indent is not None and not stripped:
            lines.append(f"{indent}```")
            indent = None
        lines.append(line)
    return "\n".join(lines[:-1])


class FencedExamples(griffe.Extension):
    """Applies `fenced` to all docstrings."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of one object, after it and its members are known."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
