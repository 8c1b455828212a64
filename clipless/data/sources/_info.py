"""Descriptions of data sets, and loaded ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """A published file: its name, size in bytes, checksum and addresses.

    `checksum` is `"sha256:..."` of what is inside a `.gz` file (copies are compressed
    differently), and of the file itself for everything else, archives included; None where none
    was published. Such a file is checked by its structure: shapes, types, row counts.
    """

    name: str
    urls: tuple[str, ...]
    size: int | None = None
    checksum: str | None = None


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """Facts about a data set that do not depend on anybody's data: they are public.

    `value_range` is what every value of every example lies in, by definition of the data and
    checked when it is read; None where there is no such range. Sizes are treated as public by the
    privacy guarantee.

    Example:
        >>> from clipless.data import datasets
        >>> info = datasets()["mnist"]
        >>> info.train_size, info.example_shape, info.norm_bound
        (60000, (1, 28, 28), 28.0)
    """

    name: str
    title: str
    task: Literal["binary", "multiclass"]
    train_size: int
    test_size: int
    example_shape: tuple[int, ...]
    classes: tuple[str, ...]
    value_range: tuple[float, float] | None
    files: tuple[FileInfo, ...]
    homepage: str
    licence: str | None = None
    """As far as the publisher states one."""
    published_split: bool = True
    """Whether the test set is the publisher's; otherwise `split_rows` draws it."""

    @property
    def norm_bound(self) -> float | None:
        """A proved bound of the norm of any example as `load` returns it, None if there is none.

        n values in [low, high] have norm at most `sqrt(n) * max(|low|, |high|)`.
        """
        if self.value_range is None:
            return None
        count = math.prod(self.example_shape)
        root = math.sqrt(count)
        if Fraction(root) ** 2 < count:  # it was rounded down
            root = math.nextafter(root, math.inf)
        return root * max(abs(end) for end in self.value_range)


@dataclass(frozen=True, kw_only=True)
class LoadedDataset:
    """Examples in memory: `train` and `test` are pairs of inputs (float32) and labels (int64).

    `verified` says that every file read has the published checksum. It is False for other copies
    of the data, and where no checksum was published; structure was checked all the same.
    """

    info: DatasetInfo
    train: tuple[Tensor, Tensor] = field(repr=False)
    test: tuple[Tensor, Tensor] = field(repr=False)
    paths: tuple[Path, ...] = field(repr=False)
    verified: bool
