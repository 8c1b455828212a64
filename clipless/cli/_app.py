"""The table of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from clipless import __version__
from clipless.cli.commands._audit import audit
from clipless.cli.commands._bench import bench
from clipless.cli.commands._bounds import bounds
from clipless.cli.commands._budget import budget
from clipless.cli.commands._certify import certify
from clipless.cli.commands._data import data_app
from clipless.cli.commands._doctor import doctor
from clipless.cli.commands._export import export
from clipless.cli.commands._predict import predict
from clipless.cli.commands._report import report
from clipless.cli.commands._schema import schema
from clipless.cli.commands._sweep import sweep
from clipless.cli.commands._train import train
from clipless.runs import ConfigError, torchrun_rank

app = typer.Typer(
    name="clipless",
    help="Differentially private training without clipping: train, certify, attack, report.",
    epilog="A run is a folder, and every command takes one. Exit codes: 0 all is well, 1 a check "
    "failed, 2 bad arguments, 3 data missing or corrupt, 4 budget exhausted, 5 run folder damaged, "
    "6 no guarantee possible, 7 a package is missing. Add --debug to a command for tracebacks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Say which version this is.")] = False,
) -> None:
    """Differentially private training without clipping: train, certify, attack, report."""
    if version:
        typer.echo(f"clipless {__version__}")
        raise typer.Exit
    command = context.invoked_subcommand
    if command not in (None, "train") and torchrun_rank() is not None:
        raise ConfigError(
            f"clipless {command} is one process: start it without torchrun. (A sweep takes as many "
            "workers as you start.)"
        )


app.command()(train)
app.command()(budget)
app.command()(bounds)
app.command()(predict)
app.command()(certify)
app.command()(audit)
app.command()(report)
app.command()(export)
app.command()(sweep)
app.command()(schema)
app.command()(doctor)
app.add_typer(data_app, name="data")
app.command(context_settings={"allow_interspersed_args": False})(bench)
