"""A file that only grows, whose lines are on the disk before `append` returns, with one writer."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from clipless.common import take_lock
from clipless.errors import LedgerError
from clipless.ledger._format import HEADER_START, LedgerText, decode, parse_ledger
from clipless.ledger._writing import EntryKind

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
_READER_ATTEMPTS, _READER_PAUSE = 5, 0.05


class LedgerInUseError(LedgerError):
    """Another writer holds the ledger, so that what it counts is not settled."""


class LedgerFile:
    """The lines of one file, held under an exclusive lock until `close` or the process ends.

    A line that a crash left unfinished at the very end is dropped when the file is opened. This
    is sound because nothing is done on the strength of a line before `append` has returned: an
    unfinished reservation was never used, and an unfinished refund never happened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.lines: list[str] = []
        """The lines found when the file was opened."""
        self._lock = -1
        try:
            self._descriptor = os.open(self.path, _FLAGS, 0o666)
        except OSError as error:
            raise LedgerError(f"cannot open the ledger {self.path}: {error}") from error
        try:
            self._take_lock()
            self._load()
        except BaseException:
            self.close()
            raise

    def append(self, line: str, *, after: int, sync: bool = True) -> int:
        """Write a line that begins `after` bytes into the file, and return where it ends.

        Returns only once the line is on the disk, unless `sync` is False. If this raises, the line
        counts as not written: `after` stays the end of what is valid, and the next call removes
        what lies behind it.
        """
        data = f"{line}\n".encode()
        self._check_untouched(after)
        self._attempted = after + len(data)
        try:
            if os.write(self._descriptor, data) != len(data):
                raise OSError("the disk took only a part of the line; it may be full")
            if sync:
                os.fsync(self._descriptor)
        except OSError as error:
            raise LedgerError(f"cannot write the ledger {self.path}: {error}") from error
        return self._attempted

    def close(self) -> None:
        """Close the file and, with the last descriptor that shares it, release the lock."""
        descriptors = self._descriptor, self._lock
        self._descriptor = self._lock = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)

    def _take_lock(self) -> None:
        try:
            lock = take_lock(self.path, flags=os.O_RDWR)
        except OSError as error:
            raise LedgerError(f"cannot lock the ledger {self.path}: {error}") from error
        if lock is None:
            raise LedgerInUseError(
                f"the ledger {self.path} is in use by {self._holder()}; a ledger has one writer: "
                "close it there first, or give each run its own ledger"
            )
        self._lock = lock

    def _holder(self) -> str:
        """Name the process that wrote the last `open` line."""
        process = None
        for line in self._read().decode(errors="replace").splitlines():
            with contextlib.suppress(ValueError, AttributeError):
                fields = json.loads(line)
                if fields.get("kind") == EntryKind.OPEN:
                    process = fields.get("process")
        if process is None:
            return "another process"
        return f"process {process}" + (" (this one)" if process == os.getpid() else "")

    def _read(self) -> bytes:
        """Return all bytes of the file; what is appended always goes to its end."""
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        with os.fdopen(os.dup(self._descriptor), "rb") as stream:
            return stream.read()

    def _load(self) -> None:
        """Read all lines, and mend the end of the file after a crash."""
        data = self._read()
        self.lines, unfinished = split_lines(data, name=str(self.path))
        self._attempted = len(data)
        if unfinished:
            with contextlib.suppress(ValueError):
                self._mend(unfinished)

    def _mend(self, unfinished: str) -> None:
        """Keep a last line that lacks only its end, as after an editor.

        Any other was cut short by a crash: it is left out, and the first `append` removes it.
        """
        previous = ""
        for line in self.lines:
            _, previous = decode(line, previous)
        decode(unfinished, previous)
        self.lines.append(unfinished)
        os.write(self._descriptor, b"\n")
        os.fsync(self._descriptor)

    def _check_untouched(self, end: int) -> None:
        """Make sure that the file is still the one that was read, and ends at `end`."""
        mine = os.fstat(self._descriptor)
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            raise LedgerError(f"the ledger {self.path} was moved or deleted while in use")
        if end < mine.st_size <= self._attempted:
            # What an interrupted or failed call of `append` has left.
            os.ftruncate(self._descriptor, end)
        elif mine.st_size != end:
            raise LedgerError(f"the ledger {self.path} was changed while in use")

    def sync_directory(self) -> None:
        """Put the name of a new file on the disk, too; Windows does so with the file."""
        if os.name == "nt":  # pragma: no cover - folders cannot be opened there
            return
        descriptor = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def split_lines(data: bytes, *, name: str) -> tuple[list[str], str]:
    """Return the finished lines of a ledger file and, if there is one, the unfinished last one."""
    *finished, rest = data.split(b"\n")
    try:
        lines = [line.decode() for line in finished]
    except UnicodeDecodeError as error:
        raise LedgerError(f"{name} is damaged or not a ledger: {error}") from error
    unfinished = rest.decode(errors="replace")
    if not lines and not (
        HEADER_START.startswith(unfinished) or unfinished.startswith(HEADER_START)
    ):
        raise LedgerError(f"{name} exists and is not a ledger")
    return lines, unfinished


def read_ledger(path: str | os.PathLike[str]) -> LedgerText:
    """Read a ledger without locking or changing it, also while another process writes it.

    What that process has reserved and not yet used or given back is counted.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise LedgerError(f"cannot read the ledger {path}: {error}") from error
    lines, unfinished = split_lines(data, name=str(path))
    text = parse_ledger(lines, name=str(path))
    with contextlib.suppress(ValueError):
        decode(unfinished, text.digests[-1])
        return parse_ledger([*lines, unfinished], name=str(path))
    return text


def read_closed_ledger(path: Path) -> LedgerText:
    """Read a ledger that nobody is writing, without changing it.

    Raises `LedgerInUseError` if a run holds it, and `LedgerError` if it is missing or damaged.
    """
    lock: int | None = -1
    with contextlib.suppress(OSError):  # no file, which `read_ledger` names, or no locks
        for _ in range(_READER_ATTEMPTS):
            lock = take_lock(path)
            if lock is not None:
                break
            time.sleep(_READER_PAUSE)  # another reader holds it for as long as it reads
    if lock is None:
        raise LedgerInUseError(
            f"the ledger {path} is being written: the run is still going on. Wait until it has "
            "ended, or end it, and ask again."
        )
    try:
        return read_ledger(path)
    finally:
        if lock >= 0:
            os.close(lock)
