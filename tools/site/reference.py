"""Pages of the reference: one for each room, with every name of its `__all__`."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "clipless"
INSIDE = ("common", "kernels", "folders", "distributed")
"""Rooms that serve other rooms: their names may change without a deprecation."""


def rooms() -> list[str]:
    """Return the rooms with public names, those for users first."""
    found = [path.parent.name for path in sorted(PACKAGE.glob("*/__init__.py"))]
    found = [name for name in found if importlib.import_module(f"clipless.{name}").__all__]
    return sorted((name for name in found if name != "cli"), key=lambda name: name in INSIDE)


def homes(room: str) -> dict[str, str]:
    """Return the names that a room hands on from others, with the module they come from."""
    tree = ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8"))
    found = {}
    for node in ast.walk(tree):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if module.startswith("clipless.") and module.split(".")[1] != room:
            found |= {alias.asname or alias.name: module for alias in node.names}
    return found


def undocumented() -> list[str]:
    """Return the public functions and classes, and their public methods, without a docstring."""
    missing = []
    for room in rooms():
        module = importlib.import_module(f"clipless.{room}")
        for name in module.__all__:
            thing = getattr(module, name)
            if not (inspect.isclass(thing) or inspect.isroutine(thing)):
                continue
            if not str(getattr(thing, "__module__", "")).startswith("clipless"):
                continue
            if not inspect.getdoc(thing):
                missing.append(f"clipless.{room}.{name}")
            if inspect.isclass(thing):
                missing += [f"clipless.{room}.{name}.{m}" for m in _bare_methods(thing)]
    return missing


def _bare_methods(kind: type) -> list[str]:
    public = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
    return [
        name
        for name, value in public.items()
        if (inspect.isfunction(value) or isinstance(value, property))
        and not inspect.getdoc(getattr(kind, name, value))
    ]


def pages() -> list[tuple[str, str, str]]:
    """Return titles, places and texts of the reference's pages. A missing docstring is an error."""
    missing = undocumented()
    if missing:
        raise ValueError(f"public names without a docstring: {', '.join(missing)}")
    found = [("clipless", "reference/index.md", _front_page())]
    return found + [(room, f"reference/{room}.md", _room_page(room)) for room in rooms()]


def _first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def _front_page() -> str:
    import clipless

    lines = ["# Reference", "", f"`clipless` {clipless.__version__}. {_first_line(clipless)}", ""]
    lines += ["Right below the package:", "", "| name | what it is |", "|---|---|"]
    for name in clipless.__all__:
        thing = getattr(clipless, name)
        if inspect.ismodule(thing):
            continue
        home = thing.__module__.split(".")[1]
        where = f"{home}.md#clipless.{home}.{name}"
        lines.append(f"| [`clipless.{name}`]({where}) | {_first_line(thing)} |")
    for heading, inside in (("Rooms", False), ("Rooms that serve other rooms", True)):
        lines += ["", f"## {heading}", ""]
        if inside:
            lines += ["Documented for contributors. These names may change in any version.", ""]
        lines += ["| room | what it is |", "|---|---|"]
        for room in rooms():
            if (room in INSIDE) == inside:
                module = importlib.import_module(f"clipless.{room}")
                lines.append(f"| [`clipless.{room}`]({room}.md) | {_first_line(module)} |")
    return "\n".join(lines) + "\n"


def _room_page(room: str) -> str:
    module = importlib.import_module(f"clipless.{room}")
    elsewhere = homes(room)
    own = [name for name in module.__all__ if name not in elsewhere]
    lines = [f"# `clipless.{room}`", "", inspect.getdoc(module) or "", ""]
    if room in INSIDE:
        lines += ["Documented for contributors. These names may change in any version.", ""]
    handed_on = [name for name in module.__all__ if name in elsewhere]
    if handed_on:
        lines += ["From other rooms: " + ", ".join(_link(n, elsewhere[n]) for n in handed_on), ""]
    for name in own:
        lines += [f"::: clipless.{room}.{name}", ""]
    return "\n".join(lines)


def _link(name: str, module: str) -> str:
    home = module.split(".")[1]
    return f"[`{name}`]({home}.md#clipless.{home}.{name})"
