"""`clipless train`: what it keeps, configurations from everywhere, resuming, interruptions."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from clipless.ledger import read_ledger
from tests.cli.conftest import FLAGS
from tests.cli.shell import environment, here, refused

SMALL = ("--set", "hidden=8", "--set", "training.check_bounds=0", "--no-report")


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def test_a_run_is_kept(first_run):
    folder, outcome = first_run
    kept = {path.name for path in folder.iterdir()}
    assert kept >= {
        "config.json", "environment.json", "data.json", "plan.json", "ledger.jsonl",
        "metrics.jsonl", "checkpoints", "model.safetensors", "result.json", "tightness.jsonl",
        "bounds.json", "signal.jsonl", "report.html", "report.json", "report-private.html",
        "report-private.json", "private",
    }  # fmt: skip
    said = outcome.json
    assert said["stopped"] == "finished"
    assert said["steps"] == 30
    assert said["epsilon"] <= 3.0
    assert said["metrics"]["accuracy"] > 0.6
    assert outcome.err == ""
    config = config_of(folder)
    assert config["model"] == {
        "name": "mlp", "input_shape": [1, 8, 8], "classes": 10, "input_mode": "clip",
        "constraint": "ball", "hidden": [32],
    }  # fmt: skip
    assert config["loss"] == {"name": "cross_entropy", "tau": 10.0}
    assert config["privacy"]["delta"] == 6e-5
    assert config["training"]["product_clip"] == 0.3
    assert "torch" in json.loads((folder / "environment.json").read_text())["packages"]


def test_the_report_is_sound(first_run):
    lacking = {"report": set(), "report-private": {"robustness.json", "audit.json"}}
    for name, expected in lacking.items():
        report = json.loads((first_run[0] / f"{name}.json").read_text())
        assert report["sound"] is True
        assert not report["problems"]
        assert {each["file"] for each in report["missing"]} == expected


def test_a_folder_is_not_overwritten(run):
    assert refused(here("train", *FLAGS, "--out", run), 2, "holds a run already", "--resume")
    (run / "config.json").unlink()
    assert refused(here("train", *FLAGS, "--out", run), 2, "not empty")


def test_resume_refuses_another_configuration(run):
    outcome = here("train", "--resume", "--out", run, "--steps", "40", "--set", "hidden=64")
    assert refused(outcome, 2, "training.steps was 30, is 40", "model.hidden was [32], is [64]")
    assert refused(here("train", "--resume"), 2, "--out")
    assert refused(here("train", "--resume", "--out", run / "none"), 2, "no run")


def test_resume_of_a_finished_run_spends_nothing(run):
    def kept():
        counts = read_ledger(run / "ledger.jsonl").counts()
        return sum(counts.values()), (run / "model.safetensors").read_bytes()

    before = kept()
    outcome = here("train", "--resume", "--out", run, "--json", "--no-report")
    assert outcome.json["resumed_from"] == 30
    assert before[0] == 30
    assert kept() == before


def test_ctrl_c(tmp_path):
    """It ends between two steps, with a checkpoint, and says how to go on. (That a run which goes
    on ends at the same weights is tested in tests/runs.)
    """
    flags = ("--data", "digits", "--noise-multiplier", "2", "--batch-size", "100", "--seed", "3")
    flags += ("--steps", "3000", "--set", "training.validate=false", *SMALL)
    folder = tmp_path / "interrupted"
    process = subprocess.Popen(
        [sys.executable, "-m", "clipless", "train", *flags, "--out", folder],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment(),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            metrics = folder / "metrics.jsonl"
            if metrics.exists() and metrics.read_text().count('"step"') > 3:
                break
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Interrupted" in err
    assert f"clipless train --resume --out {folder}" in err
    assert "Traceback" not in err
    assert out == ""
    assert refused(here("certify", folder), 5, "has not ended", "--resume")
    steps = int(sorted((folder / "checkpoints").iterdir())[-1].name.rpartition("-")[2])
    assert 0 < steps < 3000


def test_configuration_files_and_flags(tmp_path):
    """TOML and YAML say the same; flags override them; another model drops its settings."""
    (tmp_path / "run.toml").write_text(
        '[data]\nname = "digits"\n[model]\nname = "lenet"\nchannels = [2, 4]\nhidden = 4\n'
        "kernel_sizes = [3, 3]\n[privacy]\nnoise_multiplier = 4.0\n[training]\nepochs = 3\n"
        'validate = false\ncheck_bounds = 0\naverage = "none"\naugment = ["flip", "crop:1"]\n'
        "views = 2\n"
    )
    (tmp_path / "run.yaml").write_text(
        "data: {name: digits}\n"
        "model: {name: lenet, channels: [2, 4], kernel_sizes: [3, 3], hidden: 4}\n"
        "privacy: {noise_multiplier: 4.0}\n"
        "training: {epochs: 3, validate: false, check_bounds: 0, average: null, views: 2,\n"
        "           augment: [flip, 'crop:1']}\n"
    )
    end = ("--steps", "2", "--set", "data.limit=64", "--set", "loss.tau=3", "--no-report", "--json")
    configs = []
    for name in ("run.toml", "run.yaml"):
        out = tmp_path / name.replace(".", "-")
        outcome = here("train", "--config", tmp_path / name, "--out", out, *end)
        assert outcome.code == 0, outcome.err
        assert outcome.json["averaged"] is False
        configs.append(config_of(out))
    assert configs[0] == configs[1]
    assert configs[0]["training"]["steps"] == 2
    assert configs[0]["training"]["epochs"] is None
    assert configs[0]["loss"]["tau"] == 3.0
    assert configs[0]["model"]["channels"] == [2, 4]
    outcome = here(
        "train",
        "--config",
        tmp_path / "run.toml",
        "--model",
        "mlp",
        "--out",
        tmp_path / "mlp",
        *end,
    )
    assert outcome.code == 0, outcome.err
    assert "channels" not in config_of(tmp_path / "mlp")["model"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--epsilon", "3"), ("data.name", "data.file")),
        (("--data", "digits"), ("privacy.epsilon",)),
        (("--data", "digits", "--epsilon", "-1"), ("privacy.epsilon", "above 0")),
        (("--data", "digits", "--epsilon", "3", "--epochs", "1", "--steps", "2"), ("not both",)),
        (("--data", "digits", "--epsilon", "3", "--set", "hidden"), ("KEY=VALUE",)),
        (("--data", "digits", "--epsilon", "3", "--set", "trainig.pad=1"), ("sections",)),
        (("--data", "digits", "--epsilon", "3", "--set", "training.bach=1"), ("training", "bach")),
        (("--data", "digits", "--epsilon", "3", "--set", "training.pad=3"), ("true or false",)),
        (("--data", "people.csv", "--epsilon", "3"), ("--target",)),
        (("--recipe", "mnist-epsilon4"), ("mnist-epsilon3",)),
        (("--config", "nowhere.toml"), ("nowhere.toml", "cannot be read")),
    ],
)
def test_bad_configurations_are_refused_before_torch_is_loaded(flags, words, tmp_path):
    outcome = here("train", *flags, "--out", tmp_path / "run")
    assert refused(outcome, 2, *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--data", "mnits"), 2, ("mnist", "digits")),
        (("--data", "digits", "--model", "transformer"), 2, ("transformer", "lenet", "tabular")),
        (("--data", "digits", "--set", "width=3"), 2, ("width", "hidden")),
        (("--data", "digits", "--loss", "mse"), 2, ("mse", "cross_entropy")),
        (("--data", "digits", "--set", "loss.tao=3"), 2, ("tao", "tau")),
        (("--data", "digits", "--loss", "hinge_kr"), 2, ("needs alpha",)),
        (("--data", "digits", "--loss", "binary_cross_entropy"), 2, ("two classes",)),
        (("--data", "digits", "--set", "classes=3"), 2, ("model.classes is 3", "10")),
        (("--data", "digits", "--batch-size", "5000"), 2, ("5000", "1434")),
        (("--data", "digits", "--set", "training.augment=spin"), 2, ("spin", "flip")),
        (("--data", "digits", "--set", "data.colour=yuv"), 2, ("RGB",)),
        (("--data", "digits", "--set", "product_clip=0.3"), 2, ("product_clip",)),
        (("--data", "missing.npz"), 3, ("missing.npz",)),
        (("--data", "mnist", "--set", "data.download=false"), 3, ("train-images",)),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_no_folder(flags, code, words, tmp_path):
    folder = tmp_path / "run"
    root = ("--root", tmp_path / "empty")
    outcome = here("train", *flags, "--epsilon", "3", "--steps", "2", *root, "--out", folder)
    assert refused(outcome, code, *words)
    assert not folder.exists()


def test_the_budget_ends_training(tmp_path):
    """With both a noise and a budget, training stops in time, the run is whole, the code is 4."""
    flags = ("--data", "digits", "--noise-multiplier", "1", "--epsilon", "2", "--batch-size", "200")
    out = tmp_path / "run"
    outcome = here("train", *flags, "--steps", "900", *SMALL, "--out", out, "--json")
    assert outcome.code == 4, outcome.err
    assert "budget ran out" in outcome.err
    said = outcome.json
    assert said["stopped"] == "budget"
    assert 0 < said["steps"] < 900
    assert said["epsilon"] <= 2.0
    assert here("bounds", out).code == 0
    too_little = ("--data", "digits", "--noise-multiplier", "0.1", "--epsilon", "0.01")
    outcome = here("train", *too_little, *SMALL, "--steps", "2", "--out", tmp_path / "none")
    assert outcome.code == 4


def test_the_default_folder_is_new_every_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ("--data", "digits", "--noise-multiplier", "2", "--steps", "1", *SMALL, "--json")
    folders = [here("train", *flags).json["folder"] for _ in range(2)]
    assert folders == [os.path.join("runs", "digits-1"), os.path.join("runs", "digits-2")]
