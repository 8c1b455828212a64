"""Schemas of tables, and their rows as tensors.

The container is public: the number of columns, their names, and their types where it has types.
Columns of a numeric type or of dates hold numbers, columns of text or of pandas' categories hold
categories. A column of objects has no type: whether it holds numbers or categories is declared, or
put to a private vote of its rows (`Rows.votes`). Values are turned into numbers one by one, by
rules that are fixed beforehand: dates become days, categories are hashed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clipless.data import Cell, hash_bucket, parse_cell, read_cell, read_cells

HASH_BUCKETS = 1024
"""How many buckets categories are hashed into; one more is for missing values."""

ColumnKind = Literal["number", "category"]
COLUMN_KINDS: tuple[ColumnKind, ColumnKind] = ("number", "category")


@dataclass(frozen=True)
class Schema:
    """The public description of a table's columns, in their order."""

    names: tuple[str, ...] | None
    """Column names, if the table has names, all of them strings."""
    kinds: tuple[ColumnKind | None, ...]
    """For each column, what it holds; None while that is not decided."""

    @property
    def categorical(self) -> tuple[bool, ...]:
        """For each column, whether it holds categories."""
        return tuple(kind == "category" for kind in self.kinds)

    @property
    def numeric(self) -> int:
        """How many columns hold numbers."""
        return self.kinds.count("number")

    @property
    def undecided(self) -> tuple[int, ...]:
        """The positions of the columns that are put to a vote."""
        return tuple(index for index, kind in enumerate(self.kinds) if kind is None)

    @property
    def expected_features(self) -> int:
        """About how many features the columns become: a rule of public numbers."""
        return 2 * self.numeric + 8 * (len(self.kinds) - self.numeric) + 1

    def decided(self, found: Sequence[ColumnKind]) -> Schema:
        """Return the schema with the kinds that the undecided columns were found to have."""
        given = dict(zip(self.undecided, found, strict=True))
        kinds = (given.get(index, kind) for index, kind in enumerate(self.kinds))
        return replace(self, kinds=tuple(kinds))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        names = None if self.names is None else list(self.names)
        return {"names": names, "kinds": list(self.kinds)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Schema:
        """Restore what `to_dict` returned."""
        names = None if data["names"] is None else tuple(data["names"])
        return cls(names=names, kinds=tuple(data["kinds"]))


class Rows(NamedTuple):
    """The rows of a table as tensors. A column that is not decided is in all three."""

    numbers: Tensor
    """(n, p): NaN where missing."""
    codes: Tensor
    """(n, q): hash buckets, `HASH_BUCKETS` where missing."""
    votes: Tensor
    """(n, undecided): the position in `COLUMN_KINDS` that a cell speaks for, -1 where missing."""


def choose(before: Schema, after: Schema) -> Any:
    """Return the function of rows that leaves every column in its one form."""
    kept = []
    for kind in COLUMN_KINDS:
        places = [index for index, each in enumerate(before.kinds) if each in (kind, None)]
        chosen = [at for at, index in enumerate(places) if after.kinds[index] == kind]
        kept.append(torch.tensor(chosen, dtype=torch.long))

    def function(numbers: Tensor, codes: Tensor, votes: Tensor) -> Rows:
        return Rows(numbers[:, kept[0]], codes[:, kept[1]], votes[:, :0])

    return function


def read_schema(columns: Sequence[Any], names: Any, categorical: Any, bounds: Any = None) -> Schema:
    """Describe columns by what is declared of them, else by their types.

    `categorical` is None, or the names or positions of the categorical columns: all others then
    hold numbers. So do columns that `bounds`, a mapping, names.
    """
    known = None if names is None else tuple(str(each) for each in names)
    if categorical is None:
        kinds = [_declared_kind(each) for each in columns]
        for each in bounds if isinstance(bounds, Mapping) else ():
            index = known.index(each) if known and each in known else each
            if isinstance(index, int) and 0 <= index < len(kinds) and kinds[index] is None:
                kinds[index] = "number"
        return Schema(known, tuple(kinds))
    chosen = set()
    for each in categorical:
        if isinstance(each, str):
            if known is None or each not in known:
                raise ValueError(
                    f"categorical_features names the column {each!r}, which the table does not "
                    f"have. Its columns: {'without names' if known is None else ', '.join(known)}."
                )
            chosen.add(known.index(each))
        elif isinstance(each, int | np.integer) and -len(columns) <= each < len(columns):
            chosen.add(int(each) % len(columns))
        else:
            raise ValueError(
                f"categorical_features holds {each!r}, which is neither the name of a column nor "
                f"a position from 0 to {len(columns) - 1}"
            )
    count = len(columns)
    return Schema(known, tuple("category" if i in chosen else "number" for i in range(count)))


def columns_of(table: Any) -> tuple[list[Any], Any]:
    """Return the columns of a data frame or a two-dimensional array, and their names if any."""
    if hasattr(table, "columns") and hasattr(table, "iloc"):
        columns = [table.iloc[:, index] for index in range(table.shape[1])]
        strings = all(isinstance(each, str) for each in table.columns)
        return columns, list(table.columns) if strings else None
    return [table[:, index] for index in range(table.shape[1])], None


def encode(columns: Sequence[Any], schema: Schema) -> Rows:
    """Return the rows of a table, each value by itself."""
    numbers, codes, votes = [], [], []
    for column, kind in zip(columns, schema.kinds, strict=True):
        if kind == "number":
            numbers.append(_numbers(column))
            continue
        places, cells = read_cells(_plain(column))
        codes.append(_each(cells, bucket, np.int64)[places])
        if kind is None:
            numbers.append(_each(cells, _number, np.float64)[places])
            votes.append(_each(cells, _vote, np.int64)[places])
    rows = len(columns[0]) if columns else 0
    return Rows(
        torch.from_numpy(np.stack(numbers, 1) if numbers else np.zeros((rows, 0))),
        torch.from_numpy(np.stack(codes, 1) if codes else np.zeros((rows, 0), dtype=np.int64)),
        torch.from_numpy(np.stack(votes, 1) if votes else np.zeros((rows, 0), dtype=np.int64)),
    )


def bucket(cell: Cell) -> int:
    """Return the bucket of a category: by its type and value, and by nothing else.

    >>> [bucket(read_cell(value)) == bucket(read_cell(1)) for value in (1.0, True, "1")]
    [True, False, False]
    """
    return HASH_BUCKETS if cell.name is None else hash_bucket(cell.name, HASH_BUCKETS)


def _vote(cell: Cell) -> int:
    """What a cell says of its column: text is a category, anything else a number."""
    return -1 if cell.kind == "missing" else COLUMN_KINDS.index(
        "category" if cell.kind == "text" else "number"
    )  # fmt: skip


def _number(cell: Cell) -> float:
    """The number of a cell in a column of numbers, where text may say one, too."""
    return (read_cell(parse_cell(cell.value)) if cell.kind == "text" else cell).number


def _each(cells: list[Cell], function: Any, dtype: Any) -> np.ndarray[Any, Any]:
    return np.array([function(cell) for cell in cells], dtype=dtype)


def _declared_kind(column: Any) -> ColumnKind | None:
    """What the type of a column says of it: nothing, if it is a column of objects."""
    name, kind = str(column.dtype), getattr(column.dtype, "kind", "O")
    if kind in "US" or name.startswith(("category", "string", "str", "large_string", "dictionary")):
        return "category"
    return None if kind == "O" else "number"


def _plain(column: Any) -> Any:
    """An array of numpy where that has the column's own type, else the values one by one."""
    dtype = column.dtype
    return np.asarray(column) if isinstance(dtype, np.dtype) else column


def _numbers(column: Any) -> np.ndarray[Any, Any]:
    """The values of a column as numbers, NaN where missing or where text is no number."""
    name, kind = str(column.dtype), getattr(column.dtype, "kind", "O")
    if name.startswith(("datetime64", "timedelta64")):
        unit = "datetime64[us]" if kind == "M" else "timedelta64[us]"
        values = np.asarray(column, dtype=unit)
        days = (values - np.datetime64("2000-01-01") if kind == "M" else values) / _DAY
        return np.where(np.isnat(values), np.nan, days.astype(np.float64))
    if kind in "biuf" and not name.startswith(("category", "dictionary")):
        if hasattr(column, "to_numpy"):
            return np.ascontiguousarray(column.to_numpy(dtype=np.float64, na_value=np.nan))
        return np.ascontiguousarray(column, dtype=np.float64)
    places, cells = read_cells(_plain(column))
    return _each(cells, _number, np.float64)[places]


_DAY = np.timedelta64(1, "D")
