"""From a configuration to a trained run in a folder."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipless.common import fresh_bits
from clipless.errors import CliplessError
from clipless.folders import RunFile, RunFolder
from clipless.runs import _build
from clipless.runs._environment import environment
from clipless.runs._model_kinds import default_model, refuse_unused_settings, run_kind
from clipless.runs._process_agreement import RunProcesses
from clipless.runs._report_callbacks import report_callbacks
from clipless.runs._result import TrainedRun
from clipless.runs._tabular import resolved_tabular, train_tabular
from clipless.runs._trainer import make_trainer
from clipless.runs.config._errors import ConfigError
from clipless.runs.config._sections import RunConfig, stored_config
from clipless.runs.data._digests import check_digests, data_digests, write_digests
from clipless.runs.data._load import RunData, load_data
from clipless.training import Callback, FitResult, Trainer, tensors_to_bytes

# Where things are may change between the parts of a run; what they are may not.
_PLACES = {"data": ("file", "root", "download"), "training": ("device", "keep_checkpoints")}


def train_run(
    config: RunConfig,
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    progress: bool | None = None,
    callbacks: Sequence[Callback] = (),
    report: bool = True,
) -> TrainedRun:
    """Train what `config` describes, and keep everything about it in the folder `out`.

    Guarantee: that of `clipless.training.Trainer`, or for tables of the estimators of
    `clipless.sklearn`. What was measured on data (`metrics.jsonl`, `result.json`, the private
    report and others, `docs/cli.md` lists them) is not covered, and checkpoints are secret.

    Called by all processes of `torchrun`, they train together: process 0 keeps the folder, which
    the others need not see, and all return what it returns.

    Args:
        out: a new or empty folder; or with `resume`, one that holds this run, which goes on.
        resume: go on with the run in `out`, whose configuration must be this one.
        progress: show a bar on the standard error; by default on a terminal.
        callbacks: further ones, besides those that write files for the report.
        report: write the report at the end, if `clipless.report` can be imported.

    Raises:
        ConfigError: the configuration does not fit the data, or the folder holds another run.
        DataNotFoundError, DataFileError: the data are missing or corrupt.
        BudgetExhaustedError: not even one step fits into the budget.

    Example:
        >>> import tempfile
        >>> config = RunConfig.from_dict({
        ...     "data": {"name": "digits"}, "model": {"name": "mlp", "hidden": 16},
        ...     "privacy": {"noise_multiplier": 2.0},
        ...     "training": {"steps": 3, "batch_size": 100}})
        >>> run = train_run(config, tempfile.mkdtemp(), report=False)
        >>> run.steps, run.stopped, sorted(run.metrics)
        (3, 'finished', ['accuracy', 'loss'])
    """
    group = RunProcesses()
    folder = RunFolder(out)
    _build.check_names(config.model, config.loss)
    if not group.several:  # of several processes, each takes its own
        _build.usable_device(config.training.device)
    group.from_first(lambda: _check_place(folder, resume=resume))
    shown = progress if group.first else False

    def read() -> tuple[RunData, RunConfig]:
        data = load_data(config.data, progress=shown)
        return data, resolved_config(config, data)

    data, full = group.in_turns(read)
    digests = data_digests(data)
    group.require_same(full, digests)
    group.from_first(lambda: _begin(folder, full, digests, resume=resume))
    try:
        run = train_on(full, data, folder, resume, shown, callbacks, group)
    except BaseException:
        if group.first and not resume and not folder.has_spent():
            folder.discard()
        raise

    def finish() -> TrainedRun:
        folder.write_json(RunFile.RESULT, run.record())
        return replace(run, report=_report(folder)) if report else run

    return group.from_first(finish)


def _begin(
    folder: RunFolder, config: RunConfig, digests: Mapping[str, Any], *, resume: bool
) -> None:
    """Write down what the run is, or check that it is the one that is there."""
    if resume:
        _require_same(folder, config)
        check_digests(folder, digests)
    else:
        folder.create()
        folder.write_json(RunFile.CONFIG, config.to_dict())
        write_digests(folder, digests)
    place = config.training.device or "cpu"
    folder.write_json(RunFile.ENVIRONMENT, environment(place))


def resolved_config(config: RunConfig, data: RunData) -> RunConfig:
    """Return the configuration with everything filled in that was left to defaults or a rule."""
    kind = run_kind(config.model.name or default_model(data))
    if kind == "network":
        return _build.resolved_config(config, data)
    refuse_unused_settings(config, kind)
    if kind == "tabular":
        return resolved_tabular(config, data)
    from clipless.images import resolved_images

    return resolved_images(config, data)


def train_on(
    config: RunConfig,
    data: RunData,
    folder: RunFolder,
    resume: bool,
    progress: bool | None,
    callbacks: Sequence[Callback],
    group: RunProcesses,
) -> TrainedRun:
    """Train a resolved configuration on data that were read, by its kind."""
    kind = run_kind(config.model.name)
    if kind == "network":
        return _train_network(config, data, folder, resume, progress, callbacks, group)
    if callbacks:
        raise ConfigError(f"runs of the kind {kind} take no callbacks")
    if kind == "tabular":
        return train_tabular(config, data, folder, resume=resume, progress=progress)
    from clipless.images import train_images_run

    try:
        return train_images_run(config, data, folder, resume=resume, progress=progress)
    except CliplessError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _train_network(
    config: RunConfig,
    data: RunData,
    folder: RunFolder,
    resume: bool,
    progress: bool | None,
    callbacks: Sequence[Callback],
    group: RunProcesses,
) -> TrainedRun:
    training = config.training
    device = torch.device(training.device or "cpu")
    train, test = (_ready(pair, config, device) for pair in (data.train, data.test))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if training.seed is None:
            torch.manual_seed(fresh_bits(63))
        else:
            torch.manual_seed(training.seed)
        try:
            trainer = make_trainer(
                config,
                run_dir=folder.path,
                resume=resume,
                callbacks=[*report_callbacks(config, train, group.processes), *callbacks],
                progress=progress,
            )
            result = trainer.fit(train, validation_data=test if training.validate else None)
        except CliplessError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return group.from_first(lambda: _finish(trainer, result, test, folder))


def _finish(
    trainer: Trainer, result: FitResult, test: tuple[Tensor, Tensor], folder: RunFolder
) -> TrainedRun:
    """Put the final weights, the averaged ones if there are any, beside what they cost."""
    averaged = trainer.average is not None
    metrics = trainer.evaluate(test)
    if trainer.average is not None:
        trainer.average.copy_to(trainer.model)
    weights = {
        name: tensor
        for name, tensor in trainer.model.state_dict().items()
        if isinstance(tensor, Tensor)
    }
    digest = folder.write_weights(tensors_to_bytes(weights))
    return TrainedRun(
        folder=folder.path,
        epsilon=result.epsilon,
        delta=result.delta,
        steps=result.steps,
        stopped=result.stopped,
        seconds=result.seconds,
        metrics=metrics,
        averaged=averaged,
        weights_sha256=digest,
        resumed_from=result.resumed_from,
        report=None,
    )


def _ready(
    pair: tuple[Tensor, Tensor], config: RunConfig, device: torch.device
) -> tuple[Tensor, Tensor]:
    inputs, targets = pair
    return inputs.to(device), _build.targets_for(config.loss, targets).to(device)


def _report(folder: RunFolder) -> Path | None:
    """Write the report; a run that is done is not undone by a page that cannot be written."""
    try:
        from clipless.report import write_report

        write_report(folder.path)
    except (ImportError, CliplessError) as error:
        warnings.warn(f"no report was written: {error}", stacklevel=3)
        return None
    return folder.file(RunFile.REPORT_HTML)


# --- which folder --------------------------------------------------------------------------------


def _check_place(folder: RunFolder, *, resume: bool) -> None:
    path, holds_run = folder.path, folder.has(RunFile.CONFIG)
    if holds_run:
        folder.require_known_version()
    if resume and not holds_run:
        raise ConfigError(f"{path} holds no run to go on with: leave --resume (resume=True) out")
    if not resume and holds_run:
        raise ConfigError(
            f"{path} holds a run already. Go on with it by --resume (resume=True), or choose "
            "another folder; a new run on the same data costs its own budget on top."
        )
    _check_writable(path)
    if not resume and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} exists and is not empty: choose a new folder for the run")


def _check_writable(path: Path) -> None:
    """Refuse a place where no folder can be made, before data are read for hours."""
    above = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not above.is_dir():
        raise ConfigError(f"{path} cannot be a folder: {above} is a file")
    try:
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror} ({above})") from error


def _require_same(folder: RunFolder, config: RunConfig) -> None:
    then, now = stored_config(folder).to_dict(), config.to_dict()
    differences = [
        f"{section}.{key} was {then[section].get(key)!r}, is {now[section].get(key)!r}"
        for section in now
        for key in sorted({*then[section], *now[section]})
        if then[section].get(key) != now[section].get(key) and key not in _PLACES.get(section, ())
    ]
    if differences:
        raise ConfigError(
            f"the run in {folder.path} has another configuration: {'; '.join(differences)}. Resume "
            "it as it was, or choose another folder."
        )
