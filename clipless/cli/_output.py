"""Output of commands: results on standard output, everything else on standard error."""

from __future__ import annotations

import json as json_module
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from clipless.folders import json_data

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_PIPE_WIDTH = 250


def console() -> Console:
    """The standard output, for results that people read. Square brackets are no markup."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def error_console() -> Console:
    """The standard error, for progress, warnings and errors."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def emit(data: Mapping[str, Any], *shown: RenderableType, json: bool) -> None:
    """Write a result: one JSON object, or what people read, and nothing else."""
    if json:
        print(json_module.dumps(json_data(data), indent=2))
        return
    from rich.text import Text

    output = console()
    if not output.is_terminal and "COLUMNS" not in os.environ:
        output.width = _PIPE_WIDTH  # tables in files and pipes are not cut
    for each in shown:
        # Text is wrapped for people, not for pipes.
        output.print(each, soft_wrap=isinstance(each, str | Text) and not output.is_terminal)


def note(text: str) -> None:
    """Print a note on the standard error."""
    error_console().print(text, soft_wrap=True)


@contextmanager
def working(text: str) -> Iterator[None]:
    """Show a spinner while something runs, on a terminal only."""
    from rich.text import Text

    output = error_console()
    if not output.is_terminal:
        yield
        return
    with output.status(Text(text)):
        yield


def flush() -> None:
    """Write out what is buffered, so that results come before errors in a terminal."""
    sys.stdout.flush()
