"""The ledger never under-counts: not after kill -9, not after damage, not with two writers."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from clipless.accounting import FullBatch, Mechanism, PoissonSampling, Relation
from clipless.common import _lock, take_lock
from clipless.errors import LedgerError
from clipless.ledger import EntryKind, Ledger, LedgerInUseError, read_closed_ledger, read_ledger
from clipless.ledger._file import LedgerFile

N = 1000
KIND = {"dataset_size": N, "relation": Relation.ZERO_OUT}


def step(sigma=1.0, relation=Relation.ZERO_OUT, size=N):
    sampling = PoissonSampling(dataset_size=size, rate=0.1)
    return Mechanism(noise_multiplier=sigma, sampling=sampling, relation=relation)


STEP = step()
STATISTIC = Mechanism(noise_multiplier=20.0, sampling=FullBatch(dataset_size=N))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.ledger"


def total(history):
    return sum(count for _, count in history)


def spend(ledger, count, mechanism=STEP):
    for _ in range(count):
        ledger.spend(mechanism)


def in_child(action):
    """Run `action` in a forked child and return what it returned, or the error it raised."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = str(action())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    answer = os.read(reader, 65536).decode()
    os.close(reader)
    return answer


# --- Counting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 3, 256])
def test_a_clean_end_counts_exactly(path, block_size):
    with Ledger(path, **KIND, block_size=block_size) as ledger:
        spend(ledger, 100)
        ledger.record(STATISTIC, label="feature scale", count=3)
        assert ledger.history() == ((STEP, 100), (STATISTIC, 3))
        assert ledger.releases == 103
    assert read_ledger(path).counts() == {STEP: 100, STATISTIC: 3}
    with Ledger(path) as again:
        assert again.history() == ((STEP, 100), (STATISTIC, 3))
        spend(again, 11)
    assert read_ledger(path).counts() == {STEP: 111, STATISTIC: 3}


def test_the_file_is_ahead_of_the_process(path):
    ledger = Ledger(path, **KIND)
    for used in range(1, 300):
        ledger.spend(STEP)
        assert ledger.count(STEP) == used
        on_disk = read_ledger(path).counts()[STEP]
        assert used <= on_disk < 2 * used or used == on_disk
    ledger.close()


def test_lines_are_few_and_readable(path):
    with Ledger(path, **KIND, block_size=64) as ledger:
        spend(ledger, 2000)
        assert [entry.count for entry in ledger.entries()[:8]] == [0, 1, 2, 4, 8, 16, 32, 64]
    lines = path.read_text().splitlines()
    assert len(lines) < 45
    header, opened, first = (json.loads(line) for line in lines[:3])
    assert header["format"] == "clipless-ledger"
    assert (header["version"], header["dataset_size"]) == (1, N)
    assert header["relation"] == "zero_out"
    assert opened["process"] == os.getpid()
    assert first["kind"] == "reserve"
    assert first["label"] == "training step"
    assert Mechanism.from_dict(first["mechanism"]) == STEP
    assert json.loads(lines[-1])["kind"] == "refund"


def test_noise_that_changes_with_every_step(path):
    with Ledger(path, **KIND) as ledger:
        for number in range(30):
            ledger.spend(step(1.0 + number))
        assert ledger.history() == tuple((step(1.0 + number), 1) for number in range(30))
        kinds = [entry.kind for entry in ledger.entries()]
        assert kinds == [EntryKind.OPEN] + [EntryKind.RESERVE] * 30
        spend(ledger, 5, step(0.5))
        spend(ledger, 5, step(0.6))
        assert ledger.count(step(0.5)) == 5
    assert read_ledger(path).counts()[step(0.5)] == 5


def test_limits_and_explicit_reservations(path):
    with Ledger(path, **KIND) as ledger:
        for left in range(10, 0, -1):
            ledger.spend(STEP, limit=left)
        assert read_ledger(path).counts() == {STEP: 10}
        ledger.reserve(STEP, count=100)
        assert ledger.releases == 10
        spend(ledger, 7)
        assert ledger.releases == 17
        assert read_ledger(path).counts() == {STEP: 110}
        ledger.settle()
        assert ledger.releases == 17
        assert read_ledger(path).counts() == {STEP: 17}
        ledger.spend(STEP, label="another phase")
        assert [entry.label for entry in ledger.entries()][-1] == "another phase"


def test_in_memory_counts_the_same(tmp_path):
    with Ledger.in_memory(**KIND) as memory, Ledger(tmp_path / "x", **KIND) as file:
        for ledger in (memory, file):
            spend(ledger, 20)
            ledger.record(STATISTIC, label="count")
        assert memory.history() == file.history()
        assert memory.path is None
        assert file.path == str(tmp_path / "x")
    assert list(tmp_path.iterdir()) == [tmp_path / "x"]


def test_the_end_of_the_program_is_a_clean_end(path):
    code = (
        "from clipless.ledger._ledger import Ledger\n"
        "from clipless.accounting._mechanism import *\n"
        f"ledger = Ledger({str(path)!r}, dataset_size={N}, relation=Relation.ZERO_OUT)\n"
        f"sampling = PoissonSampling(dataset_size={N}, rate=0.1)\n"
        "for _ in range(100): ledger.spend(Mechanism(noise_multiplier=1.0, sampling=sampling))\n"
        "raise SystemExit(3)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 3
    assert read_ledger(path).counts() == {STEP: 100}


def test_threads_do_not_lose_steps(path):
    ledger = Ledger(path, **KIND)
    threads = [threading.Thread(target=spend, args=(ledger, 500)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.releases == 2000
    ledger.close()
    assert read_ledger(path).counts() == {STEP: 2000}


# --- kill -9 ------------------------------------------------------------------------------------


def train_until_killed(path, used, block_size, seed):
    """Spend, and only then use: one byte in `used` for every step whose result was used."""
    choose = random.Random(seed)
    ledger = Ledger(path, **KIND, block_size=block_size)
    results = os.open(used, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while True:
        mechanism = STEP if choose.random() < 0.97 else step(2.0)
        if choose.random() < 0.02:
            ledger.record(STATISTIC, label="statistic")
        else:
            ledger.spend(mechanism)
        os.write(results, b"+")
        if choose.random() < 0.01:
            ledger.settle()


@pytest.mark.parametrize("block_size", [1, 8, 64])
def test_kill_nine_never_undercounts(path, tmp_path, block_size):
    choose = random.Random(block_size)
    used_file = tmp_path / "used"
    used_file.touch()
    used = overcounted = 0
    for kill in range(100):  # on a busy machine a process comes to little before it is killed
        if kill >= 14 and used > 100:
            break
        child = os.fork()
        if child == 0:
            try:
                train_until_killed(path, used_file, block_size, seed=kill)
            finally:
                os._exit(1)
        time.sleep(choose.uniform(0.0, 0.12))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the child must not end by itself"
        used = used_file.stat().st_size
        if not path.exists() or path.stat().st_size == 0:
            assert used == 0
            continue
        before = overcounted
        with Ledger(path, **KIND) as ledger:
            overcounted = ledger.releases - used
        # Each kill may add one block, of which at least nothing and at most all was used.
        assert before <= overcounted <= before + block_size
    assert used > 100


@pytest.mark.parametrize("cut", range(1, 400, 7))
def test_every_torn_last_line_is_dropped_without_undercounting(path, tmp_path, cut):
    """Whatever part of the last write survives, what was used before it counts."""
    with Ledger(path, **KIND) as ledger:
        spend(ledger, 5)
    data = path.read_bytes()
    last = data[:-1].rindex(b"\n") + 1
    if cut >= len(data) - last:
        return
    path.write_bytes(data[: last + cut])
    assert b"refund" in data[last:]
    # The refund did not happen: the whole reservation of 4 counts, 7 in all.
    assert total(read_ledger(path).counts().items()) == 7
    with Ledger(path) as again:
        assert again.releases == 7
        spend(again, 1)
    assert read_ledger(path).counts() == {STEP: 8}


def test_a_torn_reservation_was_never_used(path):
    ledger = Ledger(path, **KIND)
    spend(ledger, 3)
    before = path.stat().st_size
    ledger.spend(STEP)
    ledger._file.close()
    with open(path, "r+b") as file:
        file.truncate(before + 50)
    with Ledger(path) as again:
        assert again.releases == 3


def test_a_last_line_that_lacks_only_its_end_counts(path):
    with Ledger(path, **KIND) as ledger:
        spend(ledger, 3)
        ledger.record(STATISTIC, label="last")
        ledger.settle()
        ledger.record(STATISTIC, label="last")
    path.write_bytes(path.read_bytes()[:-1])
    assert total(read_ledger(path).counts().items()) == 5
    with Ledger(path) as again:
        assert again.releases == 5
        again.spend(STEP)
    assert total(read_ledger(path).counts().items()) == 6


def test_a_torn_header_starts_anew_but_a_strange_file_is_left_alone(path):
    with Ledger(path, **KIND):
        pass
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(LedgerError, match="give it dataset_size"):
        Ledger(path)
    with Ledger(path, **KIND) as ledger:
        assert ledger.releases == 0
    for content in (b"name,value\n1,2", b"name,value", b"\xff\xfe\n", b"{}\n"):
        path.write_bytes(content)
        with pytest.raises(LedgerError, match=r"not a ledger|damaged"):
            Ledger(path, **KIND)
        assert path.read_bytes() == content


# --- Damage and edits ---------------------------------------------------------------------------


def test_every_edit_of_a_line_is_noticed(path):
    with Ledger(path, **KIND) as ledger:
        spend(ledger, 5)
        ledger.record(STATISTIC, label="scale")
    original = path.read_text().splitlines(keepends=True)
    choose = random.Random(0)
    for number, line in enumerate(original, start=1):
        for _ in range(5):
            position = choose.randrange(len(line) - 1)
            changed = chr((ord(line[position]) - 31) % 95 + 32)
            damaged = [*original]
            damaged[number - 1] = line[:position] + changed + line[position + 1 :]
            path.write_text("".join(damaged))
            with pytest.raises(LedgerError, match=rf"run\.ledger, line {number}: "):
                Ledger(path)
            assert path.read_text() == "".join(damaged)
    for number in range(1, len(original) - 1):
        path.write_text("".join(original[:number] + original[number + 1 :]))
        with pytest.raises(LedgerError, match=f"line {number + 1}"):
            read_ledger(path)


def test_a_smaller_count_is_noticed(path):
    with Ledger(path, **KIND) as ledger:
        ledger.record(STATISTIC, label="scale", count=50)
    path.write_text(path.read_text().replace('"count": 50', '"count": 10'))
    with pytest.raises(LedgerError, match="damaged or edited"):
        Ledger(path)


def rewrite(path, **changes):
    """Edit the last line and recompute its digest, as a newer version or a forger might."""
    from clipless.ledger._format import decode
    from clipless.ledger._writing import encode

    *lines, last = path.read_text().splitlines()
    previous = ""
    for line in lines:
        _, previous = decode(line, previous)
    fields, _ = decode(last, previous)
    path.write_text("\n".join([*lines, encode(fields | changes, previous)[0], ""]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": -3}, "count is -3"),
        ({"count": 1.5}, "count is 1.5"),
        ({"kind": "gift"}, "gift"),
        ({"kind": "refund", "reservation": 2}, "exceeds what is reserved"),
        ({"mechanism": step(size=7).to_dict()}, "data set of 1000"),
        ({"mechanism": step(relation=Relation.REPLACE_ONE).to_dict()}, "kept under"),
        ({"mechanism": STEP.to_dict() | {"sampling": {"kind": "shuffled"}}}, "newer version"),
        ({"discount": 2}, "discount"),
        ({"line": 9}, "line 9"),
    ],
)
def test_entries_that_make_no_sense_are_refused(path, changes, message):
    with Ledger(path, **KIND) as ledger:
        ledger.record(STATISTIC, label="scale")
    rewrite(path, **changes)
    with pytest.raises(LedgerError, match=message):
        Ledger(path)


def test_a_refund_is_never_more_than_its_reservation(path):
    with Ledger(path, **KIND) as ledger:
        ledger.reserve(STEP, count=5)
        ledger.spend(STEP)
    rewrite(path, count=6)
    with pytest.raises(LedgerError, match="exceeds"):
        Ledger(path)


def test_a_newer_format_is_refused(path):
    with Ledger(path, **KIND):
        pass
    path.write_text(path.read_text().splitlines()[0] + "\n")
    rewrite(path, version=3)
    with pytest.raises(LedgerError, match=r"line 1: version 3 .* newer"):
        Ledger(path)


def test_a_ledger_stays_with_its_data_set_and_relation(path):
    with Ledger(path, **KIND) as ledger:
        for wrong in (step(size=N + 1), step(relation=Relation.REPLACE_ONE)):
            for attempt in (ledger.spend, ledger.reserve, ledger.record):
                options = {"label": "x"} if attempt != ledger.reserve else {"count": 1}
                with pytest.raises(LedgerError):
                    attempt(wrong, **options)
        with pytest.raises(ValueError, match="count"):
            ledger.record(STATISTIC, label="x", count=0)
        assert ledger.releases == 0
    with pytest.raises(LedgerError, match="kept for 1000"):
        Ledger(path, dataset_size=N + 1)
    with pytest.raises(LedgerError, match="zero_out"):
        Ledger(path, relation=Relation.REPLACE_ONE)
    with pytest.raises(ValueError, match="block_size"):
        Ledger(path, block_size=0)


# --- One writer ---------------------------------------------------------------------------------


def test_a_second_writer_is_refused_and_told_who_writes(path):
    with Ledger(path, **KIND) as ledger:
        with pytest.raises(LedgerError, match=rf"process {os.getpid()} \(this one\)"):
            Ledger(path)
        answer = in_child(lambda: Ledger(path))
        assert answer.startswith("LedgerInUseError")
        assert f"in use by process {os.getpid()};" in answer
        spend(ledger, 3)
    assert in_child(lambda: Ledger(path).releases) == "3"


def test_a_ledger_that_somebody_writes_is_not_read_as_closed(path):
    with pytest.raises(LedgerError, match="cannot read"):
        read_closed_ledger(path)
    with Ledger(path, **KIND) as ledger:
        spend(ledger, 3)
        with pytest.raises(LedgerInUseError, match="still going on"):
            read_closed_ledger(path)
    before = path.read_bytes()
    assert read_closed_ledger(path).counts() == {STEP: 3}
    assert path.read_bytes() == before
    assert Ledger(path).releases == 3, "the reader must let go"


def test_two_readers_wait_for_each_other(path, monkeypatch):
    with Ledger(path, **KIND) as ledger:
        spend(ledger, 3)
    held = take_lock(path)
    monkeypatch.setattr(time, "sleep", lambda _: os.close(held))
    assert read_closed_ledger(path).counts() == {STEP: 3}


def test_a_ledger_is_locked_beside_its_file_where_locks_keep_readers_out(path, monkeypatch):
    monkeypatch.setattr(_lock, "_WINDOWS", True)
    with Ledger(path, **KIND) as ledger:
        spend(ledger, 3)
        with pytest.raises(LedgerInUseError, match="one writer"):
            Ledger(path)
        assert total(read_ledger(path).counts().items()) >= 3
        assert "in use by process" in in_child(lambda: Ledger(path))
    assert path.with_name(f"{path.name}.lock").read_bytes() == b""
    assert in_child(lambda: Ledger(path).releases) == "3"


def test_a_forked_child_cannot_write(path):
    ledger = Ledger(path, **KIND)
    ledger.reserve(STEP, count=50)
    for attempt in (
        lambda: ledger.spend(STEP),
        lambda: ledger.spend(step(3.0)),
        lambda: ledger.record(STATISTIC, label="x"),
        lambda: ledger.settle(),
    ):
        assert "forked child" in in_child(attempt)
    size = path.stat().st_size
    assert in_child(ledger.close) == "None"
    assert path.stat().st_size == size
    spend(ledger, 2)
    ledger.close()
    assert read_ledger(path).counts() == {STEP: 2}


def test_a_child_does_not_keep_the_lock_of_a_dead_parent(path):
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        ledger = Ledger(path, **KIND)
        worker = os.fork()
        if worker == 0:
            time.sleep(30)
            os._exit(0)
        ledger.spend(STEP)
        os.write(writer, str(worker).encode())
        time.sleep(30)
        os._exit(0)
    worker = int(os.read(reader, 20))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    try:
        with Ledger(path) as ledger:
            assert ledger.releases == 1
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_ledger_cannot_be_copied_or_used_after_its_end(path):
    ledger = Ledger(path, **KIND)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(LedgerError, match="copied"):
            duplicate(ledger)
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        ledger.spend(STEP)
    assert ledger.history() == ()


def test_a_forgotten_ledger_lets_go(path):
    ledger = Ledger(path, **KIND)
    spend(ledger, 5)
    del ledger
    gc.collect()
    with Ledger(path) as again:
        assert again.releases == 5


def test_a_ledger_does_not_follow_the_working_directory(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with Ledger(path.name, **KIND) as ledger:
        monkeypatch.chdir("/")
        spend(ledger, 2)
    assert read_ledger(path).counts() == {STEP: 2}


def test_a_file_that_moved_or_changed_is_noticed(path, tmp_path):
    ledger = Ledger(path, **KIND)
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(LedgerError, match="moved or deleted"):
        ledger.spend(STEP)
    (tmp_path / "elsewhere").rename(path)
    ledger.spend(STEP)
    with open(path, "a") as file:
        file.write("hello\n")
    with pytest.raises(LedgerError, match="changed while in use"):
        ledger.record(STATISTIC, label="x")
    ledger._file.close()


def test_unusable_places_are_reported(tmp_path):
    with pytest.raises(LedgerError, match="cannot open"):
        Ledger(tmp_path / "missing" / "x", **KIND)
    with pytest.raises(LedgerError, match="cannot open"):
        Ledger(tmp_path, **KIND)
    with pytest.raises(LedgerError, match="cannot read"):
        read_ledger(tmp_path / "missing")


@pytest.mark.parametrize("failure", [OSError("no space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("when", ["write", "part", "fsync", "after"])
def test_an_interrupted_write_is_taken_back(path, monkeypatch, failure, when):
    """A failed reservation is not used; the next one replaces what it left in the file."""
    ledger = Ledger(path, **KIND)
    spend(ledger, 3)
    write, fsync, append = os.write, os.fsync, LedgerFile.append

    def failing_write(descriptor, data):
        if when == "part":
            write(descriptor, data[:20])
        raise failure

    def failing_fsync(descriptor):
        fsync(descriptor)
        raise failure

    def failing_append(self, line, **options):
        append(self, line, **options)
        raise failure

    if when == "after":
        monkeypatch.setattr(LedgerFile, "append", failing_append)
    elif when == "fsync":
        monkeypatch.setattr(os, "fsync", failing_fsync)
    else:
        monkeypatch.setattr(os, "write", failing_write)
    with pytest.raises((LedgerError, OSError, KeyboardInterrupt)):
        ledger.spend(STEP)
    monkeypatch.undo()
    assert ledger.releases == 3
    spend(ledger, 4)
    ledger.close()
    assert read_ledger(path).counts() == {STEP: 7}


def test_a_refund_that_fails_is_lost_and_its_steps_are_not_used(path, monkeypatch):
    ledger = Ledger(path, **KIND)
    ledger.reserve(STEP, count=50)
    spend(ledger, 10)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("input/output error")))
        with pytest.raises(LedgerError, match="input/output"):
            ledger.settle()
    spend(ledger, 3)
    assert ledger.releases == 53
    ledger.close()
    assert read_ledger(path).counts() == {STEP: 53}


# --- Checkpoints --------------------------------------------------------------------------------


def test_a_snapshot_of_the_same_run_changes_nothing(path):
    with Ledger(path, **KIND) as ledger:
        spend(ledger, 20)
        snapshot = ledger.snapshot()
        spend(ledger, 10)
        ledger.absorb(snapshot)
        assert ledger.releases == 30
    with Ledger(path) as again:
        again.absorb(snapshot)
        assert again.releases == 30


def test_a_snapshot_brings_back_what_a_new_ledger_does_not_know(tmp_path):
    with Ledger(tmp_path / "old", **KIND) as old:
        spend(old, 20)
        old.record(STATISTIC, label="scale")
        snapshot = old.snapshot()
    with Ledger(tmp_path / "new", **KIND) as new:
        new.spend(STEP)
        new.absorb(snapshot)
        new.absorb(snapshot)
        assert dict(new.history()) == {STEP: 21, STATISTIC: 1}
    with Ledger(tmp_path / "new") as again:
        again.absorb(snapshot)
        assert dict(again.history()) == {STEP: 21, STATISTIC: 1}


def test_a_file_set_back_by_hand_gets_the_rest_from_the_checkpoint(path):
    with Ledger(path, **KIND) as ledger:
        spend(ledger, 20)
        ledger.settle()
        backup = path.read_bytes()
        spend(ledger, 30)
        snapshot = ledger.snapshot()
    path.write_bytes(backup)
    with Ledger(path) as again:
        spend(again, 5)
        again.absorb(snapshot)
        assert dict(again.history()) == {STEP: 55}


def test_a_reservation_that_parted_ways_is_counted_twice_rather_than_lost(path):
    with Ledger(path, **KIND) as ledger:
        ledger.reserve(STEP, count=100)
        backup = path.read_bytes()
        spend(ledger, 60)
        snapshot = ledger.snapshot()
    path.write_bytes(backup)
    with Ledger(path) as again:
        again.absorb(snapshot)
        assert again.releases == 160


def test_a_crash_while_absorbing_counts_twice_rather_than_not_at_all(path, monkeypatch):
    with Ledger.in_memory(**KIND) as old:
        spend(old, 20)
        old.record(STATISTIC, label="scale")
        snapshot = old.snapshot()
    ledger = Ledger(path, **KIND)
    append, calls = LedgerFile.append, []

    def failing_append(self, line, **options):
        calls.append(line)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return append(self, line, **options)

    monkeypatch.setattr(LedgerFile, "append", failing_append)
    with pytest.raises(KeyboardInterrupt):
        ledger.absorb(snapshot)
    monkeypatch.undo()
    ledger.absorb(snapshot)
    counts = dict(ledger.history())
    assert counts[STEP] >= 20
    assert counts[STATISTIC] == 1
    ledger.close()


def test_a_checkpoint_of_another_data_set_or_damaged_is_refused():
    with (
        Ledger.in_memory(dataset_size=5, relation=Relation.ZERO_OUT) as other,
        Ledger.in_memory(**KIND) as ledger,
    ):
        with pytest.raises(LedgerError, match="5 examples"):
            ledger.absorb(other.snapshot())
        spend(ledger, 3)
        with pytest.raises(LedgerError, match="checkpoint, line"):
            ledger.absorb(ledger.snapshot().replace('"count": 2', '"count": 1'))


# --- Speed --------------------------------------------------------------------------------------


def test_spending_costs_microseconds(path):
    with Ledger(path, **KIND, block_size=200_000) as ledger:
        ledger.reserve(STEP, count=100_000)
        fresh = [step() for _ in range(10)]
        for mechanism in (STEP, fresh[0]):
            start = time.perf_counter()
            spend(ledger, 50_000, mechanism)
            assert (time.perf_counter() - start) / 50_000 < 20e-6
        assert ledger.count(STEP) == 100_000
