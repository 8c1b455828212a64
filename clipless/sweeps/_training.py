"""One trial as a run: `clipless.runs.train_run`, reported epoch by epoch, killed or not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import optuna

from clipless.folders import RunFile, RunFolder
from clipless.runs import (
    ConfigError,
    RunConfig,
    default_model,
    load_data,
    open_run,
    run_kind,
    stored_config,
    train_run,
)
from clipless.sweeps._definition import Sweep
from clipless.sweeps._planned import shrunk
from clipless.sweeps._records import Outcome, PlainHistory, Report
from clipless.training import Callback, Trainer


class TrainRun:
    """The usual training function of a sweep."""

    def __init__(self, sweep: Sweep, *, progress: bool | None = None) -> None:
        self._sweep, self._progress = sweep, progress

    def __call__(self, settings: dict[str, Any], folder: Path, report: Report) -> Outcome:
        """Train a run in its folder, or go on with the one that is there."""
        config, sweep = RunConfig.from_dict(settings), self._sweep
        if sweep.scale != 1:
            config = shrunk(config, load_data(config.data), sweep.scale)
        resume = make_ready(folder)
        reporter = _Reporter(report, sweep.metric)
        kind = run_kind(config.model.name or default_model(load_data(config.data)))
        try:
            run = train_run(
                config,
                folder,
                resume=resume,
                progress=self._progress,
                callbacks=[reporter] if kind == "network" else [],  # others report at their end
                report=False,
            )
        except optuna.TrialPruned:
            return self._pruned(folder, reporter)
        if sweep.metric not in run.metrics:
            raise ConfigError(
                f"the runs measure {', '.join(run.metrics)}; sweep.metric is {sweep.metric!r}"
            )
        return Outcome(
            value=run.metrics[sweep.metric],
            epsilon=run.epsilon,
            delta=run.delta,
            history=spent_in(folder),
            robustness=None if sweep.radius is None else certified(folder, sweep.radius),
            metrics=dict(run.metrics),
            steps=run.steps,
            seconds=run.seconds,
        )

    def _pruned(self, folder: Path, reporter: _Reporter) -> Outcome:
        """What a run that scores have stopped costs: all of its planned steps."""
        plan = reporter.trainer.engine.plan
        return Outcome(
            value=reporter.last,
            epsilon=plan.epsilon(),
            delta=plan.delta,
            history=spent_in(folder),
            steps=reporter.trainer.step,
            pruned=True,
        )


class _Reporter(Callback):
    """Hands the metric of every epoch on, and lets the request to stop through."""

    def __init__(self, report: Report, metric: str) -> None:
        self._report, self._metric = report, f"validation_{metric}"
        self.last: float | None = None
        self.trainer: Trainer

    def on_fit_start(self, trainer: Trainer) -> None:
        """Remember who trains."""
        self.trainer = trainer

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Report the epoch."""
        line = trainer.history[-1]
        if self._metric in line:
            self.last = float(line[self._metric])
            spent, last = line.get("epsilon_bound"), trainer.step >= trainer.steps
            self._report(trainer.epoch, self.last, epsilon=spent, last=last)


def make_ready(folder: Path) -> bool:
    """Return whether the folder holds a run to go on with; clear away what cannot go on.

    A run that has no ledger has spent nothing, and begins anew. One that follows a rule (tables,
    images by scattering) cannot go on: it is put aside, so that its ledger still counts.
    """
    run = RunFolder(folder)
    if not run.has(RunFile.CONFIG):
        return False
    if not run.has(RunFile.LEDGER):
        shutil.rmtree(folder)
        return False
    if run_kind(stored_config(run).model.name) != "network":
        number = len(list(folder.parent.glob(f"{folder.name}.lost-*"))) + 1
        folder.rename(folder.with_name(f"{folder.name}.lost-{number}"))
        return False
    return True


def spent_in(folder: Path) -> PlainHistory | None:
    """Return what the ledgers of a trial count, all attempts of it in this place together."""
    places = [folder, *sorted(folder.parent.glob(f"{folder.name}.lost-*"))]
    runs = [run for run in map(RunFolder, places) if run.has(RunFile.LEDGER)]
    if not runs:
        return None
    return [
        (mechanism.to_dict(), count)
        for run in runs
        for mechanism, count in run.read_ledger().counts().items()
    ]


def certified(folder: Path, radius: float) -> float | None:
    """Return the certified accuracy of a run at a radius, on its test data; None for tables."""
    from clipless.robustness import certified_accuracy

    run = open_run(folder)
    if run.tabular:
        return None
    data = run.data()
    x, y = run.tensors(data.test)
    found = certified_accuracy(
        run.model, x, y, radii=[radius], input_lipschitz=data.input_lipschitz
    )
    return found.accuracies[0]
