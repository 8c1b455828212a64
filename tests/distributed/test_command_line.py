"""`torchrun -m clipless train`: told no more than torchrun tells it."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch.distributed as dist

from clipless.ledger import read_ledger
from clipless.runs import RunConfig, open_run, train_run
from clipless.sweeps import Sweep, run_sweep
from tests.cli.shell import environment, here
from tests.distributed.group import outcomes, results, start, together

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
FLAGS = (
    "--data", "digits", "--model", "mlp", "--set", "hidden=8", "--batch-size", "100", "--seed", "3",
)  # fmt: skip
# So little noise, and no sampling, that weights can be compared; so cheap an accountant that it has
# an epsilon.
QUIET = (
    "--noise-multiplier", "1e-7", "--set", "privacy.accountant=rdp", "--steps", "28",
    "--set", "training.optimizer=sgd", "--learning-rate", "0.5",
    "--set", "privacy.sampling=full_batch",
)  # fmt: skip
CONFIG = RunConfig.from_dict({
    "data": {"name": "digits"}, "model": {"name": "mlp", "hidden": 8},
    "privacy": {"noise_multiplier": 2.0},
    "training": {"steps": 3, "batch_size": 100, "validate": False, "check_bounds": 0},
})  # fmt: skip


def torchrun(folder, *arguments, options=(), module="clipless"):
    return subprocess.Popen(
        [*TORCHRUN, *options, "-m", module, *map(str, arguments)], cwd=folder,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def counted(folder):
    return sum(read_ledger(folder / "ledger.jsonl").counts().values())


def test_two_processes_train_what_one_does(tmp_path, monkeypatch):
    process = torchrun(
        tmp_path, "train", *FLAGS, *QUIET, "--json", module="tests.distributed.leaving"
    )
    monkeypatch.chdir(tmp_path)
    alone = here("train", *FLAGS, *QUIET, "--json", "--out", "alone").json
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    said = json.loads(out)  # one object, from one process
    assert "Error" not in err
    assert all(f"process {rank} leaves nothing behind" in err for rank in (0, 1)), err
    assert os.listdir("runs") == ["digits-1"]
    assert said["folder"] == os.path.join("runs", "digits-1")
    for name in ("epsilon", "delta", "steps", "stopped", "averaged"):
        assert said[name] == alone[name], name
    assert alone["metrics"]["accuracy"] > 0.4
    assert said["metrics"]["accuracy"] == pytest.approx(alone["metrics"]["accuracy"], abs=0.01)
    both, one = tmp_path / "runs" / "digits-1", tmp_path / "alone"
    assert sorted(os.listdir(both)) == sorted(os.listdir(one))
    assert counted(both) == counted(one) == 28
    expected = safetensors.torch.load_file(one / "model.safetensors")
    weights = safetensors.torch.load_file(both / "model.safetensors")
    assert max(float((weights[key] - expected[key]).abs().max()) for key in expected) < 1e-5
    assert open_run(both).epsilon() == said["epsilon"]
    report = json.loads((both / "report.json").read_text())
    assert report["sound"], report["problems"]
    # Each process releases the gradients it owns; the file is about all of them.
    found, known = lines(both / "signal.jsonl"), lines(one / "signal.jsonl")
    assert len(found) == len(known) == 29
    for line, other in zip(found[1:], known[1:], strict=True):
        assert (line["step"], line["steps"]) == (other["step"], other["steps"])
        for mine, theirs in zip(line["parameters"], other["parameters"], strict=True):
            assert mine["released_energy"] == pytest.approx(theirs["released_energy"], rel=1e-3)
            assert mine["released_energy"] > 0


LONG = (
    *FLAGS, "--noise-multiplier", "2", "--steps", "200", "--no-report", "--json",
    "--set", "training.validate=false", "--set", "training.check_bounds=0",
)  # fmt: skip


def command(*arguments):
    """A command in this process, which torchrun would have started."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return here(*arguments)


def wait_for_steps(folder, alive):
    deadline = time.monotonic() + 90
    metrics = folder / "metrics.jsonl"
    while time.monotonic() < deadline and alive():
        if metrics.exists() and metrics.read_text().count('"step"') > 2:
            return
        time.sleep(0.02)
    raise AssertionError("the run did not begin")


def goes_on_alone(folder):
    """One process goes on with what two have begun, at the step where they stopped."""
    (newest,) = sorted((folder / "checkpoints").iterdir())[-1:]
    taken = int(newest.name.rpartition("-")[2])
    assert 0 < taken < 200
    assert counted(folder) == taken
    outcome = here("train", "--resume", "--out", folder, "--json", "--no-report")
    assert outcome.code == 0, outcome.err
    assert outcome.json["resumed_from"] == taken
    assert (outcome.json["steps"], outcome.json["stopped"]) == (200, "finished")
    assert counted(folder) == 200
    assert open_run(folder).epsilon() == outcome.json["epsilon"]


def test_ctrl_c_and_one_process_goes_on(tmp_path):
    """All stop after one step, with a checkpoint; process 0 says so; nothing is paid twice."""
    folder, place = tmp_path / "run", tmp_path / "group"
    place.mkdir()
    members = start(command, 2, place, "train", *LONG, "--out", folder, joined=False)
    wait_for_steps(folder, members[0].is_alive)
    for member in members:  # as torchrun does
        os.kill(member.pid, signal.SIGINT)
    (kind, first), (other, second) = results(members, place)
    assert (kind, other) == ("done", "done"), (first, second)
    assert (first.code, second.code) == (130, 130)
    assert first.err.startswith("Interrupted. What was spent")
    assert f"clipless train --resume --out {folder}" in first.err
    assert (first.out, second.out, second.err) == ("", "", "")
    goes_on_alone(folder)


@pytest.mark.slow
def test_ctrl_c_of_torchrun(tmp_path):
    folder = tmp_path / "run"
    process = torchrun(tmp_path, "train", *LONG, "--out", folder)
    wait_for_steps(folder, lambda: process.poll() is None)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert err.count("Interrupted.") == 1
    assert "Error" not in err
    assert out == ""
    goes_on_alone(folder)


@pytest.mark.slow
def test_torchrun_starts_again_after_a_kill(tmp_path):
    folder = tmp_path / "run"
    process = torchrun(tmp_path, "train", *LONG, "--out", folder, options=("--max-restarts=1",))
    wait_for_steps(folder, lambda: process.poll() is None)
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True
    )
    os.kill(int(listed.stdout.split()[1]), signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert open_run(folder).result["steps"] == 200
    assert counted(folder) == 200  # steps after the checkpoint were repeated, not paid again


def run_here(config, folder, **options):
    return train_run(config, folder, report=False, **options)


def test_all_processes_return_what_the_first_does(tmp_path):
    """The folder is that of process 0: others need not see it. Unseeded, and told nothing else."""
    first, second = together(run_elsewhere, 2, CONFIG, tmp_path)
    assert first == second
    assert [path.name for path in tmp_path.iterdir()] == ["run-0"]
    opened = open_run(tmp_path / "run-0")
    assert opened.result["weights_sha256"] == first.weights_sha256
    again = together(run_elsewhere, 4, CONFIG, tmp_path, True)
    assert all(run == again[0] for run in again)
    assert again[0].resumed_from == 3
    assert counted(tmp_path / "run-0") == 3


def run_elsewhere(config, folder, resume=False):
    return run_here(config, folder / f"run-{dist.get_rank()}", resume=resume)


def other_config(folder):
    training = replace(CONFIG.training, learning_rate=0.1 * (1 + dist.get_rank()))
    return run_here(replace(CONFIG, training=training), folder)


def other_data(folder):
    data = replace(CONFIG.data, split_seed=dist.get_rank())
    return run_here(replace(CONFIG, data=data), folder)


def no_data(folder):
    """Process 1 alone does not find its file."""
    random = np.random.default_rng(0)
    if dist.get_rank() == 0:
        np.savez(folder.parent / "0.npz", x=random.random((400, 6)), y=np.arange(400) % 2)
    data = replace(
        CONFIG.data, name=None, class_count=2, file=str(folder.parent / f"{dist.get_rank()}.npz")
    )
    return run_here(replace(CONFIG, data=data), folder)


def another_file(folder):
    """The same size and place, other contents."""
    random = np.random.default_rng(dist.get_rank())
    path = folder.parent / f"{dist.get_rank()}.npz"
    np.savez(path, x=random.random((400, 6)), y=np.arange(400) % 2)
    data = replace(CONFIG.data, name=None, class_count=2, file=str(path))
    return run_here(replace(CONFIG, data=data), folder)


def by_rule(folder):
    given = {"name": "scattering", "steps": 2}
    return run_here(RunConfig.from_dict({
        "data": {"name": "digits"}, "model": given, "privacy": {"epsilon": 1.0},
    }), folder)  # fmt: skip


def one_gpu(folder):
    training = replace(CONFIG.training, device="cuda:0")
    return run_here(replace(CONFIG, training=training), folder)


def sweep(folder):
    given = {"space": {"training.learning_rate": [0.1]}, **CONFIG.to_dict()}
    del given["training"]["learning_rate"]
    return run_sweep(Sweep.from_dict(given), folder)


@pytest.mark.parametrize(
    ("work", "kind", "words"),
    [
        (other_config, "PrivacyError", "training.learning_rate: 0.1 in process 0, 0.2 in process"),
        (other_data, "PrivacyError", "data.split_seed: 0 in process 0, 1 in process 1"),
        (another_file, "ConfigError", "have read different data"),
        (no_data, "DataNotFoundError", "there is no file"),
        (by_rule, "ConfigError", "scattering is trained in one process"),
        (one_gpu, "ConfigError", "one GPU for all processes"),
        (sweep, "ConfigError", "without torchrun"),
    ],
)
def test_what_cannot_be_trained_together_is_refused_by_all(tmp_path, work, kind, words):
    for found, text in outcomes(work, 2, tmp_path / "run", timeout=20):
        assert found == kind
        assert words in text
    assert not (tmp_path / "run").exists()


def test_no_other_command_runs_several_times(tmp_path, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    outcome = here("sweep", "--out", tmp_path, "--show", "--json")
    assert outcome.code == 2
    assert outcome.out == ""  # process 0 writes the JSON
    assert outcome.err.startswith("Error in process 1: clipless sweep is one process")


def test_a_restart_by_torchrun_goes_on_with_the_run(tmp_path, monkeypatch):
    flags = ("--data", "digits", "--model", "mlp", "--set", "hidden=8", "--steps", "2")
    flags += ("--noise-multiplier", "2", "--set", "training.check_bounds=0", "--no-report")
    folder = tmp_path / "run"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert here("train", *flags, "--out", folder, "--json").json["resumed_from"] is None
    assert here("train", *flags, "--out", folder, "--json").json["resumed_from"] == 2
    assert counted(folder) == 2
    outcome = here("train", *flags)
    assert outcome.code == 2
    assert "would begin a second run" in outcome.err
