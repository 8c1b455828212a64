"""Tables as numbers: which columns there are, and their values as private rows hold them.

The schema (number of columns, their names, which of them hold categories) is public. Values are
turned into numbers row by row, by rules that are fixed beforehand: numbers stay numbers, dates
become days, categories are hashed. So nothing is learned from the data here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

HASH_BUCKETS = 1024
"""How many buckets categories are hashed into; one more is for missing values."""


@dataclass(frozen=True)
class Schema:
    """The public description of a table's columns, in their order."""

    names: tuple[str, ...] | None
    """Column names, if the table has names, all of them strings."""
    categorical: tuple[bool, ...]
    """For each column, whether it holds categories."""

    @property
    def numeric(self) -> int:
        """How many columns hold numbers."""
        return len(self.categorical) - sum(self.categorical)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        names = None if self.names is None else list(self.names)
        return {"names": names, "categorical": list(self.categorical)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Schema:
        """Restore what `to_dict` returned."""
        names = None if data["names"] is None else tuple(data["names"])
        return cls(names=names, categorical=tuple(data["categorical"]))


def read_schema(columns: Sequence[Any], names: Any, categorical: Any) -> Schema:
    """Describe columns: categorical are those that are declared so, or hold text.

    `categorical` is None, or the names or positions of the categorical columns.
    """
    known = None if names is None else tuple(str(each) for each in names)
    if categorical is None:
        return Schema(known, tuple(_holds_categories(each) for each in columns))
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
    return Schema(known, tuple(index in chosen for index in range(len(columns))))


def columns_of(table: Any) -> tuple[list[Any], Any]:
    """Return the columns of a data frame or a two-dimensional array, and their names if any."""
    if hasattr(table, "columns") and hasattr(table, "iloc"):
        columns = [table.iloc[:, index] for index in range(table.shape[1])]
        strings = all(isinstance(each, str) for each in table.columns)
        return columns, list(table.columns) if strings else None
    return [table[:, index] for index in range(table.shape[1])], None


def encode(columns: Sequence[Any], schema: Schema) -> tuple[Tensor, Tensor]:
    """Return the table's numbers, (n, p) with NaN where missing, and bucket numbers, (n, q)."""
    numbers = [
        _numbers(column, _name(schema, index))
        for index, column in enumerate(columns)
        if not schema.categorical[index]
    ]
    codes = [_codes(column) for index, column in enumerate(columns) if schema.categorical[index]]
    rows = len(columns[0]) if columns else 0
    return (
        torch.from_numpy(np.stack(numbers, 1) if numbers else np.zeros((rows, 0))),
        torch.from_numpy(np.stack(codes, 1) if codes else np.zeros((rows, 0), dtype=np.int64)),
    )


def _name(schema: Schema, index: int) -> str:
    return f"column {index}" if schema.names is None else f"column {schema.names[index]!r}"


def _holds_categories(column: Any) -> bool:
    """Whether the column's type, or for columns without a type its first value, says text."""
    kind = getattr(column.dtype, "kind", "O")
    if str(column.dtype) in ("category", "string", "str"):
        return True
    if kind in "OUS":
        if kind != "O":
            return True
        # A column of objects has no type: it is text if any of its values is.
        return any(isinstance(value, str | bytes) for value in column)
    return False


def _numbers(column: Any, name: str) -> np.ndarray[Any, Any]:
    kind = getattr(column.dtype, "kind", "O")
    if kind == "M":
        days = np.asarray(column, dtype="datetime64[s]")
        values = (days - np.datetime64("2000-01-01")) / np.timedelta64(1, "D")
        return np.where(np.isnat(days), np.nan, values.astype(np.float64))
    if kind == "m":
        spans = np.asarray(column, dtype="timedelta64[s]")
        return np.where(np.isnat(spans), np.nan, spans / np.timedelta64(1, "D"))
    if kind == "c":
        raise ValueError(f"Complex data not supported: {name} holds complex numbers.")
    try:
        if hasattr(column, "to_numpy"):
            values = column.to_numpy(dtype=np.float64, na_value=np.nan)
        elif kind == "O":
            values = np.array([np.nan if v is None else v for v in column], dtype=np.float64)
        else:
            values = np.asarray(column, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} holds values that are not numbers ({error}). Make it a text column, or name "
            "it in categorical_features."
        ) from error
    return np.ascontiguousarray(values)


def _codes(column: Any) -> np.ndarray[Any, Any]:
    """The hash bucket of every value; `HASH_BUCKETS` where it is missing."""
    seen: dict[Any, int] = {}
    codes = np.empty(len(column), dtype=np.int64)
    for row, value in enumerate(column):
        code = seen.get(value)
        if code is None:
            code = seen[value] = bucket(value)
        codes[row] = code
    return codes


def bucket(value: Any) -> int:
    """Return the bucket of a category: a hash that is the same everywhere and always.

    >>> bucket("blue") == bucket("blue"), bucket(3) == bucket(3.0), bucket(None)
    (True, True, 1024)
    """
    if value is None or value != value or str(value) in ("<NA>", "NaT"):
        return HASH_BUCKETS
    if isinstance(value, bytes):
        value = value.decode("utf-8", errors="replace")
    if isinstance(value, float | np.floating) and float(value).is_integer():
        value = int(value)
    digest = hashlib.blake2b(str(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HASH_BUCKETS
