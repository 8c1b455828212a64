"""Values of tables, one at a time: what kind of value a cell holds, and its name as a category.

Everything here is a function of one value alone. Python's equality is not used between values of
different types (`True == 1 == 1.0 == Decimal("1.0")`), and no value is remembered for another one:
what a cell means never depends on which rows came before it.
"""

from __future__ import annotations

import datetime
import hashlib
import math
import numbers
import re
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, NamedTuple

import numpy as np

from clipless.data._dates import parse_date

CellKind = Literal["missing", "boolean", "number", "date", "text"]

_EPOCH = datetime.datetime(2000, 1, 1)
_DAY = datetime.timedelta(days=1)
# Infinite for all purposes, and Python refuses to print whole numbers far beyond it.
_LARGEST = 1 << 1024
_REMEMBERED = (str, int, float)


class Cell(NamedTuple):
    """A value in the one form that it has, whatever type it came in.

    Numbers of the same value are one number: a whole number is an `int`, any other a `float`,
    decimals included. Booleans are not numbers here. Dates are `datetime`, without a time zone.
    """

    kind: CellKind
    value: Any = None

    @property
    def name(self) -> str | None:
        """The name of the value as a category, None if it is missing: equal for equal cells only.

        Example:
            >>> [read_cell(value).name for value in (1, 1.0, Decimal("1.00"), True, "1")]
            ['number 1', 'number 1', 'number 1', 'boolean True', 'text 1']
        """
        return None if self.kind == "missing" else f"{self.kind} {self.value}"

    @property
    def number(self) -> float:
        """The value as a number: dates are days since 2000; NaN for text and missing values."""
        if self.kind == "date":
            return float((self.value - _EPOCH) / _DAY)
        if self.kind in ("number", "boolean"):
            return _float(self.value)
        return math.nan


MISSING = Cell("missing")


def read_cell(value: Any) -> Cell:
    """Return the one form of a value: of Python, numpy, pandas or anything else. Never fails."""
    try:
        return _read(value)
    except Exception:  # a value that cannot even be printed: one row must not stop a fit
        return MISSING


def _read(value: Any) -> Cell:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return MISSING
    if isinstance(value, np.datetime64 | np.timedelta64):
        value = None if np.isnat(value) else value.astype(f"{_unit(value)}[us]").item()
    elif isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return Cell("boolean", value)
    if isinstance(value, numbers.Real | Decimal):
        return _number(value)
    if isinstance(value, str):
        return Cell("text", str(value))
    if isinstance(value, bytes):
        return Cell("text", value.decode("utf-8", errors="replace"))
    if isinstance(value, datetime.datetime):
        if value.tzinfo is not None:
            value = value.astimezone(datetime.UTC).replace(tzinfo=None)
        if hasattr(value, "to_pydatetime"):
            value = value.to_pydatetime(warn=False)
        return Cell("date", value)
    if isinstance(value, datetime.date):
        return Cell("date", datetime.datetime(value.year, value.month, value.day))
    if isinstance(value, datetime.timedelta):
        return _number(value / _DAY)
    return MISSING if value is None else Cell("text", f"{type(value).__name__} {value}")


def _unit(value: Any) -> str:
    return "datetime64" if isinstance(value, np.datetime64) else "timedelta64"


def _number(value: Any) -> Cell:
    if isinstance(value, numbers.Integral):
        whole = int(value)
        return Cell("number", whole if abs(whole) < _LARGEST else _float(whole))
    if isinstance(value, Decimal) and value.is_nan():
        return MISSING
    near = _float(value)
    if math.isnan(near):
        return MISSING
    if math.isinf(near):
        return Cell("number", near)
    if isinstance(value, Decimal) and value == value.to_integral_value():
        return Cell("number", int(value))
    return Cell("number", int(near) if near.is_integer() else near)


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def hash_bucket(name: str, buckets: int) -> int:
    """Return the bucket of a category's name: a hash that is the same everywhere and always."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % buckets


_OF_OBJECTS = ("object", "str", "string")
"""Names of types, of numpy and pandas, whose values are the objects that iteration yields."""


def read_cells(column: Any) -> tuple[np.ndarray[Any, Any], list[Cell]]:
    """Return, for the values of a column, positions in a list of cells, and that list.

    The list is an economy, and as private as the column: which cells it holds, and in which order,
    must not be told.
    """
    if isinstance(column, np.ndarray) and column.dtype.kind in "biufUS":
        # Values of one type, whose equality is that of their cells.
        values, positions = np.unique(column, return_inverse=True)
        return positions.reshape(-1), [read_cell(value) for value in values]
    if str(getattr(column, "dtype", "")) in _OF_OBJECTS:
        column = np.asarray(column, dtype=object).tolist()
        if set(map(type, column)) == {str}:  # most columns of categories
            places: dict[str, int] = {}
            order = (places.setdefault(value, len(places)) for value in column)
            return np.fromiter(order, np.int64, len(column)), [read_cell(each) for each in places]
    cells: list[Cell] = []
    known: dict[tuple[type, Any], int] = {}
    positions = np.empty(len(column), dtype=np.int64)
    for row, value in enumerate(column):
        key = (type(value), value) if type(value) in _REMEMBERED else None
        place = None if key is None else known.get(key)
        if place is None:
            place = len(cells)
            cells.append(read_cell(value))
            if key is not None:
                known[key] = place
        positions[row] = place
    return positions, cells


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_GAPS = frozenset({"", "na", "n/a", "#n/a", "nan", "null", "none", "<na>", "nat"})


def parse_cell(text: str) -> Any:
    """Return what a field of a text file means: a number, a boolean, a date, text, or None.

    A date in an order that differs between countries (03/04/2024) stays text here.

    Example:
        >>> [parse_cell(text) for text in ("041", "1e3", "true", "N/A", "baker", "2024-02-30")]
        [41, 1000, True, None, 'baker', '2024-02-30']
        >>> parse_cell("2024-02-29") == parse_cell("29.02.2024")
        True
    """
    stripped = text.strip()
    lowered = stripped.lower()
    if lowered in _GAPS:
        return None
    if lowered in ("true", "false"):
        return lowered == "true"
    if stripped.isascii():
        if _NUMBER.fullmatch(stripped):
            return _decimal(stripped)
        if lowered.lstrip("+-") in ("inf", "infinity"):
            return float(lowered)
        date = parse_date(stripped)
        if date is not None:
            return date
    return text


def _decimal(text: str) -> int | float:
    """The number that a decimal text says, whatever its exponent."""
    try:
        value: int | float = _number(Decimal(text)).value
    except InvalidOperation:  # an exponent beyond those of decimals; floats know no such limit
        value = _number(float(text)).value
    return value


def parse_cells(column: Iterable[str]) -> np.ndarray[Any, Any]:
    """Return the fields of a column, each parsed by itself, as an array of objects."""
    known: dict[str, Any] = {}  # keys of one type, whose meaning is theirs alone
    values = [known[t] if t in known else known.setdefault(t, parse_cell(t)) for t in column]
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found
