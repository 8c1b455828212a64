"""The example with a frozen backbone runs, and says what it reached."""

import re
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "frozen_backbone.py"


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--seed", "0", "--epsilon", "2", *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    text = capsys.readouterr().out
    assert "public digits" in text
    found = re.search(r"Test accuracy ([\d.]+)% at epsilon ([\d.]+), delta 0.0001", text)
    pixels = re.search(r"The same head on raw pixels: ([\d.]+)%", text)
    return float(found.group(1)), float(pixels.group(1)), float(found.group(2))


def test_runs_quickly(monkeypatch, capsys):
    accuracy, pixels, epsilon = run(monkeypatch, capsys, "--quick")
    assert epsilon <= 2.0
    assert accuracy >= pixels + 25.0


@pytest.mark.slow
def test_runs_in_full(monkeypatch, capsys):
    accuracy, pixels, epsilon = run(monkeypatch, capsys)
    assert epsilon <= 2.0
    assert accuracy >= 85.0
    assert pixels <= 50.0
