"""Exclusive locks on files and folders that end with their process, on every platform."""

from __future__ import annotations

import os
from pathlib import Path

from filelock import lock_descriptor

_WINDOWS = os.name == "nt"


def take_lock(path: Path, *, flags: int = os.O_RDONLY, blocking: bool = False) -> int | None:
    """Return a descriptor that holds the lock of a file or folder, or None if another holds it.

    The lock lasts until the last copy of the descriptor is closed, by its owner or by the end of
    the process: `kill -9` leaves nothing locked. A lock of Windows would keep readers out, and no
    folder can be opened there, so that an empty file `<name>.lock` beside it is locked instead.

    Args:
        flags: for `os.open`; network file systems lock only what is open for writing.
        blocking: wait until whoever holds it lets go.
    """
    if _WINDOWS:
        path, flags = path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags, 0o666)
    held = False
    try:
        held = lock_descriptor(descriptor, blocking=blocking)
    finally:
        if not held:
            os.close(descriptor)
    return descriptor if held else None
