"""Checkpoint folders: written atomically, and checked when they are read."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path

from clipless.common import MALFORMED_ERRORS, error_text
from clipless.folders._layout import CheckpointFile
from clipless.folders._writing import sync_directory, write_file

_MANIFEST = CheckpointFile.MANIFEST
_FORMAT, _VERSION = "clipless-checkpoint", 1
_NAME = re.compile(r"(\d{6,})-step-(\d{8,})")


class UnreadableCheckpointError(ValueError):
    """A checkpoint that was damaged, or is none; the message names the file."""


class CheckpointStore:
    """The checkpoints of a run, in one folder each, numbered in the order they were written.

    Guarantee: a folder that carries the name of a checkpoint was on the disk, complete, before it
    got that name; a crash at any moment leaves the earlier ones as they were. Every file is listed
    with its digest in `manifest.json`, and a checkpoint of which one differs is not used.

    Example:
        >>> import tempfile
        >>> store = CheckpointStore(tempfile.mkdtemp(), keep=2)
        >>> for step in (10, 20, 30):
        ...     _ = store.save({"weights": b"..."}, step=step)
        >>> [path.name for path in store.paths()]
        ['000002-step-00000020', '000003-step-00000030']
        >>> store.newest()
        {'weights': b'...'}
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.folder, self.keep = Path(folder), keep

    def paths(self) -> list[Path]:
        """Return the checkpoints, the oldest first."""
        if not self.folder.is_dir():
            return []
        found = [(_NAME.fullmatch(path.name), path) for path in self.folder.iterdir()]
        return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]

    def save(self, files: Mapping[str, bytes], *, step: int) -> Path:
        """Write a checkpoint, and remove those that are no longer kept."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clean()
        earlier = self.paths()
        number = 1 + (int(earlier[-1].name.split("-")[0]) if earlier else 0)
        name = f"{number:06d}-step-{step:08d}"
        unfinished = self.folder / f".unfinished-{name}"
        # It holds the state of generators: nobody else needs to read it.
        unfinished.mkdir(mode=0o700)
        digests = {key: hashlib.sha256(data).hexdigest() for key, data in files.items()}
        manifest = {"format": _FORMAT, "version": _VERSION, "step": step, "files": digests}
        for key, data in files.items():
            write_file(unfinished / key, data)
        write_file(unfinished / _MANIFEST, json.dumps(manifest, indent=1).encode())
        sync_directory(unfinished)
        final = self.folder / name
        unfinished.rename(final)
        sync_directory(self.folder)
        for path in earlier[: max(len(earlier) + 1 - self.keep, 0)]:
            self._remove(path)
        return final

    def newest(self) -> dict[str, bytes] | None:
        """Return the files of the newest checkpoint that is whole, or None if there is none.

        A damaged one is left out with a warning that names it, and the one before it is taken.
        """
        for path in reversed(self.paths()):
            try:
                return read_checkpoint(path)
            except UnreadableCheckpointError as error:
                warnings.warn(f"a checkpoint is left out: {error}", stacklevel=3)
        return None

    def _remove(self, path: Path) -> None:
        """Take away the name first: what a crash leaves is then no checkpoint."""
        doomed = path.with_name(f".removed-{path.name}")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _clean(self) -> None:
        """Remove what earlier processes have left unfinished. (A run has one writer.)"""
        for pattern in (".unfinished-*", ".removed-*"):
            for path in self.folder.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return the files of a checkpoint by name, each compared with its digest."""
    folder = Path(path)
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        if (manifest["format"], manifest["version"]) != (_FORMAT, _VERSION):
            raise UnreadableCheckpointError(
                f"{folder / _MANIFEST}: {manifest['format']} version {manifest['version']} is "
                f"not {_FORMAT} version {_VERSION}"
            )
        digests = dict(manifest["files"])
    except (OSError, *MALFORMED_ERRORS) as error:
        if isinstance(error, UnreadableCheckpointError):
            raise
        raise UnreadableCheckpointError(
            f"{folder / _MANIFEST} cannot be read: {error_text(error)}"
        ) from error
    files = {}
    for name, digest in digests.items():
        try:
            data = (folder / name).read_bytes()
        except (OSError, ValueError) as error:
            raise UnreadableCheckpointError(f"{folder / name} cannot be read: {error}") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise UnreadableCheckpointError(f"{folder / name} was damaged: its digest differs")
        files[name] = data
    return files
