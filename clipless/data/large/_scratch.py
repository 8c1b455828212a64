"""Rows on the disk instead of in memory: files without a name, which end with the process."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor


class Scratch:
    """A folder for rows that do not fit into memory.

    Files in it have no name: nobody else can open them, and the system frees them when they are
    let go of, or the process ends, in whatever way. Of a file that is written, the system keeps in
    memory what there is room for, and gives that room back when others need it.

    Example:
        >>> column = Scratch().column()
        >>> for piece in torch.arange(6.0).reshape(3, 2).split(2):
        ...     column.append(piece)
        >>> column.finish().tolist()
        [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = os.fspath(folder) if folder is not None else tempfile.gettempdir()
        if not os.path.isdir(self.folder):
            raise FileNotFoundError(
                f"there is no folder {self.folder} for scratch files: make it, or name another one"
            )

    def column(self) -> ScratchColumn:
        """Return a new column, to which rows can be appended."""
        return ScratchColumn(self.folder)

    def require_room(self, size: int, what: str) -> None:
        """Raise `OSError` if the folder's disk has no room for so many bytes."""
        free = shutil.disk_usage(self.folder).free
        if size > free:
            raise OSError(
                f"{what} take {_gib(size)} of scratch space, but {self.folder} has {_gib(free)} "
                "left. Name a folder on another disk: LargeTable(..., scratch=folder), or "
                "the environment's TMPDIR."
            )


class ScratchColumn:
    """One column of rows that is being written: pieces of one type and one shape of a row."""

    def __init__(self, folder: str) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it is mapped
        self._rows = 0
        self._like: Tensor | None = None

    def append(self, rows: Tensor) -> None:
        """Write further rows behind those that are there."""
        if self._like is None:
            self._like = rows[:0]
        if rows.dtype != self._like.dtype or rows.shape[1:] != self._like.shape[1:]:
            raise ValueError(
                f"rows of {rows.dtype} and shape {tuple(rows.shape[1:])} in a column of "
                f"{self._like.dtype} and shape {tuple(self._like.shape[1:])}"
            )
        self._file.write(rows.contiguous().numpy().data if rows.numel() else b"")
        self._rows += len(rows)

    def finish(self) -> Tensor:
        """Return all rows as one tensor on the CPU, whose memory is the file."""
        if self._like is None:
            raise ValueError("no rows were appended to the column")
        shape = (self._rows, *self._like.shape[1:])
        self._file.flush()
        if not os.fstat(self._file.fileno()).st_size:
            self._file.close()
            return self._like.new_empty(shape)
        mapped: Any = mmap.mmap(self._file.fileno(), 0)
        self._file.close()  # the map keeps the file
        return torch.from_numpy(np.frombuffer(mapped, dtype=self._like.numpy().dtype)).view(shape)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
