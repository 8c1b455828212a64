"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clipless.cli._completion import run_folders, setting_keys
from clipless.folders import RunFile, RunFolder, RunFolderError

Json = Annotated[bool, typer.Option("--json", help="One JSON object on the standard output.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.", hidden=True)]
RunArgument = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="The folder of a run.", autocompletion=run_folders),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting of the model (hidden=64), or of any section (training.average=0.9). "
        "May be repeated.",
        autocompletion=setting_keys,
    ),
]

Root = Annotated[
    str | None,
    typer.Option(help="The folder of data sets; by default CLIPLESS_DATA or a cache."),
]


def require_run(folder: Path) -> None:
    """Refuse what is no run folder before anything heavy is loaded."""
    if not RunFolder.open(folder).has(RunFile.CONFIG):
        raise RunFolderError(
            f"{folder} has no config.json: it is no folder of clipless train, or not whole"
        )


def is_run(text: str) -> bool:
    """Whether an argument that may also be a name is the folder of a run, whole or not."""
    folder = RunFolder(text)
    marks = (RunFile.CONFIG, RunFile.PLAN, RunFile.LEDGER)
    return folder.path.is_dir() and ("/" in text or any(map(folder.has, marks)))
