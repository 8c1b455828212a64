"""Rows of a table larger than memory: encoded in one reading, and kept in files from then on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clipless.data import Cell, LargeTable, Piece, Repeated, Scratch, ScratchColumn
from clipless.sklearn._labels import Labels, read_labels
from clipless.sklearn.tables._table import Rows, Schema, encode

_SHORT = ("float32", "float16", "int8", "int16", "uint8", "uint16", "bool")
"""Types whose values are numbers of 32 bits, without rounding."""


@dataclass(frozen=True)
class LargeRows:
    """The rows of a table, and what is known of their target, as tensors in files."""

    table: Rows
    labels: Labels | None
    """The target's labels, or None if it is a number."""
    target: Tensor
    """Each row's place among the labels; or the number, NaN where there is none."""
    scratch: Scratch


def check_target(table: LargeTable, target: Any) -> None:
    """Raise `ValueError` unless `target` names a column of the table, and there are others."""
    if not isinstance(target, str):
        raise ValueError(
            f"of a table that is read in pieces, y is the name of the column to predict, not a "
            f"{type(target).__name__}: fit({table.name!r}, 'column')"
        )
    if target not in table.names:
        raise ValueError(
            f"{table.name} has no column {target!r} to predict. It has {', '.join(table.names)}."
        )
    if len(table.names) < 2:
        raise ValueError(f"{table.name} has no column besides the target {target!r}")


def read_large(table: LargeTable, target: str, schema: Schema, *, numeric: bool) -> LargeRows:
    """Read a table once: all rows, encoded by a schema that is public, and their target."""
    names = [name for name in table.names if name != target]
    types = table.types[names].dtypes
    short = all(
        str(kind) in _SHORT
        for kind, held in zip(types, schema.kinds, strict=True)
        if held in ("number", None)
    )
    written = [table.scratch.column() for _ in range(4)]
    growing = _GrowingLabels(table.types[target], numeric=numeric)
    for piece in table.pieces():
        rows = encode_piece(piece, names, schema)
        numbers = rows.numbers.float() if short else rows.numbers
        codes, votes = rows.codes.to(torch.int16), rows.votes.to(torch.int8)
        found = growing.append(piece[target])
        for column, part in zip(written, (numbers, codes, votes, found), strict=True):
            column.append(part)
    numbers, codes, votes, places = _finished(written, table)
    return LargeRows(Rows(numbers, codes, votes), growing.labels(), places, table.scratch)


def _finished(written: Sequence[ScratchColumn], table: LargeTable) -> list[Tensor]:
    try:
        return [column.finish() for column in written]
    except ValueError as error:
        raise ValueError(f"{table.name} has columns, but no rows") from error


def encode_piece(piece: Piece, names: Sequence[str], schema: Schema) -> Rows:
    """Return the rows of a piece as `encode` would; of a repeated value, once."""
    parts = []
    for at, name in enumerate(names):
        one = Schema(None, (schema.kinds[at],), (0,) if at in schema.day_first else ())
        column = piece[name]
        if isinstance(column, Repeated):
            places = torch.from_numpy(np.array(column.places, dtype=np.int64))
            parts.append(Rows(*(part[places] for part in encode([column.values], one))))
        else:
            parts.append(encode([column], one))
    return Rows(*(torch.cat(columns, 1) for columns in zip(*parts, strict=True)))


class _GrowingLabels:
    """The labels of all pieces read so far, numbered as they come."""

    def __init__(self, column: Any, *, numeric: bool) -> None:
        self._like, self._numeric = read_labels(column), numeric
        self._cells, self._places = list[Cell](), dict[str | None, int]()

    def append(self, column: Any) -> Tensor:
        """Return, for the rows of a piece, their labels' places, or their numbers."""
        places, values = None, column
        if isinstance(column, Repeated):
            places, values = np.asarray(column.places), column.values
        labels = read_labels(values)
        if self._numeric:
            of_each = np.array([cell.number for cell in labels.cells], dtype=np.float64)
        else:
            of_each = np.array([self._place(cell) for cell in labels.cells], dtype=np.int64)
        found = of_each[labels.positions]
        return torch.from_numpy(found if places is None else found[places])

    def _place(self, cell: Cell) -> int:
        if cell.name not in self._places:
            self._places[cell.name] = len(self._cells)
            self._cells.append(cell)
        return self._places[cell.name]

    def labels(self) -> Labels | None:
        """Return the labels as `read_labels` does, without the rows' own places."""
        return None if self._numeric else replace(self._like, cells=self._cells)
