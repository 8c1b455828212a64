"""kill -9 at random instants of a run, then resume.

Children are forked from a process in which everything is imported and the accountant has answered
already, so that a kill falls into the run and not into the imports.
"""

import multiprocessing
import os
import random
import signal
import time
import warnings

import pytest

from clipless.folders import CheckpointStore, read_checkpoint
from clipless.ledger import read_ledger
from clipless.privacy import epsilon
from clipless.training import Callback
from clipless.training._state import from_files
from tests.training.small import DATA, VALIDATION, counted, trainer

OPTIONS = {
    "steps": 60, "checkpoint_every": 7, "target_epsilon": None, "noise_multiplier": 2.0,
}  # fmt: skip


class Use(Callback):
    """Writes down each step whose weights were used, and what they were."""

    def __init__(self, path):
        self.path = path

    def on_step_end(self, trainer):
        total = sum(float(p.detach().double().sum()) for p in trainer.model.parameters())
        with self.path.open("a") as file:
            file.write(f"{trainer.step} {total.hex()}\n")


def child(folder, used):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # nothing is damaged, nothing diverges
        result = trainer(folder, callbacks=[Use(used)], **OPTIONS).fit(DATA, VALIDATION)
    assert result.stopped == "finished"
    os._exit(0)


def start(folder, used):
    context = multiprocessing.get_context("fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        process = context.Process(target=child, args=(folder, used))
        process.start()
    return process


def used_steps(used):
    """The steps whose weights were used, in whole lines, each with one outcome."""
    found = {}
    for line in used.read_text().splitlines(keepends=True) if used.exists() else ():
        if line.endswith("\n"):
            step, total = line.split()
            assert found.setdefault(int(step), total) == total, "a step came out in two ways"
    return found


def check_after_kill(folder, used):
    """What must hold at any instant."""
    taken = max(used_steps(used), default=0)
    assert counted(folder) >= taken
    for path in CheckpointStore(folder / "checkpoints").paths():
        step = from_files(read_checkpoint(path), name="state")["step"]
        assert step <= counted(folder)


def killed_run(tmp_path, generator, duration):
    """Kill a run until it ends; return how many times it was killed while it was running."""
    folder, used = tmp_path / "run", tmp_path / "used"
    folder.mkdir(parents=True)
    kills = 0
    while True:
        process = start(folder, used)
        # Early ones meet the beginning and the resuming, late ones the steps and the checkpoints.
        # Later ones come later, or a machine that has become slow would never see the end.
        process.join(generator.uniform(0.0, (1 + 0.05 * kills) * duration))
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
        check_after_kill(folder, used)
    check_after_kill(folder, used)
    return folder, used, kills


def kill(tmp_path, *, times):
    (tmp_path / "timed").mkdir()
    begun = time.monotonic()
    start(tmp_path / "timed", tmp_path / "used").join()
    duration = time.monotonic() - begun
    generator = random.Random(0)
    kills, runs = 0, 0
    while kills < times:
        runs += 1
        folder, used, more = killed_run(tmp_path / str(runs), generator, 0.6 * duration)
        kills += more
        # A step that was taken again came out the same, or `used_steps` would have objected.
        assert [*sorted(used_steps(used))] == [*range(1, 61)]
        # What a kill has cost are the steps that were reserved, and no others.
        assert 60 <= counted(folder) <= 60 + 64 * more
        again = trainer(folder, **OPTIONS)
        ended = again.fit(DATA, VALIDATION)
        mechanism, delta = again.engine.plan.mechanism, again.engine.plan.delta
        assert ended.epsilon == epsilon([(mechanism, counted(folder))], delta)
    return kills, runs


def test_killed_runs_resume(tmp_path):
    kill(tmp_path, times=15)


@pytest.mark.slow
def test_runs_killed_200_times_resume(tmp_path):
    kills, runs = kill(tmp_path, times=200)
    print(f"{kills} kills in {runs} runs")


def test_a_block_that_was_reserved_is_in_the_ledger_at_any_instant(tmp_path):
    """The check above can fail: a ledger without its last block counts less than was used."""
    folder, used = tmp_path / "run", tmp_path / "used"
    trainer(folder, callbacks=[Use(used)], steps=12).fit(DATA)
    path = folder / "ledger.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:8]))
    assert sum(read_ledger(path).counts().values()) < max(used_steps(used))
