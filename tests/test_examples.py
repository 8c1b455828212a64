"""The examples run as their users would run them, on less data."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tabular.py", "--rows", "800"], "accuracy 0."),
        (["by_name.py", "--epochs", "2"], "test accuracy"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_example_runs(arguments, words):
    done = subprocess.run(
        [sys.executable, EXAMPLES / arguments[0], *arguments[1:]], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    assert "differential privacy" in done.stdout
