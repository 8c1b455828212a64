"""Labels of a classifier: as cells, which are told apart by type and value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.utils import column_or_1d

from clipless.data import Cell, read_cell, read_cells


@dataclass(frozen=True)
class Labels:
    """The labels of all rows: private, but for the type of their container."""

    positions: np.ndarray[Any, Any]
    """For each row, the place of its label in `cells`."""
    cells: list[Cell]
    dtype: np.dtype[Any]
    """The type of the container: objects, for lists, which have none."""
    is_list: bool


def read_labels(y: Any) -> Labels:
    """Return labels in the one form that each of them has.

    Example:
        >>> [cell.name for cell in read_labels([1, True, "1", None]).cells]
        ['number 1', 'boolean True', 'text 1', None]
    """
    is_list = isinstance(y, list | tuple)
    column: Any = y
    if is_list:
        # One by one: numpy would give all of them the type, or the shape, of the oddest one.
        column = np.empty(len(y), dtype=object)
        for row, label in enumerate(y):
            column[row] = _only(label)
    elif getattr(y, "ndim", 0) != 1 or isinstance(getattr(y, "dtype", None), np.dtype | None):
        column = column_or_1d(y, warn=True)
    # A column of pandas' own types keeps its type: as an array, it depends on whether values lack.
    dtype = getattr(column.dtype, "numpy_dtype", column.dtype)
    dtype = dtype if isinstance(dtype, np.dtype) else np.dtype(object)
    if dtype.kind == "c":
        raise ValueError("Complex data not supported: y must hold labels.")
    positions, cells = read_cells(column)
    return Labels(positions, cells, dtype, is_list)


def _only(label: Any) -> Any:
    """A label, or the one that a list or an array of one holds."""
    nested = isinstance(label, list | tuple) or (isinstance(label, np.ndarray) and label.ndim == 1)
    return label[0] if nested and len(label) == 1 else label


def declared_classes(given: Sequence[Any] | None, dtype: np.dtype[Any]) -> list[Cell] | None:
    """Return the classes that are public: those given, or those of a type of two values."""
    if given is None:
        return [read_cell(value) for value in (False, True)] if dtype.kind == "b" else None
    cells = [read_cell(value) for value in given]
    if any(cell.name is None for cell in cells):
        raise ValueError("classes holds a missing value, which is no label")
    if len({cell.name for cell in cells}) != len(cells):
        raise ValueError(f"classes holds a label twice: {list(given)}")
    if len(cells) < 2:
        raise ValueError(f"a classifier needs at least two classes, got classes={list(given)}")
    return sorted_cells(cells)


def same_labels(one: Any, other: Any) -> np.ndarray[Any, Any]:
    """Return for each row whether two columns of labels agree, in type and value.

    Example:
        >>> same_labels([1, 1, "a", None], [1.0, True, "a", None]).tolist()
        [True, False, True, False]
    """
    names = []
    for labels in (read_labels(one), read_labels(other)):
        known = np.array([cell.name for cell in labels.cells], dtype=object)
        names.append(known[labels.positions])
    return np.array([a is not None and a == b for a, b in zip(*names, strict=True)], dtype=bool)


def sorted_cells(cells: Iterable[Cell]) -> list[Cell]:
    """Return cells in an order of their own: by kind, then by value."""
    return sorted(cells, key=lambda cell: (cell.kind, cell.value))


def class_array(cells: Sequence[Cell], like: Labels) -> np.ndarray[Any, Any]:
    """Return classes in the type of the labels' container, those of lists in their own.

    Texts are as long as the longest class, whatever the longest label is.
    """
    values, dtype = [cell.value for cell in cells], like.dtype
    if dtype.kind in "biufM":
        return np.array(values, dtype=dtype)
    if dtype.kind in "US" or (like.is_list and len({cell.kind for cell in cells}) == 1):
        return np.array(values)
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found
