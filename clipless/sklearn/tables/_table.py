"""Schemas of tables, and their rows as tensors.

The container is public: the number of columns, their names, and their types where it has types.
Columns of a numeric type or of dates hold numbers, pandas' categories hold categories. What a
column of objects or of text holds is declared, or put to a private vote of its rows (`Rows.votes`):
numbers and dates, or categories, and in which order dates of three numbers (03/04/2024) are
written. Values are turned into numbers one by one, by rules that are fixed beforehand: dates become
days, categories are hashed. Columns whose names say that they number the rows are not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clipless.data import (
    Cell,
    hash_bucket,
    parse_cell,
    parse_date,
    parse_numeric_date,
    read_cell,
    read_cells,
)
from clipless.sklearn.tables._identifiers import identifiers

HASH_BUCKETS = 1024
"""How many buckets categories are hashed into; one more is for missing values."""

ColumnKind = Literal["number", "category", "ignored"]
Ballot = Literal["number", "category", "day first", "month first", "either order"]
BALLOTS: tuple[Ballot, ...] = ("number", "category", "day first", "month first", "either order")
"""What a cell can say of its column; the last three are dates of three numbers."""


@dataclass(frozen=True)
class Schema:
    """The public description of a table's columns, in their order."""

    names: tuple[str, ...] | None
    """Column names, if the table has names, all of them strings."""
    kinds: tuple[ColumnKind | None, ...]
    """For each column, what it holds; None while that is not decided."""
    day_first: tuple[int, ...] = ()
    """Positions of the columns in which 03/04/2024 is a day of April."""

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
        used = len(self.kinds) - self.kinds.count("ignored")
        return 2 * self.numeric + 8 * (used - self.numeric) + 1

    def decided(self, votes: Sequence[Tensor]) -> Schema:
        """Return the schema as noisy votes on the undecided columns have it, (5,) counts each.

        Dates are numbers. Where no cell tells in which order they are written, the month is first.
        """
        given, day_first = dict[int, ColumnKind](), []
        for index, counts in zip(self.undecided, votes, strict=True):
            numbers, texts, days, months, either = counts.tolist()
            given[index] = "category" if texts > numbers + days + months + either else "number"
            day_first += [index] if days > months and given[index] == "number" else []
        kinds = (given.get(index, kind) for index, kind in enumerate(self.kinds))
        return replace(self, kinds=tuple(kinds), day_first=tuple(day_first))

    def name(self, index: int) -> str:
        """Return how to call a column: by its name, or by its position."""
        return repr(self.names[index]) if self.names is not None else f"number {index}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        names = None if self.names is None else list(self.names)
        return {"names": names, "kinds": list(self.kinds), "day_first": list(self.day_first)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Schema:
        """Restore what `to_dict` returned."""
        names = None if data["names"] is None else tuple(data["names"])
        days = tuple(data.get("day_first", ()))
        return cls(names=names, kinds=tuple(data["kinds"]), day_first=days)


class Rows(NamedTuple):
    """The rows of a table as tensors. A column that is not decided is in all three."""

    numbers: Tensor
    """(n, p): NaN where missing. A column that is not decided is there by both orders of dates."""
    codes: Tensor
    """(n, q): hash buckets, `HASH_BUCKETS` where missing."""
    votes: Tensor
    """(n, undecided): the position in `BALLOTS` that a cell speaks for, -1 where missing."""


def choose(before: Schema, after: Schema) -> Any:
    """Return the function of rows that leaves every column in its one form."""
    forms = [(at, False) for at, kind in enumerate(before.kinds) if kind in ("number", None)]
    forms = [both for at, _ in forms for both in _forms(at, before.kinds[at])]
    numbers = [
        place
        for place, (at, day_first) in enumerate(forms)
        if after.kinds[at] == "number"
        and (before.kinds[at] is not None or day_first == (at in after.day_first))
    ]
    coded = [at for at, kind in enumerate(before.kinds) if kind in ("category", None)]
    codes = [place for place, at in enumerate(coded) if after.kinds[at] == "category"]
    kept = [torch.tensor(places, dtype=torch.long) for places in (numbers, codes)]

    def function(numbers: Tensor, codes: Tensor, votes: Tensor) -> Rows:
        return Rows(numbers[:, kept[0]], codes[:, kept[1]], votes[:, :0])

    return function


def _forms(at: int, kind: ColumnKind | None) -> tuple[tuple[int, bool], ...]:
    """The columns of `Rows.numbers` that a column has: its position, and whether days are first."""
    return ((at, False),) if kind is not None else ((at, False), (at, True))


def read_schema(columns: Sequence[Any], names: Any, categorical: Any, bounds: Any = None) -> Schema:
    """Describe columns by what is declared of them, else by their types.

    `categorical` is None, or the names or positions of the categorical columns: all others then
    hold numbers. So do columns that `bounds`, a mapping, names. Of the others, those that number
    the rows by their names are not used, unless there is nothing else.
    """
    known = None if names is None else tuple(str(each) for each in names)
    numbering = identifiers(known or ())
    numbering = set() if len(numbering) == len(columns) else numbering
    if categorical is None:
        kinds = [_declared_kind(each) for each in columns]
        for index in numbering:
            kinds[index] = "ignored"
        for each in bounds if isinstance(bounds, Mapping) else ():
            index = known.index(each) if known and each in known else each
            if isinstance(index, int) and 0 <= index < len(kinds) and kinds[index] != "category":
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
    declared: dict[int, ColumnKind] = dict.fromkeys(range(len(columns)), "number")
    for index in numbering | chosen:
        declared[index] = "category" if index in chosen else "ignored"
    return Schema(known, tuple(declared.values()))


def columns_of(table: Any) -> tuple[list[Any], Any]:
    """Return the columns of a data frame, an array or a sparse matrix, and their names if any."""
    if hasattr(table, "tocsc"):
        table = table.tocsc()
        return [table[:, [index]].toarray()[:, 0] for index in range(table.shape[1])], None
    if hasattr(table, "columns") and hasattr(table, "iloc"):
        columns = [table.iloc[:, index] for index in range(table.shape[1])]
        strings = all(isinstance(each, str) for each in table.columns)
        return columns, list(table.columns) if strings else None
    return [table[:, index] for index in range(table.shape[1])], None


def encode(columns: Sequence[Any], schema: Schema) -> Rows:
    """Return the rows of a table, each value by itself."""
    numbers, codes, votes = [], [], []
    for at, (column, kind) in enumerate(zip(columns, schema.kinds, strict=True)):
        if kind == "ignored":
            continue
        if kind == "number":
            numbers.append(_numbers(column, at in schema.day_first))
            continue
        places, cells = read_cells(_plain(column))
        codes.append(_each(cells, bucket, np.int64)[places])
        if kind is None:
            for _, first in _forms(at, kind):
                both = np.array([_number(cell, first) for cell in cells], dtype=np.float64)
                numbers.append(both[places])
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
    """What a cell says of its column: text is a category unless it is a date, all else a number."""
    if cell.kind == "missing":
        return -1
    if cell.kind != "text":
        return BALLOTS.index("number")
    text = cell.value.strip()
    date = parse_numeric_date(text)
    if date is None:
        return BALLOTS.index("number" if parse_date(text) is not None else "category")
    if not date.certain:
        return BALLOTS.index("either order")
    return BALLOTS.index("month first" if date.day_first is None else "day first")


def _number(cell: Cell, day_first: bool) -> float:
    """The number of a cell in a column of numbers, where text may say one, or a date, too."""
    if cell.kind != "text":
        return cell.number
    date = parse_numeric_date(cell.value.strip())
    if date is not None:
        return read_cell(date.read(day_first=day_first)).number
    return read_cell(parse_cell(cell.value)).number


def _each(cells: list[Cell], function: Any, dtype: Any) -> np.ndarray[Any, Any]:
    return np.array([function(cell) for cell in cells], dtype=dtype)


def _declared_kind(column: Any) -> ColumnKind | None:
    """What the type of a column says of it: nothing, if it is a column of objects or of text."""
    name, kind = str(column.dtype), getattr(column.dtype, "kind", "O")
    if name.startswith(("category", "dictionary")):
        return "category"
    text = kind in "OUS" or name.startswith(("string", "str", "large_string"))
    return None if text else "number"


def _plain(column: Any) -> Any:
    """An array of numpy where that has the column's own type, else the values one by one."""
    dtype = column.dtype
    return np.asarray(column) if isinstance(dtype, np.dtype) else column


def _numbers(column: Any, day_first: bool = False) -> np.ndarray[Any, Any]:
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
    found = np.array([_number(cell, day_first) for cell in cells], dtype=np.float64)
    return found[places]


_DAY = np.timedelta64(1, "D")
