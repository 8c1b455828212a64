"""`run_sweep` and `read_sweep`: working on a sweep, and reading it.

Every trial of a sweep has a slot, which is queued when the sweep begins; a worker takes the next
one, trains, and takes another. So any number of workers make exactly as many runs as were asked
for. A worker that is killed stops writing its heartbeat, and its trial goes back into the queue.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna

from clipless.runs import ConfigError, torchrun_rank
from clipless.sweeps import _storage as storage_of
from clipless.sweeps._definition import Sweep
from clipless.sweeps._records import PlainHistory, Train
from clipless.sweeps._result import SLOT, SweepResult
from clipless.sweeps._worker import Worker


def run_sweep(
    sweep: Sweep,
    out: str | os.PathLike[str],
    *,
    storage: str | None = None,
    name: str = "sweep",
    train: Train | None = None,
    declared: Sequence[PlainHistory] | None = None,
    heartbeat: int = 60,
    retries: int = 3,
    timeout: float | None = None,
    progress: bool | None = None,
) -> SweepResult:
    """Work on a sweep until all of its trials are done: begin it, join it, or go on with it.

    Call it in as many processes and on as many machines as you like, with the same `storage`.
    It returns when no trial is waiting and none is running, those of other workers included.

    Guarantee: each run has the guarantee of `train_run`, for itself. For what is selected among
    them, `SweepResult.selection` says what is covered.

    Args:
        out: the folder of the sweep: its database, and a folder for each run.
        storage: any database URL that Optuna takes, for many machines; by default SQLite in `out`,
            which wants a local disk.
        name: of the sweep in the database.
        train: makes a run; by default `clipless.runs.train_run`.
        declared: for a `train` of one's own, everything that a run may release, for each kind of
            run: under repetitions, or to know what a search that looks at scores costs.
        heartbeat: seconds between signs of life; twice that without one is taken for killed.
        retries: how often a killed trial is tried again.
        timeout: begin no new trial after so many seconds.
        progress: show the bar of each run; by default on a terminal.

    Raises:
        ConfigError: the sweep differs from the one in the storage, or its runs are refused.

    Example:
        >>> import tempfile
        >>> from clipless.sweeps import Outcome
        >>> sweep = Sweep.from_dict({
        ...     "sweep": {"trials": 3, "sampler": "random", "seed": 0},
        ...     "space": {"training.learning_rate": {"low": 0.001, "high": 1.0}}})
        >>> def train(settings, folder, report):
        ...     rate = settings["training"]["learning_rate"]
        ...     return Outcome(value=-abs(rate - 0.1), epsilon=1.0, delta=1e-5)
        >>> result = run_sweep(sweep, tempfile.mkdtemp(), train=train)
        >>> len(result.trials), result.best.value == max(t.value for t in result.trials)
        (3, True)
    """
    folder = Path(out).absolute()
    if train is None:
        _require_one_process()
    database = storage_of.open_storage(folder, storage, heartbeat=heartbeat, retries=retries)
    study = _begin(sweep, database, name, usual=train is None, declared=declared)
    spent = None
    if train is None:
        from clipless.sweeps._training import TrainRun, spent_in

        train, spent = TrainRun(sweep, progress=progress), spent_in
    queue(study, sweep)
    worker = Worker(sweep, study, folder, train, spent, retries)
    worker.work(timeout=timeout, grace=float(storage_of.grace_of(heartbeat)))
    return SweepResult.of(study, folder)


def read_sweep(
    out: str | os.PathLike[str], *, storage: str | None = None, name: str = "sweep"
) -> SweepResult:
    """Return what is known of a sweep, also while others work on it."""
    folder = Path(out).absolute()
    if storage is None and not (folder / storage_of.DATABASE).exists():
        raise ConfigError(f"{folder} holds no sweep")
    database = storage_of.open_storage(folder, storage, heartbeat=60, retries=0)
    return SweepResult.of(storage_of.load_study(None, database, name), folder)


def _require_one_process() -> None:
    """Processes that train one model together would take different trials of it."""
    from clipless.distributed import rank_and_size

    if torchrun_rank() is not None or rank_and_size()[1] > 1:
        raise ConfigError(
            "a sweep trains every run in one process: start workers without torchrun, as many as "
            "you like, each with a GPU of its own (CUDA_VISIBLE_DEVICES)"
        )


def _begin(
    sweep: Sweep,
    database: Any,
    name: str,
    *,
    usual: bool,
    declared: Sequence[PlainHistory] | None,
) -> optuna.Study:
    """Create the study with its number of slots, or join it."""
    if name in optuna.get_all_study_names(database):
        return storage_of.load_study(sweep, database, name)
    if usual:
        from clipless.sweeps._planned import example_config

        example_config(sweep, {})  # a mistake in the settings is one mistake, not one a trial
    known: Any = None if declared is None else [list(each) for each in declared]
    repetitions = sweep.repetitions
    if known is None and repetitions is not None and not usual:
        raise ConfigError(
            "with repetitions and a training function of your own, say what a run may "
            "release: declared="
        )
    if known is None and usual and (repetitions is not None or sweep.looks_at_scores):
        from clipless.sweeps._planned import declared_runs

        try:
            known = [[(run.to_dict(), count)] for run, count in declared_runs(sweep)]
        except ConfigError:  # then nobody can say what all runs cost together
            if repetitions is not None:
                raise
    slots = sweep.trials if repetitions is None else repetitions.draw()
    return storage_of.begin_study(sweep, database, name, slots, known)


def queue(study: optuna.Study, sweep: Sweep) -> None:
    """Queue the slots that are not there yet.

    Two workers may both find one missing. The second of two equal slots is dropped when it is
    taken, by `Worker`.
    """
    slots = int(study.user_attrs[storage_of.SLOTS])
    if sweep.repetitions is None and sweep.trials > slots:
        study.set_user_attr(storage_of.SLOTS, sweep.trials)
        study.set_user_attr(storage_of.DEFINITION, sweep.to_dict())
        slots = sweep.trials
    there = {trial.user_attrs.get(SLOT) for trial in study.get_trials(deepcopy=False)}
    for slot in sorted(set(range(slots)) - there):
        study.enqueue_trial({}, user_attrs={SLOT: slot})
