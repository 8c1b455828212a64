"""Columns of a piece of a table, in the form in which each value is looked at once."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import numpy as np


class Repeated(NamedTuple):
    """A column of few different values: those values, and for each row the place of its own."""

    values: Any
    places: np.ndarray[Any, Any]


Piece = dict[str, Any]
"""Columns by name: an array, a pandas column, or `Repeated`; all of one length."""


def arrow_piece(batch: Any) -> Piece:
    """Return the columns of a record batch of pyarrow."""
    columns = zip(batch.schema.names, batch.columns, strict=True)
    return {name: _arrow_column(column) for name, column in columns}


def arrow_types(schema: Any) -> Any:
    """Return a data frame without rows whose columns have the types of an arrow schema."""
    pyarrow = importlib.import_module("pyarrow")
    plain = [
        field.with_type(_plain_type(pyarrow, field.type)).with_metadata(None) for field in schema
    ]
    return pyarrow.schema(plain).empty_table().to_pandas(ignore_metadata=True)


def length(piece: Piece) -> int:
    """Return the number of rows of a piece."""
    first = next(iter(piece.values()))
    return len(first.places if isinstance(first, Repeated) else first)


def taken(piece: Piece, rows: np.ndarray[Any, Any]) -> Piece:
    """Return those rows of a piece for which `rows` is True."""
    return {name: _taken(column, rows) for name, column in piece.items()}


def _taken(column: Any, rows: np.ndarray[Any, Any]) -> Any:
    if isinstance(column, Repeated):
        return Repeated(column.values, column.places[rows])
    return column.iloc[rows.nonzero()[0]] if hasattr(column, "iloc") else column[rows]


def _plain_type(pyarrow: Any, kind: Any) -> Any:
    """Types of text, categories and dates as pandas knows them."""
    types = pyarrow.types
    if types.is_timestamp(kind) or types.is_date(kind):
        return pyarrow.timestamp("us")
    if types.is_dictionary(kind):
        return pyarrow.dictionary(pyarrow.int32(), _plain_type(pyarrow, kind.value_type))
    for view in ("is_string_view", "is_large_string"):
        if getattr(types, view, lambda kind: False)(kind):
            return pyarrow.string()
    return kind


def _arrow_column(column: Any) -> Any:
    pyarrow = importlib.import_module("pyarrow")
    types, kind = pyarrow.types, column.type
    if types.is_integer(kind) or types.is_floating(kind):
        return column.to_numpy(zero_copy_only=False)
    if types.is_timestamp(kind) or types.is_date(kind):
        return _dates(pyarrow, column)
    text = types.is_string(kind) or types.is_large_string(kind)
    if getattr(types, "is_string_view", lambda kind: False)(kind):
        column, text = column.cast(pyarrow.large_string()), True
    if text:
        column = column.dictionary_encode()
    if text or types.is_dictionary(kind):
        values = np.empty(len(column.dictionary) + 1, dtype=object)  # the last one for gaps
        values[:-1] = _values(pyarrow, column.dictionary)
        places = column.indices.cast(pyarrow.int64()).fill_null(len(values) - 1)
        return Repeated(values, places.to_numpy(zero_copy_only=False))
    if any(getattr(types, f"is_{name}")(kind) for name in _SAFE):
        return column.to_pandas()
    found = np.empty(len(column), dtype=object)
    found[:] = _each(column)
    return found


_SAFE = ("boolean", "null", "decimal", "duration", "binary", "large_binary", "fixed_size_binary")
"""Types of which pandas holds every value; of the others, one value alone may be refused."""


def _each(column: Any) -> list[Any]:
    """The values one by one: those that Python has no value for, such as 25 o'clock, are gaps."""
    found = list[Any]()
    for value in column:
        try:
            found.append(value.as_py())
        except (ValueError, OverflowError, ArithmeticError, TypeError):
            found.append(None)
    return found


def _values(pyarrow: Any, dictionary: Any) -> list[Any]:
    """The values of a dictionary; text that is no UTF-8, of one row, must not stop the others."""
    if not pyarrow.types.is_string(dictionary.type) and not pyarrow.types.is_large_string(
        dictionary.type
    ):
        return _each(dictionary)
    raw = dictionary.cast(pyarrow.large_binary()).to_pylist()
    return [None if each is None else each.decode("utf-8", "backslashreplace") for each in raw]


_MICROSECONDS = {"s": 1_000_000, "ms": 1_000, "us": 1}


def _dates(pyarrow: Any, column: Any) -> np.ndarray[Any, Any]:
    """Dates in microseconds, without a time zone; what lies too far away is cut, value by value."""
    missing = column.is_null().to_numpy(zero_copy_only=False)
    if pyarrow.types.is_date32(column.type):
        whole, scale = column.cast(pyarrow.int32()).cast(pyarrow.int64()), 86_400_000_000
    else:
        unit = "ms" if pyarrow.types.is_date64(column.type) else column.type.unit
        whole, scale = column.cast(pyarrow.int64()), _MICROSECONDS.get(unit, 0)
    values = whole.fill_null(0).to_numpy(zero_copy_only=False)
    furthest = 2**62 // max(scale, 1)
    # A unit that is not in the table is nanoseconds.
    values = np.clip(values, -furthest, furthest) * scale if scale else values // 1_000
    found = values.astype("datetime64[us]")
    found[missing] = np.datetime64("NaT")
    return found
