"""The page of all commands, from the program itself."""

from __future__ import annotations

from enum import Enum
from typing import Any


def page() -> str:
    """Return the reference of the command line: each command, its arguments and options."""
    from typer.main import get_command

    from clipless.cli._app import app

    lines = [
        "# Every command", "",
        "Generated from the program: what `clipless COMMAND --help` says. An introduction is in "
        "[the command line](../cli.md).", "",
    ]  # fmt: skip
    return "\n".join(lines + _command("clipless", get_command(app), level=2)) + "\n"


def _command(path: str, command: Any, level: int) -> list[str]:
    nested = getattr(command, "commands", {})
    lines: list[str] = []
    if not nested or level > 2:
        lines = [f"{'#' * level} {path}", "", (command.help or "").strip().replace("\f", ""), ""]
    rows = [row for parameter in command.params if (row := _row(parameter))]
    if rows and not (nested and level == 2):
        lines += ["| option | meaning | default |", "|---|---|---|", *rows, ""]
    for name, each in nested.items():
        lines += _command(f"{path} {name}", each, level=level + (0 if level == 2 else 1))
    return lines


def _row(parameter: Any) -> str | None:
    if getattr(parameter, "hidden", False):
        return None
    if parameter.param_type_name == "argument":
        names = f"`{str(parameter.metavar or parameter.name).upper()}`"
    else:
        names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    meaning = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
    default = parameter.default
    if isinstance(default, Enum):
        meaning += " One of " + ", ".join(f"`{choice.value}`" for choice in type(default)) + "."
    if parameter.required:
        shown = "required"
    elif callable(default) or default in (None, False, (), []):
        shown = ""
    else:
        shown = f"`{getattr(default, 'value', default)}`"
    return f"| {names} | {meaning} | {shown} |"
