"""Atomic writing of files: synced to disk before they are renamed into place."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from clipless.folders._layout import PRIVATE_NAMES


def write_file(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write a new file and wait until it is on the disk; a `private` one is for its owner alone."""
    with open(path, "wb", opener=partial(os.open, mode=0o600 if private else 0o666)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` in the place of a file, in one operation; a crash leaves one of the two.

    Only their owner may read files that the layout of run folders calls private.
    """
    unfinished = path.with_name(f".unfinished-{path.name}")
    write_file(unfinished, data, private=path.name in PRIVATE_NAMES)
    unfinished.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Put the names in a directory on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
