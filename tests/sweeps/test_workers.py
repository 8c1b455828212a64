"""Several workers, one storage: every run is made once, whatever happens to whom."""

import os
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import optuna
import pytest

from clipless.runs import ConfigError
from clipless.sweeps import Outcome, Repetitions, read_sweep, run_sweep
from tests.sweeps import worker as tiny

ROOT = Path(__file__).parents[2]


def begin(out, storage, *, trials, block=-1):
    command = [sys.executable, "-m", "tests.sweeps.worker", out, storage, trials, block]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def url_of(storage):
    return None if storage == "-" else storage


def wait_for(path, process, seconds=60):
    until = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until, f"{path} never came"
        time.sleep(0.02)


def test_two_workers_and_a_kill(storage, tmp_path):
    """Two workers begin at once; one is killed in the middle of a run; the other does the rest."""
    trials, blocked = 8, 3
    workers = [begin(tmp_path, storage, trials=trials, block=blocked) for _ in range(2)]
    mark = tmp_path / "trials" / f"{blocked:05d}" / "attempts"
    wait_for(mark, workers[0])
    killed = next(each for each in workers if str(each.pid) == mark.read_text().strip())
    (other,) = (each for each in workers if each is not killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    _, err = other.communicate(timeout=60)
    assert other.returncode == 0, err
    result = read_sweep(tmp_path, storage=url_of(storage))
    assert result.finished
    assert [trial.state for trial in result.trials] == ["complete"] * trials
    attempts = {
        int(path.name): (path / "attempts").read_text().split()
        for path in (tmp_path / "trials").iterdir()
    }
    assert attempts.pop(blocked) == [str(killed.pid), str(other.pid)]
    assert sorted(attempts) == [slot for slot in range(trials) if slot != blocked]
    assert all(len(who) == 1 for who in attempts.values())
    # The attempt that was lost left no ledger: it counts as a whole run.
    assert [trial.lost_attempts for trial in result.trials] == [0, 0, 0, 1, 0, 0, 0, 0]
    again = result.trials[blocked]
    assert again.attempts == 2
    assert again.value == pytest.approx(1 - abs(again.settings["training.learning_rate"] - 0.1))


def test_a_sweep_whose_only_worker_was_killed_goes_on(tmp_path):
    victim = begin(tmp_path, "-", trials=4, block=1)
    wait_for(tmp_path / "trials" / "00001" / "attempts", victim)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    left = read_sweep(tmp_path)
    assert [trial.state for trial in left.trials].count("running") == 1
    assert not left.finished
    result = run_sweep(tiny.definition(4), tmp_path, train=tiny.train, heartbeat=1)
    assert [trial.state for trial in result.trials] == ["complete"] * 4
    assert [trial.attempts for trial in result.trials] == [1, 2, 1, 1]


def test_goes_on_with_more_trials_and_refuses_another_definition(tmp_path):
    first = run_sweep(tiny.definition(2), tmp_path, train=tiny.train)
    assert len(first.trials) == 2
    more = run_sweep(tiny.definition(4), tmp_path, train=tiny.train)
    assert [t.settings for t in more.trials[:2]] == [t.settings for t in first.trials]
    assert len(more.trials) == 4
    assert more.sweep.trials == 4
    other = tiny.definition(4, privacy={"epsilon": 1.0})
    with pytest.raises(ConfigError, match=r"differs in \[privacy\]"):
        run_sweep(other, tmp_path, train=tiny.train)


def test_an_interrupted_run_goes_back_into_the_queue(tmp_path):
    calls = []

    def train(settings, folder, report):
        calls.append((folder.name, settings["training"]["learning_rate"]))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return tiny.train(settings, folder, report)

    with pytest.raises(KeyboardInterrupt):
        run_sweep(tiny.definition(3), tmp_path, train=train)
    result = run_sweep(tiny.definition(3), tmp_path, train=train)
    assert [trial.state for trial in result.trials] == ["complete"] * 3
    assert [name for name, _ in calls].count(calls[1][0]) == 2
    assert calls[1] in (calls[2], calls[3])  # with the same settings


def test_a_failed_run_is_not_the_end_but_five_in_a_row_are(tmp_path):
    def sometimes(settings, folder, report):
        if int(folder.name) == 1:
            raise RuntimeError("out of memory")
        return tiny.train(settings, folder, report)

    result = run_sweep(tiny.definition(3), tmp_path / "one", train=sometimes)
    assert [trial.state for trial in result.trials] == ["complete", "failed", "complete"]
    assert "out of memory" in result.trials[1].error

    def never(settings, folder, report):
        raise RuntimeError("no such thing")

    with pytest.raises(RuntimeError, match="no such thing"):
        run_sweep(tiny.definition(30), tmp_path / "all", train=never)


def test_who_was_taken_for_dead_gives_way(tmp_path):
    """A worker that comes back to life finds its trial done by another, and goes on."""
    from clipless.sweeps import _storage

    calls = []

    def train(settings, folder, report):
        calls.append(folder.name)
        if len(calls) == 1:  # meanwhile somebody finds this worker dead, and takes the trial over
            database = _storage.open_storage(tmp_path, None, heartbeat=60, retries=3)
            study = _storage.load_study(None, database, "sweep")
            (running,) = (t for t in study.trials if t.state.name == "RUNNING")
            database.set_trial_state_values(running._trial_id, state=optuna.trial.TrialState.FAIL)
            _storage.retry_callback(3)(study, database.get_trial(running._trial_id))
        return tiny.train(settings, folder, report)

    result = run_sweep(tiny.definition(2), tmp_path, train=train)
    assert calls == ["00000", "00001", "00000"]
    assert [trial.state for trial in result.trials] == ["complete"] * 2
    assert [trial.lost_attempts for trial in result.trials] == [1, 0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_a_trial_without_any_heartbeat_is_taken_over(tmp_path):
    """A worker killed between taking a trial and its first sign of life blocks nobody."""
    from clipless.sweeps import _storage

    run_sweep(tiny.definition(1), tmp_path, train=tiny.train)
    database = _storage.open_storage(tmp_path, None, heartbeat=1, retries=3)
    study = _storage.load_study(None, database, "sweep")
    study.enqueue_trial({}, user_attrs={"slot": 1})
    study.set_user_attr(_storage.SLOTS, 2)
    study.ask()  # takes it, and is never heard of again
    begun = time.monotonic()
    result = run_sweep(tiny.definition(2), tmp_path, train=tiny.train, heartbeat=1)
    assert [trial.state for trial in result.trials] == ["complete"] * 2
    assert time.monotonic() - begun < 20


def test_the_number_that_was_drawn_is_the_number_of_runs(tmp_path, monkeypatch):
    """Under repetitions neither resuming nor a second worker draws again or adds a run."""
    drawn = iter([3, 50, 50])
    monkeypatch.setattr(Repetitions, "draw", lambda self: next(drawn))
    sweep = tiny.definition(20, repetitions={"mean": 4.0})
    made = []

    def train(settings, folder, report):
        made.append(folder.name)
        return tiny.train(settings, folder, report)

    for _ in range(2):
        result = run_sweep(sweep, tmp_path, train=train, declared=[tiny.release()])
        assert len(result.trials) == 3
    assert made == ["00000", "00001", "00002"]


def test_pruned_runs_stop_early_and_cost_what_they_spent(tmp_path):
    from clipless.sweeps import Sweep

    def train(settings, folder, report):
        rate, done = settings["training"]["learning_rate"], 0
        try:
            for epoch in range(1, 10):
                done = epoch
                report(epoch, epoch * rate, epsilon=0.1 * epoch, last=epoch == 9)
        except optuna.TrialPruned:
            return Outcome(
                value=None, epsilon=0.1 * done, delta=1e-5, pruned=True,
                history=tiny.release(count=done),
            )  # fmt: skip
        return Outcome(value=9 * rate, epsilon=0.9, delta=1e-5, history=tiny.release(count=9))

    space = {"training.learning_rate": {"low": 1e-3, "high": 1.0}}
    sweep = Sweep.from_dict(
        {"sweep": {"trials": 9, "sampler": "random", "seed": 1}, "space": space}
    )
    result = run_sweep(sweep, tmp_path, train=train)
    states = [trial.state for trial in result.trials]
    assert set(states) == {"complete", "pruned"}
    for trial in result.trials:
        if trial.state == "pruned":
            assert trial.epsilon == pytest.approx(0.1 * len(trial.points))
            assert len(trial.points) < 9
            assert trial.history[0][1] == len(trial.points)
    assert result.best.state == "complete"


def test_no_two_workers_take_the_same_trial(storage, tmp_path):
    """The race for trials, by itself: each of them goes to one, in whatever order."""
    from clipless.sweeps import _storage

    count, takers = 24, 4
    studies = []
    for _ in range(takers):
        database = _storage.open_storage(tmp_path, url_of(storage), heartbeat=60, retries=0)
        studies.append(_storage.begin_study(tiny.definition(1), database, "race", 0, None))
    for slot in range(count):
        studies[0].enqueue_trial({}, user_attrs={"slot": slot})

    def take(study):
        found = []
        while (slot := study.ask().user_attrs.get("slot")) is not None:
            found.append(slot)
        return found

    with warnings.catch_warnings(), ThreadPoolExecutor(takers) as pool:
        warnings.simplefilter("ignore")  # heartbeats without optimize
        taken = [slot for found in pool.map(take, studies) for slot in found]
    assert sorted(taken) == list(range(count))
