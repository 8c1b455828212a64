"""Locks exclude everybody else and end with their holder, on Windows beside the locked file."""

import os
import signal

import pytest

from clipless.common import _lock, take_lock


@pytest.fixture(params=["posix", "windows"])
def place(request, tmp_path, monkeypatch):
    """A file or a folder; the lock of Windows, which is a file beside it, works here, too."""
    monkeypatch.setattr(_lock, "_WINDOWS", request.param == "windows")
    return tmp_path / "file"


@pytest.mark.parametrize("make", ["touch", "mkdir"])
def test_one_holder_at_a_time(place, make):
    getattr(place, make)()
    first = take_lock(place)
    assert first is not None
    assert take_lock(place) is None
    os.close(first)
    second = take_lock(place)
    assert second is not None
    os.close(second)
    assert list(place.parent.glob("*.lock")) == (
        [place.with_name("file.lock")] if _lock._WINDOWS else []
    )


def test_a_killed_process_leaves_nothing_locked(place):
    place.touch()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        held = take_lock(place, flags=os.O_RDWR)
        os.write(writer, b"+" if held is not None else b"-")
        signal.pause()
    assert os.read(reader, 1) == b"+"
    assert take_lock(place) is None
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    lock = take_lock(place, blocking=True)
    assert lock is not None
    for descriptor in (lock, reader, writer):
        os.close(descriptor)


def test_what_is_refused_is_closed(place):
    place.touch()
    lock = take_lock(place)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(3):
        assert take_lock(place) is None
    if before:
        assert len(os.listdir("/proc/self/fd")) == before
    os.close(lock)
