"""`LargeTable`: a table that is read in pieces."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from clipless.data._errors import DataFileError
from clipless.data.large._columns import Piece, length, taken
from clipless.data.large._scratch import Scratch
from clipless.data.large._sources import is_source, open_source

_ROWS = 65_536


class LargeTable:
    """A table of any size, read in pieces: the estimators of `clipless.sklearn` accept it.

    Args:
        source: the path of a file, a pattern such as `"part-*.parquet"`, a folder, or a list of
            `Path`s: Parquet, Arrow (.arrow, .feather) or text (.csv, .tsv), all of one kind. Or
            a pyarrow `Dataset` or `Table`, a DuckDB relation, a Polars `DataFrame` or `LazyFrame`.
        scratch: the folder for what is kept on the disk while an estimator is fitted, by default
            that of temporary files. Numbers take 4 or 8 bytes a value, the model's inputs 4 more
            each; files have no name and end with the process.
        separator: of text tables that use an unusual one.
        rows: one boolean a row: those that are False are left out.

    Which columns there are, and their types, is public, as everywhere; text tables have no types.
    In what order rows come says nothing to anybody, but it must be the same if a table is read
    again, as it is to go on with a run.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "people.csv"
        >>> _ = path.write_text("age,job,income\\n41,baker,1\\n27,,0\\n")
        >>> table = LargeTable(path)
        >>> table.names, len(table)
        (('age', 'job', 'income'), 2)
    """

    def __init__(
        self,
        source: Any,
        *,
        scratch: str | os.PathLike[str] | None = None,
        separator: str | None = None,
        rows: np.ndarray[Any, Any] | None = None,
    ) -> None:
        self._source = open_source(source, separator)
        self.scratch = Scratch(scratch)
        names = [str(name) for name in self._source.types.columns]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DataFileError(f"{self._source.name} has columns twice: {', '.join(twice)}")
        if rows is not None and (rows.dtype != np.bool_ or rows.ndim != 1):
            raise ValueError("rows must be one boolean for each row")
        self.names: tuple[str, ...] = tuple(names)
        self._rows = rows
        self._length: int | None = None

    @property
    def name(self) -> str:
        """What it is called in errors."""
        return self._source.name

    @property
    def types(self) -> Any:
        """A data frame without rows that has the columns and their types: public."""
        return self._source.types

    def __len__(self) -> int:
        """Return the number of rows, for which some kinds of sources must be read once."""
        if self._length is None:
            if self._rows is not None:
                self._length = int(self._rows.sum())
            elif self._source.count is not None:
                self._length = self._source.count()
            else:
                self._length = sum(map(length, self.pieces(self.names[:1])))
        return self._length

    def where(self, rows: np.ndarray[Any, Any]) -> LargeTable:
        """Return the table of those rows for which `rows`, one boolean for each, is True."""
        if len(rows) != len(self) or self._rows is not None:
            raise ValueError(f"one boolean is needed for each of {len(self)} rows, of all rows")
        chosen = LargeTable.__new__(LargeTable)
        vars(chosen).update(vars(self) | {"_rows": np.asarray(rows, dtype=bool), "_length": None})
        return chosen

    def pieces(self, columns: Sequence[str] | None = None) -> Iterator[Piece]:
        """Yield the rows, some at a time: of all columns, or of those that are named."""
        start = 0
        for piece in self._source.read(columns, _ROWS):
            count = length(piece)
            if self._rows is None:
                yield piece
            elif (kept := self._rows[start : start + count]).any():
                yield taken(piece, kept)
            start += count
        if self._rows is not None and start != len(self._rows):
            raise DataFileError(
                f"{self.name} has {start} rows where it had {len(self._rows)}: it has changed"
            )

    def __repr__(self) -> str:
        return f"LargeTable({self.name}, {len(self.names)} columns)"


def as_large_table(given: Any) -> LargeTable | None:
    """Return a table that is read in pieces, or None for one that is in memory."""
    if isinstance(given, LargeTable):
        return given
    return LargeTable(given) if is_source(given) else None
