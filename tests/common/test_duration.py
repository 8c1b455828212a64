"""A note on the duration of long work: once, in time, and only if it is long."""

import pytest

from clipless.common import DurationNote
from clipless.common import _duration as module


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def work(note, clock, *, parts, seconds):
    for part in range(1, parts + 1):
        clock[0] += seconds
        note.update(part)


def test_long_work_is_announced_once_and_rightly(clock, capsys):
    note = DurationNote("Training", total=450, hint=" Use a GPU.")
    work(note, clock, parts=20, seconds=6.4)
    # Said after the second step: 448 steps of 6.4 seconds are left.
    assert capsys.readouterr().err == "Training will take about 48 more minutes here. Use a GPU.\n"


def test_short_work_says_nothing(clock, capsys):
    work(DurationNote("Training", total=100), clock, parts=100, seconds=0.5)
    assert capsys.readouterr().err == ""


def test_the_first_part_is_not_measured(clock, capsys):
    note = DurationNote("Training", total=100)
    clock[0] += 300.0  # compiles
    work(note, clock, parts=99, seconds=0.5)
    assert capsys.readouterr().err == ""


def test_training_in_a_pipe_says_it_and_a_bar_or_silence_does_not():
    from clipless.training._progress import ProgressBar

    assert ProgressBar(show=None, steps=5, done=0)._note is not None  # tests have no terminal
    assert ProgressBar(show=False, steps=5, done=0)._note is None
