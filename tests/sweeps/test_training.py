"""Sweeps of real runs: small ones, on digits."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest

from clipless.folders import RunFolder
from clipless.ledger import read_ledger
from clipless.privacy import epsilon
from clipless.sweeps import Sweep, read_sweep, run_sweep
from clipless.sweeps._planned import planned_run
from clipless.sweeps._training import TrainRun, make_ready
from tests.cli.shell import here, refused

ROOT = Path(__file__).parents[2]
RUN = {
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": 16},
    "privacy": {"epsilon": 3.0},
    "training": {"steps": 16, "batch_size": 360, "check_bounds": 0, "device": "cpu"},
}
SPACE = {
    "training.learning_rate": {"low": 1e-3, "high": 0.1},
    "loss.tau": {"low": 1.0, "high": 50.0},
}


def settings(**training):
    return {**RUN, "training": {**RUN["training"], **training}}


def test_a_run_that_is_pruned_costs_all_of_its_planned_steps(tmp_path):
    seen = []

    def report(epoch, value, *, epsilon=None, last=False):
        seen.append((epoch, value, epsilon))
        if epoch == 2:
            raise optuna.TrialPruned

    sweep = Sweep.from_dict({"space": SPACE, **RUN})
    outcome = TrainRun(sweep, progress=False)(settings(), tmp_path / "run", report)
    assert outcome.pruned
    assert (outcome.steps, outcome.value) == (8, seen[1][1])
    counts = read_ledger(tmp_path / "run" / "ledger.jsonl").counts()
    assert sum(counts.values()) == sum(count for _, count in outcome.history) == 8
    # Scores have stopped it: what its ledger counts is not the bound, the plan is.
    ((mechanism, _),) = counts.items()
    planned = RunFolder(tmp_path / "run").read_plan().plan
    assert outcome.epsilon == epsilon([(mechanism, planned.steps)], planned.delta)
    assert epsilon(tuple(counts.items()), planned.delta) < 2.5 < outcome.epsilon <= 3.0


def test_runs_that_follow_a_rule_are_swept(tmp_path):
    """They report at their end only, and one that was killed is put aside, to be counted."""
    rows = [f"{k % 7},{k % 3},{'yes' if k % 7 > 3 else 'no'}" for k in range(400)]
    (tmp_path / "rows.csv").write_text("\n".join(["a,b,target", *rows]) + "\n")
    sweep = Sweep.from_dict({
        "sweep": {"trials": 2, "sampler": "random"}, "space": {"model.steps": [5, 10]},
        "data": {"file": str(tmp_path / "rows.csv"), "target": "target"},
        "privacy": {"epsilon": 3.0},
    })  # fmt: skip
    result = run_sweep(sweep, tmp_path / "sweep", progress=False)
    assert [trial.state for trial in result.trials] == ["complete", "complete"]
    assert all(trial.epsilon <= 3.0 for trial in result.trials)
    folder = next((tmp_path / "sweep" / "trials").iterdir())
    assert not make_ready(folder)
    assert (folder.with_name(f"{folder.name}.lost-1") / "ledger.jsonl").exists()


def test_repetitions_of_real_runs_are_covered_and_nothing_else_is_shown(tmp_path, monkeypatch):
    """The runs' ledgers hold exactly what was foreseen of them before they were trained."""
    monkeypatch.setattr("clipless.sweeps.Repetitions.draw", lambda self: 2)
    config = tmp_path / "sweep.json"
    config.write_text(json.dumps({
        "space": {**SPACE, "training.batch_size": [300, 360]},
        "repetitions": {"mean": 3.0}, **settings(), "sweep": {"radius": 0.1},
    }).replace('"batch_size": 360, ', ""))  # fmt: skip
    outcome = here("sweep", "--config", config, "--out", tmp_path / "s", "--json")
    assert outcome.code == 0, outcome.err
    shown = outcome.json
    assert shown["selection"].startswith("covered")
    assert 3.0 < shown["epsilon"] < 12.0
    assert "trials" not in shown
    assert 0 <= shown["robustness"] <= shown["value"] <= 1
    result = read_sweep(tmp_path / "s")
    assert len(result.trials) == 2
    for trial in result.trials:
        ((fields, count),) = trial.history
        assert any([[fields, count]] == [list(each) for each in kind] for kind in result.declared)
        assert trial.epsilon <= 3.0


def test_small_scale_runs_have_the_noise_of_the_large_one(tmp_path):
    sweep = Sweep.from_dict({"space": SPACE, **RUN, "sweep": {"trials": 1, "scale": 0.25}})
    result = run_sweep(sweep, tmp_path, progress=False)
    (trial,) = result.trials
    ((fields, count),) = trial.history
    from clipless.runs import RunConfig, load_data

    large, steps = planned_run(RunConfig.from_dict(RUN), load_data(RunConfig.from_dict(RUN).data))
    assert count == steps
    assert fields["noise_multiplier"] / 90 == pytest.approx(large.noise_multiplier / 360)
    assert trial.epsilon > 3.0  # and it says so
    best = result.best_config()
    assert best["privacy"] == {"epsilon": 3.0}
    assert best["training"]["batch_size"] == 360


WORKER = """
import sys, json, optuna
from clipless.sweeps import Sweep, run_sweep
optuna.logging.set_verbosity(optuna.logging.ERROR)
run_sweep(Sweep.from_dict(json.loads(sys.argv[2])), sys.argv[1], heartbeat=1, progress=False)
"""


def test_a_killed_run_goes_on_where_it_was_within_its_budget(tmp_path):
    """kill -9 in the middle of training; another worker finishes the run from its checkpoint."""
    given = {
        "sweep": {"trials": 1, "sampler": "random", "pruner": "none"}, "space": SPACE,
        **settings(steps=120, checkpoint_every=20),
    }  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    victim = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(tmp_path), json.dumps(given)], env=environment
    )
    folder = tmp_path / "trials" / "00000"
    try:
        until = time.monotonic() + 90
        while len(list((folder / "checkpoints").glob("*"))) < 2:
            assert victim.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.wait()
    spent = sum(read_ledger(folder / "ledger.jsonl").counts().values())
    assert 20 <= spent < 120
    assert make_ready(folder)  # it has a ledger, so it goes on
    result = run_sweep(Sweep.from_dict(given), tmp_path, heartbeat=1, progress=False)
    (trial,) = result.trials
    assert (trial.state, trial.attempts, trial.lost_attempts) == ("complete", 2, 0)
    # Steps of which no digest was written before the end are paid for, and not repeated.
    assert trial.steps <= 120 == sum(count for _, count in trial.history)
    assert trial.steps > 120 - 64
    assert trial.epsilon <= 3.0
    assert result.selection.statement.startswith("covered: there was one run")


def test_a_folder_without_a_ledger_begins_anew(tmp_path):
    folder = tmp_path / "run"
    assert not make_ready(folder)
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert not make_ready(folder)
    assert not folder.exists()


def test_the_command(tmp_path):
    flags = ("--data", "digits", "--epsilon", 3, "--out", tmp_path / "s")
    tiny = ("--set", "model.name=mlp", "--set", "hidden=16", "--set", "training.steps=4")
    search = tmp_path / "space.toml"
    search.write_text('[space]\n"loss.tau" = {low = 1.0, high = 50.0}\n')
    common = ("--config", search, *flags, *tiny, "--set", "training.check_bounds=0", "--no-plot")
    outcome = here("sweep", *common, "--trials", 2, "--json")
    assert outcome.code == 0, outcome.err
    data = outcome.json
    assert [trial["state"] for trial in data["trials"]] == ["complete"] * 2
    assert data["selection"]["statement"].startswith("not covered: the tpe sampler")
    assert data["selection"]["composition"] > 3.0
    shown = here("sweep", "--out", tmp_path / "s", "--show", "--no-plot")
    assert shown.code == 0, shown.err
    assert "Selection: not covered" in shown.out
    assert "Composition: epsilon" in shown.out
    more = here("sweep", "--out", tmp_path / "s", "--trials", 3, "--no-plot", "--json")
    assert len(more.json["trials"]) == 3, more.err

    assert refused(here("sweep", *common, "--epsilon", 1), 2, "differs in [privacy]")
    assert refused(here("sweep", "--out", tmp_path / "none"), 2, "holds no sweep")
    assert refused(here("sweep", *flags, "--mean", 3), 2, "--repetitions")
    assert refused(here("sweep", *flags, "--preset", "x"), 2, "there is no preset")
    typo = ("--config", search, "--out", tmp_path / "t", "--epsilon", 3, "--data", "digits")
    assert refused(here("sweep", *typo, "--set", "training.stepz=3"), 2, "stepz")
    nowhere = ("--storage", f"sqlite:///{tmp_path}/no/such/folder/x.db")
    assert refused(here("sweep", *typo, *nowhere), 2, "cannot be opened")
    assert refused(here("sweep", *typo, "--storage", "nodb://x"), 2, "cannot be opened")
