"""`clipless train`: from a configuration to a run folder."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clipless.cli._completion import data_names, devices, loss_names, model_names, tasks
from clipless.cli._config_layers import data_layer, flag_layer, set_layer
from clipless.cli._exits import ExitCode
from clipless.cli._options import Debug, Json, Root, Settings
from clipless.cli._output import emit, note
from clipless.folders import RunFile, RunFolder
from clipless.runs import (
    ConfigError,
    RunConfig,
    is_first_process,
    merge_config_layers,
    read_config_file,
    recipes,
    torchrun_rank,
    was_restarted,
)
from clipless.runs import recipe as read_recipe

if TYPE_CHECKING:
    from rich.text import Text

    from clipless.runs import TrainedRun


def train(
    table: Annotated[
        str | None,
        typer.Argument(metavar="DATA", help="What --data names.", autocompletion=data_names),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="A data set by name (mnist, digits, ...), or a .csv, .parquet or .npz.",
            autocompletion=data_names,
        ),
    ] = None,
    target: Annotated[str | None, typer.Option(help="The column of a table to predict.")] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="What a table's target is: classification or regression.", autocompletion=tasks
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="The column of texts to predict from, and no other.")
    ] = None,
    unit: Annotated[
        str | None,
        typer.Option(help="The column of who each row is about, to protect people and not rows."),
    ] = None,
    unit_records: Annotated[
        int | None, typer.Option(help="Of how many rows of a person a step takes the average.")
    ] = None,
    encoder: Annotated[
        str | None, typer.Option(help="The folder of a transformers model for texts.")
    ] = None,
    root: Root = None,
    limit: Annotated[
        int | None, typer.Option(help="Train on the first so many examples only.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A model by name: mlp, lenet, vgg, resnet, ..., tabular.",
            autocompletion=model_names,
        ),
    ] = None,
    settings: Settings = None,
    loss: Annotated[
        str | None,
        typer.Option(help="A loss by name: cross_entropy, ...", autocompletion=loss_names),
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="The privacy budget.")] = None,
    delta: Annotated[float | None, typer.Option(help="By default 0.1/N, rounded down.")] = None,
    large_delta: Annotated[
        bool, typer.Option("--large-delta", help="Accept a delta above 0.1/N; never above 1/N.")
    ] = False,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise over sensitivity, instead of a budget or with one.")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps, instead of epochs.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples in a batch, on average.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="The learning rate.")] = None,
    product_clip: Annotated[
        float | None, typer.Option(help="Clip weight gradients at this fraction of their bound.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the initial weights; samples and noise have none.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, ...", autocompletion=devices)
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML, YAML or JSON file; flags override it.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="A configuration that comes with the package; a file and flags override it.",
            autocompletion=recipes,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder of the run; by default a new one in runs/.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    report: Annotated[bool, typer.Option(help="Write the report's pages at the end.")] = True,
    progress: Annotated[
        bool | None, typer.Option(help="Show a bar; by default on a terminal.", show_default=False)
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a model privately, and keep everything about it in a run folder.

    The configuration comes from a recipe, a file and flags, in this order; what comes later
    overrides. Any setting of any section can be given by --set section.key=value.

        clipless train digits --epsilon 2
        clipless train --recipe mnist-epsilon3 --out runs/mnist
        clipless train people.csv --target income --epsilon 1
        clipless train reviews.csv --target stars --text review --epsilon 1
        clipless train visits.csv --target readmitted --unit patient --epsilon 1
        clipless train --resume --out runs/mnist
        torchrun --nproc-per-node 4 -m clipless train --recipe mnist-epsilon3 --out runs/mnist
    """
    flags = {
        "data.target": target, "data.text": text, "data.encoder": encoder, "data.task": task,
        "data.unit": unit, "data.unit_records": unit_records,
        "data.root": root, "data.limit": limit,
        "model.name": model, "loss.name": loss,
        "privacy.epsilon": epsilon, "privacy.delta": delta,
        "privacy.large_delta": large_delta or None,
        "privacy.noise_multiplier": noise_multiplier,
        "training.epochs": epochs, "training.steps": steps, "training.batch_size": batch_size,
        "training.learning_rate": learning_rate, "training.product_clip": product_clip,
        "training.seed": seed, "training.device": device,
    }  # fmt: skip

    if None not in (table, data) and table != data:
        raise ConfigError(f"{table} and --data {data} are two data sets: give one of them")
    named = table if data is None else data

    def decide() -> tuple[RunConfig, Path, bool]:
        going_on = resume or _is_restart(out)
        layers: list[dict[str, Any]] = [_stored(out)] if going_on else []
        layers += [] if recipe is None else [read_recipe(recipe)]
        layers += [] if config is None else [read_config_file(config)]
        layers += [data_layer(named), flag_layer(flags), set_layer(settings)]
        chosen = RunConfig.from_dict(merge_config_layers(*layers))
        return chosen, _new_folder(chosen) if out is None else out, going_on

    chosen, folder, going_on = decide() if torchrun_rank() is None else _decided_by_first(decide)
    _train(chosen, folder, resume=going_on, report=report, progress=progress, json=json)


def _train(
    config: RunConfig, folder: Path, *, resume: bool, report: bool, progress: bool | None,
    json: bool,
) -> None:  # fmt: skip
    from clipless.runs import train_run

    try:
        run = train_run(config, folder, resume=resume, progress=progress, report=report)
    except KeyboardInterrupt:
        if not is_first_process() or not RunFolder(folder).has(RunFile.CONFIG):
            raise  # before there was anything to go on with
        note(
            f"Interrupted. What was spent is in {RunFolder(folder).ledger}; nothing is lost. Go on "
            f"with: clipless train --resume --out {folder}"
        )
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    if not is_first_process():
        return
    emit(run.to_dict(), _summary(run), json=json)
    if run.stopped == "budget":
        note("The budget ran out before the planned steps were taken.")
        raise typer.Exit(ExitCode.BUDGET)


def _summary(run: TrainedRun) -> Text:
    from rich.text import Text

    from clipless.privacy import guarantee_in_words

    numbers = ", ".join(f"{name} {value:.4g}" for name, value in run.metrics.items())
    weights = "averaged" if run.averaged else "last"
    lines = [
        f" after {run.steps} steps in {run.seconds:.1f} s.",
        f"Test data, {weights} weights: {numbers}.",
        f"Run: {run.folder}",
    ]
    if run.report is not None:
        lines.append(f"Report: {run.report}")
    return Text.assemble((guarantee_in_words(run.epsilon, run.delta), "bold"), "\n".join(lines))


def _decided_by_first(
    decide: Callable[[], tuple[RunConfig, Path, bool]],
) -> tuple[RunConfig, Path, bool]:
    """Let process 0 read files and choose a folder: others may have none, or see it too late."""
    from clipless.runs import RunProcesses

    return RunProcesses().from_first(decide)


def _is_restart(out: Path | None) -> bool:
    """Whether `torchrun` starts its processes again, after they have begun a run."""
    if not was_restarted():
        return False
    if out is None:
        raise ConfigError(
            "torchrun has started its processes again, and without --out they would begin a second "
            "run. Go on with the first one: clipless train --resume --out RUN"
        )
    return RunFolder(out).has(RunFile.CONFIG)


def _stored(folder: Path | None) -> dict[str, Any]:
    """The configuration in a run folder, without loading torch for it."""
    if folder is None:
        raise ConfigError("--resume needs --out: the folder of the run to go on with")
    path = RunFolder(folder).file(RunFile.CONFIG)
    if not path.is_file():
        raise ConfigError(f"{folder} holds no run to go on with: leave --resume out")
    data = read_config_file(path)
    return {key: value for key, value in data.items() if key not in ("format", "version")}


def _new_folder(config: RunConfig) -> Path:
    """The first of runs/NAME-1, runs/NAME-2, ... that is not there."""
    data = config.data
    name = data.name or Path(data.file or "run").name.split(".")[0]
    name = re.sub(r"[^\w.-]+", "-", name).lower()
    number = 1
    while (folder := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return folder
