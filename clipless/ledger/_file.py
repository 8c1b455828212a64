"""A file that only grows, whose lines are on the disk before `append` returns, with one writer."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from clipless.errors import LedgerError
from clipless.ledger._format import HEADER_START, EntryKind, LedgerText, decode, parse

try:
    import fcntl
except ImportError:  # pragma: no cover - platforms without POSIX locks
    fcntl = None  # type: ignore[assignment]


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
        if fcntl is None:  # pragma: no cover
            raise LedgerError("ledgers on disk need POSIX file locks; use Ledger.in_memory()")
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            self._descriptor = os.open(self.path, flags, 0o666)
        except OSError as error:
            raise LedgerError(f"cannot open the ledger {self.path}: {error}") from error
        try:
            self._lock()
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
        """Let go of the file and, with the last descriptor that shares it, of the lock."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LedgerError(
                f"the ledger {self.path} is in use by {self._holder()}; a ledger has one writer: "
                "close it there first, or give each run its own ledger"
            ) from None
        except OSError as error:
            raise LedgerError(f"cannot lock the ledger {self.path}: {error}") from error

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
        size = os.fstat(self._descriptor).st_size
        return os.pread(self._descriptor, size, 0) if size else b""

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
        """Put the name of a new file on the disk, too."""
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
    text = parse(lines, name=str(path))
    with contextlib.suppress(ValueError):
        decode(unfinished, text.digests[-1])
        return parse([*lines, unfinished], name=str(path))
    return text
