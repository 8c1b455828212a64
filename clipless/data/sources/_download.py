"""Downloads: several addresses, resumed where they broke off, renamed only once they are whole."""

from __future__ import annotations

import contextlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from clipless.common import take_lock
from clipless.data._errors import DataFileError
from clipless.data.sources._contents import checksum, contents_of, holds_one_file
from clipless.data.sources._info import FileInfo

_TIMEOUT = 30.0
_ATTEMPTS = 3
_CHUNK = 1 << 18
_UNKNOWN_SIZE_LIMIT = 1 << 30


class DownloadFailedError(Exception):
    """No address gave the file. The message has one line for each."""


def fetch(file: FileInfo, target: Path, *, bar: DownloadBar, check: Callable[[Path], None]) -> None:
    """Download a file to `target`, which appears only when it is whole, checked and on the disk.

    Bytes go to a `.part` file beside it, which a later call resumes. A file with a published
    checksum must have it; every file must pass `check`. What fails is deleted, and the next
    address is tried.
    """
    part = target.with_name(f"{target.name}.part")
    # What an earlier call left may be damaged: the first address then gets a second chance.
    urls = file.urls[:1] + file.urls if part.exists() else file.urls
    failures = []
    for url in urls:
        try:
            _download(url, part, size=file.size, bar=bar)
            _verify(part, file)
            check(part)
        except DataFileError as error:
            part.unlink(missing_ok=True)
            failures.append(f"{url}: {error}")
        except (OSError, http.client.HTTPException) as error:
            failures.append(f"{url}: {error or type(error).__name__}")
        else:
            part.replace(target)
            return
    raise DownloadFailedError("\n".join(dict.fromkeys(failures)))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time download into a folder; the others wait, and find the files."""
    lock = None
    with contextlib.suppress(OSError):  # a file system without locks: go on without
        lock = take_lock(folder, blocking=True)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _verify(part: Path, file: FileInfo) -> None:
    if file.checksum is None:
        return
    found = checksum(contents_of(part, inflate=holds_one_file(file)), like=file.checksum)
    if found != file.checksum:
        raise DataFileError(f"the download has checksum {found}, expected {file.checksum}")


def _download(url: str, part: Path, *, size: int | None, bar: DownloadBar) -> None:
    limit = _UNKNOWN_SIZE_LIMIT if size is None else 2 * size
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return _receive(url, part, limit=limit, bar=bar)
        except urllib.error.HTTPError as error:
            if error.code != 416 or not part.exists():
                raise
            part.unlink()  # longer than the file there: begin anew
        except (ConnectionError, http.client.HTTPException):
            if attempt == _ATTEMPTS:
                raise
    raise ConnectionError("the server does not send the whole file")


def _receive(url: str, part: Path, *, limit: int, bar: DownloadBar) -> None:
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "clipless"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
        resumed = response.status == 206
        have = have if resumed else 0
        length = response.headers.get("Content-Length")
        total = None if length is None else have + int(length)
        with part.open("ab" if resumed else "wb") as stream:
            _copy(response, stream, have=have, total=total, limit=limit, bar=bar)


def _copy(
    source: BinaryIO,
    stream: BinaryIO,
    *,
    have: int,
    total: int | None,
    limit: int,
    bar: DownloadBar,
) -> None:
    bar.show(have, total)
    while chunk := source.read(_CHUNK):
        have += len(chunk)
        if have > limit:
            raise DataFileError(f"the server sends more than {limit:,} bytes")
        stream.write(chunk)
        bar.show(have, total)
    stream.flush()
    os.fsync(stream.fileno())
    if total is not None and have < total:
        raise ConnectionError(f"the connection ended after {have:,} of {total:,} bytes")


class DownloadBar:
    """Bytes, speed and time left on a terminal, one line a file; nothing anywhere else.

    `wanted` shows it (True), hides it (False), or leaves it to whether there is a terminal.
    """

    def __init__(self, wanted: bool | None) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not (console.is_terminal if wanted is None else wanted),
        )
        self._task: Any = None

    def __enter__(self) -> DownloadBar:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def begin(self, name: str) -> None:
        """Add a line for a file."""
        self._task = self._progress.add_task(name, total=None)

    def show(self, done: int, total: int | None) -> None:
        """Show how much of the file is there."""
        self._progress.update(self._task, completed=done, total=total)
