"""Folders and files of data sets, and how they are found."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from clipless.data.sources._info import DatasetInfo, FileInfo

Parts = list[tuple[NDArray[Any], NDArray[Any]]]
"""Inputs and labels: of the training set and of the test set, or of all rows."""

Reader = Callable[[Sequence[bytes], Sequence[Path], DatasetInfo], Parts]
"""From the contents of the files, and their paths for messages, to arrays; refuses bad ones."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way of storing a data set: which files, in which folders below the root.

    `folders` are alternatives; downloads go to the first. The root itself is one of them if it
    bears the name of one.
    """

    files: tuple[FileInfo, ...]
    folders: tuple[str, ...]
    read: Reader

    def find(self, root: Path) -> list[Path] | None:
        """Return the paths of all files, in order, if some folder has them all."""
        for folder in self._candidates(root):
            paths = [path for file in self.files if (path := present(folder, file))]
            if len(paths) == len(self.files):
                return paths
        return None

    def home(self, root: Path) -> Path:
        """Return the folder that has most of the files, or the one where downloads go."""
        default = root / self.folders[0]
        return max(
            [default, *self._candidates(root)],
            key=lambda folder: sum(present(folder, file) is not None for file in self.files),
        )

    def _candidates(self, root: Path) -> list[Path]:
        below = [root / folder for folder in self.folders]
        return [root, *below] if root.name in self.folders else below


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set: what is known of it, and the layouts it is read from, the downloaded one last."""

    info: DatasetInfo
    layouts: tuple[Layout, ...]

    @property
    def published(self) -> Layout:
        """The layout that is downloaded, and that messages ask for."""
        return self.layouts[-1]


def present(folder: Path, file: FileInfo) -> Path | None:
    """Return the path of a file in a folder, compressed or not, if it is there."""
    for name in (file.name, file.name.removesuffix(".gz")):
        if (folder / name).is_file():
            return folder / name
    return None


def data_root(root: str | os.PathLike[str] | None) -> Path:
    """Return the folder of all data: the argument, `CLIPLESS_DATA`, or a cache of the user."""
    given = root if root is not None else os.environ.get("CLIPLESS_DATA")
    if given:
        return Path(given).expanduser().absolute()
    if sys.platform == "win32":
        cache = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local")
    elif sys.platform == "darwin":
        cache = Path.home() / "Library/Caches"
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "clipless"
