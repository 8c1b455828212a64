"""`clipless bench`: the benchmarks of a source checkout."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

import clipless
from clipless.cli._options import Debug, Json
from clipless.cli._output import emit
from clipless.runs import ConfigError


def bench(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A benchmark; without one, list them.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Handed to the benchmark.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List the benchmarks of a source checkout, or run one of them.

    Options of this command come before the name; everything after it is the benchmark's own.

        clipless bench
        clipless bench overhead --batch 512
    """
    folder = find_benchmarks()
    known = {path.stem: path for path in sorted(folder.glob("[!_]*.py"))}
    if name is None:
        rows = {each: _purpose(path) for each, path in known.items()}
        width = max(map(len, rows), default=0)
        lines = [f"{each:<{width}}  {purpose}" for each, purpose in rows.items()]
        benchmarks = [{"name": each, "purpose": purpose} for each, purpose in rows.items()]
        emit({"folder": folder, "benchmarks": benchmarks}, *lines, json=json)
        return
    if name not in known:
        raise ConfigError(f"there is no benchmark {name!r}; there are {', '.join(known)}")
    if json:
        raise ConfigError("benchmarks write their own results: --json is for the list")
    done = subprocess.run([sys.executable, str(known[name]), *(arguments or ())], check=False)
    raise typer.Exit(done.returncode)


def find_benchmarks() -> Path:
    """Return the benchmarks of the checkout that one is in, or that this was installed from."""
    source = Path(clipless.__file__).parent.parent
    for place in (Path.cwd(), *Path.cwd().parents, source):
        described = place / "pyproject.toml"
        if (place / "benchmarks").is_dir() and described.is_file():
            text = described.read_text(encoding="utf-8", errors="replace")
            if 'name = "clipless"' in text:
                return place / "benchmarks"
    raise ConfigError(
        "benchmarks are part of the source code, not of the installed package: run this command "
        "inside a checkout of the clipless repository"
    )


def _purpose(path: Path) -> str:
    """The first line of a file's docstring, without running it."""
    try:
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    except SyntaxError:
        text = ""
    return text.partition("\n")[0]
