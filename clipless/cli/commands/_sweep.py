"""`clipless sweep`: many runs, their front, and the price of choosing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clipless.cli._completion import data_names, presets, pruners, samplers
from clipless.cli._completion import repetitions as repetition_kinds
from clipless.cli._config_layers import data_layer, flag_layer, set_layer
from clipless.cli._options import Debug, Json, Settings
from clipless.cli._output import emit, note
from clipless.runs import ConfigError, merge_config_layers, read_config_file

if TYPE_CHECKING:
    from clipless.sweeps import SweepResult


def sweep(
    out: Annotated[Path, typer.Option(help="The folder of the sweep; one that is there goes on.")],
    config: Annotated[
        Path | None, typer.Option(help="A TOML, YAML or JSON file; flags override it.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="A space of the paper: tabular, mnist, fashion-mnist, cifar10.",
            autocompletion=presets,
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="As in clipless train.", autocompletion=data_names)
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="The budget of every run.")] = None,
    settings: Settings = None,
    trials: Annotated[int | None, typer.Option(help="How many runs.")] = None,
    sampler: Annotated[
        str | None,
        typer.Option(help="tpe, gp (Gaussian process) or random.", autocompletion=samplers),
    ] = None,
    pruner: Annotated[
        str | None, typer.Option(help="hyperband or none.", autocompletion=pruners)
    ] = None,
    radius: Annotated[
        float | None, typer.Option(help="Measure certified accuracy at this radius too.")
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(help="Search at this fraction of the batch size, at constant noise."),
    ] = None,
    repetitions: Annotated[
        str | None,
        typer.Option(
            help="Draw the number of runs: geometric, logarithmic or poisson.",
            autocompletion=repetition_kinds,
        ),
    ] = None,
    mean: Annotated[float | None, typer.Option(help="The mean of that number.")] = None,
    public_data: Annotated[
        bool, typer.Option("--public-data", help="The training data are nobody's secret.")
    ] = False,
    storage: Annotated[
        str | None,
        typer.Option(help="A database for many machines, such as postgresql+psycopg://..."),
    ] = None,
    name: Annotated[str, typer.Option(help="The name of the sweep in the database.")] = "sweep",
    heartbeat: Annotated[int, typer.Option(help="Seconds between signs of life of a worker.")] = 60,
    timeout: Annotated[
        float | None, typer.Option(help="Begin no run after so many seconds.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Show the sweep as it stands, and do no work.")
    ] = False,
    plot: Annotated[bool, typer.Option(help="Write front.png.")] = True,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Search for good settings: begin a sweep, join one as a further worker, or go on with one.

    Every worker runs the same command. A worker that is killed loses nothing: its run goes on in
    another one. With --out alone, a sweep that is there goes on as it was defined; with --trials,
    until it has so many.

        clipless sweep --preset mnist --epsilon 3 --trials 50 --out sweeps/mnist
        clipless sweep --config sweep.toml --out sweeps/mine --storage postgresql+psycopg://host/sweeps
        clipless sweep --out sweeps/mnist --show
    """
    if mean is not None and repetitions is None:
        raise ConfigError("--mean belongs to --repetitions, such as --repetitions geometric")
    if heartbeat < 1:
        raise ConfigError(f"--heartbeat must be at least 1 second, got {heartbeat}")
    flags = flag_layer({
        "sweep.preset": preset, "sweep.trials": trials, "sweep.sampler": sampler,
        "sweep.pruner": pruner, "sweep.radius": radius, "sweep.scale": scale,
        "sweep.public_data": public_data or None,
        "repetitions.distribution": repetitions, "repetitions.mean": mean,
        "privacy.epsilon": epsilon,
    })  # fmt: skip
    file = {} if config is None else read_config_file(config)
    given = merge_config_layers(file, data_layer(data), flags, set_layer(settings))
    _require_optuna()
    from clipless.sweeps import Sweep, read_sweep, run_sweep

    only_more = set(given) <= {"sweep"} and set(given.get("sweep", {})) <= {"trials"}
    if show or only_more:
        result = read_sweep(out, storage=storage, name=name)
        wanted = result.sweep if trials is None else replace(result.sweep, trials=trials)
    else:
        wanted = Sweep.from_dict(given)
    if not show:
        result = run_sweep(
            wanted, out, storage=storage, name=name, heartbeat=heartbeat, timeout=timeout
        )
    _present(result, plot=plot, json=json)


def _present(result: SweepResult, *, plot: bool, json: bool) -> None:
    from clipless.sweeps import selected, write_summary

    files = {kind: str(path) for kind, path in write_summary(result, plot=plot).items()}
    cost = result.selection
    if result.sweep.repetitions is not None:  # the table and the number of runs are secret
        fields: dict[str, Any] = {**selected(result), "finished": result.finished, "files": files}
        price = "" if cost.epsilon is None else f"({cost.epsilon:.4g}, {cost.delta:g}): "
        best = f"Best run: {result.sweep.metric} {fields['value']}, {fields['settings']}"
        emit(fields, best, f"Selection {price}{cost.statement}.", json=json)
        note(f"may be shown: {files['selected']}; everything else in {result.folder} is secret")
        return
    together = cost.composition_statement
    if cost.composition is not None:
        together = f"epsilon {cost.composition:.4g} at delta {cost.delta:g}, {together}"
    lines = [f"Selection: {cost.statement}.", f"Composition: {together}."]
    if result.best is not None:
        lines.insert(0, f"Best: run {result.best.slot}, {result.sweep.metric} {result.best.value}.")
    emit({**result.to_dict(), "files": files}, result.table(), *lines, json=json)
    if "best" in files:
        note(f"train it: clipless train --config {files['best']}")


def _require_optuna() -> None:
    try:
        import optuna
    except ImportError as error:
        raise ImportError("sweeps need optuna: pip install 'clipless[sweeps]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
