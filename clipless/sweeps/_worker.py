"""One worker of a sweep: takes trials, trains, and looks after those of workers that died."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

from clipless.folders import RunFile, RunFolder
from clipless.runs import merge_config_layers
from clipless.sweeps import _storage as storage_of
from clipless.sweeps._definition import Sweep
from clipless.sweeps._records import PlainHistory, Report, Train
from clipless.sweeps._result import (
    ERROR,
    LOST,
    OUTCOME,
    POINTS,
    SETTINGS,
    SLOT,
    SPENT,
    UNWANTED,
    place_of,
)
from clipless.sweeps._space import nested

_FAILURES_IN_A_ROW = 5
"""After so many the mistake is in the sweep, not in a run."""
_POLL = 0.5


class _TrialFailedError(Exception):
    """Ends a trial as failed, and not the worker."""


class Worker:
    """One process at work on a sweep."""

    def __init__(
        self,
        sweep: Sweep,
        study: optuna.Study,
        folder: Path,
        train: Train,
        spent: Callable[[Path], PlainHistory | None] | None,
        retries: int,
    ) -> None:
        self._sweep, self._study, self._folder, self._train = sweep, study, folder, train
        self._spent = spent
        self._retry = storage_of.retry_callback(retries)
        self._failures = 0
        self._taken_over = False
        self._first_seen: dict[int, float] = {}
        self._revived: set[int] = set()

    def work(self, *, timeout: float | None, grace: float) -> None:
        """Take trials until none is waiting and none is running."""
        begun = time.monotonic()
        while timeout is None or time.monotonic() - begun < timeout:
            with storage_of.quiet():
                optuna.storages.fail_stale_trials(self._study)
            states = [TrialState.WAITING, TrialState.RUNNING]
            trials = self._study.get_trials(deepcopy=False, states=states)
            if any(trial.state == TrialState.WAITING for trial in trials):
                self._take_one()
            elif trials:
                self._watch(trials, grace)
                time.sleep(_POLL)
            else:
                return

    def _take_one(self) -> None:
        """Take a trial, and train it."""
        self._taken_over = False
        try:
            self._study.optimize(self._objective, n_trials=1, catch=(_TrialFailedError,))
        except Exception:
            # Who was taken for dead and is not finds that its trial belongs to somebody else, and
            # has nothing more to say about it. Optuna raises various errors then.
            if not self._taken_over:
                raise

    def _watch(self, running: Sequence[optuna.trial.FrozenTrial], grace: float) -> None:
        """Give a heartbeat to trials that never had one.

        A worker that is killed between taking a trial and its first heartbeat leaves a trial that
        Optuna waits for without end. One heartbeat, given late, makes it an ordinary killed one.
        """
        now = time.monotonic()
        for trial in running:
            identity = trial._trial_id
            since = self._first_seen.setdefault(identity, now)
            if now - since > grace and identity not in self._revived:
                self._revived.add(identity)  # once: a dead worker must not live on in this way
                storage: Any = self._study._storage
                storage.record_heartbeat(identity)

    def _objective(self, trial: optuna.Trial) -> float:
        slot = self._slot(trial)
        settings = self._sweep.space.suggest(trial, decided=self._sweep.decided)
        trial.set_user_attr(SETTINGS, settings)
        place = place_of(self._folder, slot)
        if _earlier(_frozen(trial).system_attrs) and not _has_ledger(place):
            trial.set_user_attr(LOST, int(trial.user_attrs.get(LOST, 0)) + 1)
        points: list[Any] = []
        try:
            report = _report(trial, points)
            outcome = self._train(self._config(slot, settings), place, report)
        except KeyboardInterrupt:
            self._retry(self._study, _frozen(trial))
            raise
        except optuna.TrialPruned:
            raise
        except Exception as error:
            self._require_mine(trial)
            trial.set_user_attr(ERROR, f"{type(error).__name__}: {error}")
            if self._spent is not None:
                trial.set_user_attr(SPENT, self._spent(place) or [])
            self._failures += 1
            if self._failures >= _FAILURES_IN_A_ROW:
                raise
            raise _TrialFailedError from error
        self._failures = 0
        self._require_mine(trial)
        if points:
            trial.set_user_attr(POINTS, points)
        trial.set_user_attr(OUTCOME, outcome.to_dict())
        if outcome.pruned:
            raise optuna.TrialPruned
        if outcome.value is None:
            raise _TrialFailedError("the run has no metric")
        return outcome.value

    def _require_mine(self, trial: optuna.Trial) -> None:
        """Stop if the trial was given to somebody else in the meantime."""
        if _frozen(trial).state != TrialState.RUNNING:
            self._taken_over = True
            raise _TrialFailedError

    def _slot(self, trial: optuna.Trial) -> int:
        """Return the slot of a trial, or refuse it if nobody asked for it."""
        slot = trial.user_attrs.get(SLOT)
        first = min((trial.number, *_earlier(_frozen(trial).system_attrs)))
        doubled = any(
            other.number < first and not _earlier(other.system_attrs)
            for other in self._study.get_trials(deepcopy=False)
            if other.user_attrs.get(SLOT) == slot
        )
        if slot is None or doubled:  # a race for the last one, or for filling the queue
            trial.set_user_attr(UNWANTED, True)
            raise _TrialFailedError
        return int(slot)

    def _config(self, slot: int, settings: dict[str, Any]) -> dict[str, Any]:
        config = merge_config_layers(self._sweep.base, nested(settings))
        seed = config.get("training", {}).get("seed")
        if isinstance(seed, int):  # other initial weights in every run
            config["training"] = {**config["training"], "seed": seed + slot}
        return config


def _report(trial: optuna.Trial, points: list[Any]) -> Report:
    """Return what a run reports to; it adds to `points`."""

    def report(
        epoch: int, value: float, *, epsilon: float | None = None, last: bool = False
    ) -> None:
        points.append((epoch, value, epsilon))
        trial.report(value, step=epoch)
        if not last and trial.should_prune():
            raise optuna.TrialPruned(f"stopped after epoch {epoch}")

    return report


def _frozen(trial: optuna.Trial) -> optuna.trial.FrozenTrial:
    return trial.study._storage.get_trial(trial._trial_id)


def _earlier(system: Mapping[str, Any]) -> list[int]:
    """The numbers of the attempts before one."""
    return list(system.get("retry_history", ()))


def _has_ledger(place: Path) -> bool:
    places = (place, *place.parent.glob(f"{place.name}.lost-*"))
    return any(RunFolder(each).has(RunFile.LEDGER) for each in places)
