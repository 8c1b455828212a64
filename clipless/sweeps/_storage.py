"""Optuna's storages, samplers and pruners for sweeps."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback

from clipless.common import fresh_bits
from clipless.folders import RunFolderError
from clipless.runs import ConfigError
from clipless.sweeps._definition import Sweep

DATABASE = "sweep.db"
DEFINITION, SLOTS, DECLARED = "clipless:sweep", "clipless:slots", "clipless:declared"
"""Names of what a study knows about its sweep."""
_ATTEMPTS = 4
_PATIENCE = 60.0
"""Seconds to wait for another worker that is about to begin the sweep."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence Optuna's notes on experimental parts, which this package uses knowingly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


def grace_of(heartbeat: int) -> int:
    """Return after how many seconds of silence a trial is taken for killed: two heartbeats.

    At least five seconds, since a busy machine or database may well be late by so much.
    """
    return max(2 * heartbeat, 5)


def open_storage(folder: Path, url: str | None, *, heartbeat: int, retries: int) -> RDBStorage:
    """Open a database: by default SQLite in the folder of the sweep.

    Workers write a heartbeat while they train. A trial without one for `grace_of(heartbeat)` is
    taken for killed, and is tried again by whoever comes next.

    Raises:
        ConfigError: the database cannot be reached, or its driver is not installed.
    """
    if url is None:
        folder.mkdir(parents=True, exist_ok=True)
        url = f"sqlite:///{folder / DATABASE}"
    # SQLite has one writer at a time; the others wait for it rather than fail.
    patience: dict[str, Any] = {"connect_args": {"timeout": 120}} if "sqlite" in url else {}
    for attempt in range(_ATTEMPTS):
        try:
            with quiet():
                storage = RDBStorage(
                    url,
                    engine_kwargs={"pool_pre_ping": True, **patience},
                    heartbeat_interval=heartbeat,
                    grace_period=grace_of(heartbeat),
                    heartbeat_stale_trial_callback=retry_callback(retries),
                )
            return _serialized(storage)
        except ImportError as error:
            raise ConfigError(
                f"{url.partition(':')[0]} needs a driver that is not installed. For PostgreSQL: "
                "pip install 'clipless[postgresql]', and write postgresql+psycopg://..."
            ) from error
        except Exception as error:  # whatever a driver raises
            # Two workers that begin at once may both create the tables: the second finds them.
            if attempt + 1 < _ATTEMPTS:
                time.sleep(0.3 * (1 + attempt))
                continue
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(f"the storage of the sweep cannot be opened: {reason}") from error
    raise ConfigError("the storage of the sweep cannot be opened")


def _serialized(storage: RDBStorage) -> RDBStorage:
    """Make transactions of SQLite exclude each other from their beginning, not their first write.

    To take a trial is to read that it waits and to write that it runs. SQLite locks no rows: left
    to itself, two workers can both read before either writes, and both train the same run.
    """
    engine = storage.engine
    if engine.dialect.name == "sqlite":

        @sqlalchemy.event.listens_for(engine, "connect")
        def connected(connection: Any, record: Any) -> None:
            connection.isolation_level = None  # the driver begins no transactions of its own

        @sqlalchemy.event.listens_for(engine, "begin")
        def begun(connection: Any) -> None:
            connection.exec_driver_sql("BEGIN IMMEDIATE")

        engine.dispose()  # connections of before have the old ways
    return storage


def retry_callback(retries: int) -> RetryHeartbeatStaleTrialCallback:
    """Return what puts a killed or interrupted trial back into the queue."""
    with quiet():
        return RetryHeartbeatStaleTrialCallback(max_retry=retries)


def begin_study(
    sweep: Sweep, storage: RDBStorage, name: str, slots: int, declared: Any
) -> optuna.Study:
    """Create the study, or join the one that another worker has created.

    The database decides who was first. The definition is written last: who finds it finds the
    rest too.
    """
    try:
        study = optuna.create_study(storage=storage, study_name=name, direction="maximize")
    except optuna.exceptions.DuplicatedStudyError:
        return load_study(sweep, storage, name)
    study.set_user_attr(SLOTS, slots)
    study.set_user_attr(DECLARED, declared)
    study.set_user_attr(DEFINITION, sweep.to_dict())
    return load_study(sweep, storage, name)


def load_study(sweep: Sweep | None, storage: RDBStorage, name: str) -> optuna.Study:
    """Open a study whose definition is there, and the one that is asked for."""
    try:
        with quiet():
            study = optuna.load_study(
                study_name=name,
                storage=storage,
                sampler=None if sweep is None else make_sampler(sweep),
                pruner=None if sweep is None else make_pruner(sweep),
            )
    except KeyError as error:
        raise RunFolderError(f"the storage holds no sweep named {name!r}") from error
    until = time.monotonic() + _PATIENCE
    while DEFINITION not in study.user_attrs:
        if time.monotonic() > until:
            raise RunFolderError(
                f"the sweep {name!r} was created and never defined: whoever began it was stopped "
                "at once. Use another name, or delete it."
            )
        time.sleep(0.2)
    if sweep is not None:
        _require_same(sweep, Sweep.from_dict(study.user_attrs[DEFINITION]), name)
    return study


def make_sampler(sweep: Sweep) -> optuna.samplers.BaseSampler:
    """Return Optuna's sampler for a sweep."""
    seed = fresh_bits(32) if sweep.seed is None else sweep.seed
    if sweep.sampler == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if sweep.sampler == "gp":
        return optuna.samplers.GPSampler(seed=seed)
    # Workers do not wait for each other: a run in progress counts as a bad one.
    return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


def make_pruner(sweep: Sweep) -> optuna.pruners.BasePruner:
    """Return Optuna's pruner for a sweep."""
    if sweep.pruner == "none":
        return optuna.pruners.NopPruner()
    return optuna.pruners.HyperbandPruner()


def _require_same(now: Sweep, then: Sweep, name: str) -> None:
    """A sweep goes on as it began; only its number of trials may grow."""
    new, old = now.to_dict(), then.to_dict()
    for each in (new, old):
        each["sweep"] = {key: value for key, value in each["sweep"].items() if key != "trials"}
    differences = [
        section for section in sorted({*new, *old}) if new.get(section, {}) != old.get(section, {})
    ]
    if differences:
        raise ConfigError(
            f"the sweep {name!r} exists and differs in [{'], ['.join(differences)}]. Go on with it "
            "as it is, or choose another folder or name."
        )
