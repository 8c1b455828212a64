"""The examples of other people's loops run, on less data, in this process: imports take longest."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    "arguments",
    [
        ["lightning_module.py", "--epochs", "2"],
        ["hugging_face_trainer.py", "--epochs", "1"],
        ["lora_adapter.py", "--steps", "2"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_example_runs(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(EXAMPLES / arguments[0]), run_name="__main__")
    printed = capsys.readouterr().out
    assert "accuracy on others: " in printed
    assert "differential privacy" in printed
