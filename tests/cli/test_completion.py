"""A shell completes the values of options, not only their names."""

import pytest

from clipless import models
from clipless.cli import _completion as completion
from tests.cli.shell import environment


def complete(line, cwd):
    """What bash would offer after a line."""
    import subprocess
    import sys

    words = line.split(" ")
    done = subprocess.run(
        [sys.executable, "-m", "clipless"],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(
            _CLIPLESS_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1)
        ),
        timeout=60,
    )
    return done.stdout.split()


def test_values_come_through_the_shell(tmp_path):
    assert complete("clipless train --recipe mnist-e", tmp_path) == ["mnist-epsilon3"]
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    assert complete("clipless report runs/fi", tmp_path) == ["runs/first"]


def test_names_are_those_that_are_known():
    assert set(models.names()) < set(completion.model_names(""))
    assert completion.model_names("le") == ["lenet"]
    assert completion.loss_names("cross") == ["cross_entropy"]
    assert "mnist" in completion.data_names("mn")
    assert completion.devices("cp") == ["cpu"]
    assert completion.presets("ci") == ["cifar10"]


def test_keys_of_all_sections():
    assert completion.setting_keys("training.av") == ["training.average="]
    assert "privacy.epsilon=" in completion.setting_keys("")


def test_files_and_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "people.csv").write_text("a\n1\n")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "runs").mkdir()
    assert completion.data_names("peo") == ["people.csv"]
    assert completion.data_names("not") == []
    assert completion.run_folders("ru") == ["runs/"]
    assert completion.run_folders("nowhere/x") == []


@pytest.mark.parametrize("words", ["SAMPLERS", "PRUNERS", "TASKS", "REPETITIONS"])
def test_listed_words_are_those_that_are_read(words):
    from typing import get_args, get_type_hints

    from clipless.runs import DataConfig
    from clipless.sweeps import Repetitions, Sweep

    kinds = {
        "SAMPLERS": get_type_hints(Sweep)["sampler"],
        "PRUNERS": get_type_hints(Sweep)["pruner"],
        "TASKS": get_type_hints(DataConfig)["task"],
        "REPETITIONS": get_type_hints(Repetitions)["distribution"],
    }
    assert set(getattr(completion, words)) == set(get_args(kinds[words]))
