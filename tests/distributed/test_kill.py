"""kill -9 of one process at random instants: the others stop, and the run resumes."""

import os
import random
import signal
import time

import pytest

from clipless.ledger import read_ledger
from tests.distributed.group import start, wait_until_connected
from tests.training.small import DATA, VALIDATION, counted, trainer
from tests.training.test_kill import Use, check_after_kill, used_steps

STEPS = 40
OPTIONS = {"steps": STEPS, "checkpoint_every": 7, "noise_multiplier": 2.0}


def train(folder, used):
    """A process of a run; `used` gets every step whose weights were seen."""
    result = trainer(folder, callbacks=[Use(used)], **OPTIONS).fit(DATA, VALIDATION)
    assert result.stopped == "finished"


def train_paying(folder, used):
    """The same for processes whose number changes."""
    result = trainer(folder, callbacks=[Use(used)], **OPTIONS).fit(DATA)
    assert result.stopped == "finished"


def killed_once(work, size, tmp_path, folder, used, generator, duration, kills):
    """Start a group and kill one process; return whether it was killed, and not too late."""
    place = tmp_path / f"group-{kills}-{time.monotonic_ns()}"
    place.mkdir()
    members = start(work, size, place, folder, used, timeout=30)
    wait_until_connected(members, place)
    time.sleep(generator.uniform(0.0, (1 + 0.1 * kills) * duration))
    victim = generator.choice(members)
    alive = victim.exitcode is None
    if alive:
        os.kill(victim.pid, signal.SIGKILL)
    for member in members:
        member.join(60)  # those that are left stop by themselves
        assert member.exitcode is not None
    return alive


def kill(tmp_path, *, times, sizes, work, seed):
    generator = random.Random(seed)
    begun = time.monotonic()
    (tmp_path / "timed").mkdir()
    place = tmp_path / "timed group"
    place.mkdir()
    for member in start(work, sizes[0], place, tmp_path / "timed", tmp_path / "timed used"):
        member.join()
    duration = 0.4 * (time.monotonic() - begun)
    kills, runs = 0, 0
    while kills < times:
        runs += 1
        folder, used = tmp_path / f"run-{runs}", tmp_path / f"used-{runs}"
        folder.mkdir()
        of_this_run = 0
        while True:
            size = generator.choice(sizes)
            killed = killed_once(
                work, size, tmp_path, folder, used, generator, duration, of_this_run
            )
            yield folder, used
            if not killed:
                break
            kills += 1
            of_this_run += 1
    print(f"{kills} kills in {runs} runs")


def killed_and_resumed(tmp_path, times):
    for folder, used in kill(tmp_path, times=times, sizes=(2,), work=train, seed=0):
        check_after_kill(folder, used)
        if max(used_steps(used), default=0) == STEPS:
            # Steps that were taken again came out the same; what was reserved is spent.
            assert [*sorted(used_steps(used))] == [*range(1, STEPS + 1)]
            assert counted(folder) >= STEPS
    spent = counted(folder)
    again = trainer(folder, **OPTIONS)
    again.fit(DATA, VALIDATION)
    assert counted(folder) == spent
    return again


def killed_and_resumed_by_others(tmp_path, times):
    """With other numbers of processes, steps are paid anew: every outcome that was seen counts.

    A step that comes out bit for bit as it did before is the same outcome, and is free.
    """
    for folder, used in kill(tmp_path, times=times, sizes=(2, 1, 4), work=train_paying, seed=1):
        seen = set(used.read_text().splitlines(keepends=True)) if used.exists() else set()
        taken = len({line for line in seen if line.endswith("\n")})
        assert counted(folder) >= taken
    last = {int(line.split()[0]) for line in seen if line.endswith("\n")}
    assert last == set(range(1, STEPS + 1))


def test_killed_processes_resume(tmp_path):
    killed_and_resumed(tmp_path, 2)


def test_killed_processes_resume_in_other_numbers(tmp_path):
    killed_and_resumed_by_others(tmp_path, 1)


@pytest.mark.slow
def test_processes_killed_50_times_resume(tmp_path):
    killed_and_resumed(tmp_path, 50)


@pytest.mark.slow
def test_processes_killed_50_times_resume_in_other_numbers(tmp_path):
    killed_and_resumed_by_others(tmp_path, 50)


def test_the_check_can_fail(tmp_path):
    """A ledger without its last block counts less than was used."""
    folder, used = tmp_path / "run", tmp_path / "used"
    place = tmp_path / "group"
    place.mkdir()
    for member in start(train, 2, place, folder, used):
        member.join()
    path = folder / "ledger.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:8]))
    assert sum(read_ledger(path).counts().values()) < max(used_steps(used))
