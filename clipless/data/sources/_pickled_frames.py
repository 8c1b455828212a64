"""Data frames inside pickles, read without running anything that a pickle may name.

Only the names below are known. pandas' classes are stood in for by recorders, so that what a file
says is data to look at, and does not depend on the version of pandas that wrote it. So are numpy's:
a type's state, which a file may give it, can make numpy read bytes as addresses of objects.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from clipless.common import MALFORMED_ERRORS
from clipless.data._errors import DataFileError

Columns = dict[str, np.ndarray[Any, Any]]


class _Recorded:
    """What a class of pandas was given: arguments and state."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


_SIMPLE = re.compile(r"([<>|=]?)([?biufcSUO])(\d{0,6})")
"""Numbers, texts and objects, by numpy's letters: nothing that is made of parts."""


class _Type:
    """A simple type of numpy, from what a pickle says of it; any other is refused."""

    def __init__(self, code: Any, *_: Any) -> None:
        found = _SIMPLE.fullmatch(code) if isinstance(code, str) else None
        if found is None:
            raise DataFileError(f"it has values of type {code!r}, which no table has")
        self._order, self._letter, self._size = found.groups()

    def __setstate__(self, state: Any) -> None:
        _, order, *parts = state[:5]
        if order not in tuple("<>|=") or any(part is not None for part in parts):
            raise DataFileError("it has values of a type that is made of parts")
        self._order = order

    def resolved(self) -> np.dtype[Any]:
        """Return numpy's type."""
        order = self._order if self._order in tuple("<>") else ""
        return np.dtype(f"{order}{self._letter}{self._size}")


class _Array:
    """An array of numpy, of simple values; empty before its state is known."""

    def __init__(self, values: Any = ()) -> None:
        self._values = np.asarray(values)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, columns_first, data = state
        self._values = _values(data, kind, shape, "F" if columns_first else "C")

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return self._values


def _values(data: Any, kind: Any, shape: Any, order: Any) -> np.ndarray[Any, Any]:
    """Return an array, from the bytes of its values or from a list of objects."""
    if not isinstance(kind, _Type) or order not in ("C", "F"):
        raise DataFileError("it has an array without a type")
    simple = kind.resolved()
    if not simple.hasobject:
        if not isinstance(data, bytes | bytearray):
            raise DataFileError("it has an array without bytes")
        flat = np.frombuffer(data, dtype=simple)
    elif isinstance(data, list):
        flat = np.empty(len(data), dtype=object)
        for place, each in enumerate(data):
            flat[place] = each
    else:
        raise DataFileError("it has objects that are not in a list")
    return flat.reshape(shape, order=order)


def _reconstructed(*_: Any) -> _Array:
    return _Array()


def _index(kind: Any, described: dict[str, Any]) -> Any:
    return described.get("data", range(int(described.get("stop", 0))))


def _known() -> dict[tuple[str, str], Callable[..., Any]]:
    names: dict[tuple[str, str], Callable[..., Any]] = {
        ("builtins", "slice"): slice,
        ("numpy", "dtype"): _Type,
        ("numpy", "ndarray"): _Array,
        ("pandas.core.indexes.base", "_new_Index"): _index,
        ("pandas._libs.internals", "_unpickle_block"): _Recorded,
        ("pandas.core.internals.managers", "BlockManager"): _Recorded,
        ("pandas.core.frame", "DataFrame"): _Recorded,
        ("pandas", "DataFrame"): _Recorded,  # as newer versions call it
    }
    for module in ("pandas.core.indexes.base", "pandas.core.indexes.range", "pandas"):
        names |= {(module, each): _Recorded for each in ("Index", "RangeIndex")}
    for core in ("numpy.core", "numpy._core"):
        names[core + ".multiarray", "_reconstruct"] = _reconstructed
        names[core + ".numeric", "_frombuffer"] = _array_of
    return names


def _array_of(data: Any, kind: Any, shape: Any, order: Any) -> _Array:
    return _Array(_values(data, kind, shape, order))


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _known()[module, name]
        except KeyError:
            raise DataFileError(f"it names {module}.{name}, which no table does") from None


def _listed(found: Any) -> Any:
    return np.asarray(found) if isinstance(found, _Array) else found


def read_pickled_frame(contents: bytes, *, where: object) -> Columns:
    """Return the columns of a pickled frame by their names."""
    try:
        frame = _Reader(io.BytesIO(contents)).load()
        blocks, axes = frame.state["_mgr"].arguments
        names = [str(name) for name in _listed(axes[0])]
        columns: Columns = {}
        for block in blocks:
            values, places, _ = block.arguments
            where_to = range(len(names))[places] if isinstance(places, slice) else _listed(places)
            for row, place in zip(np.asarray(values), where_to, strict=True):
                columns[names[place]] = row
        lengths = {len(column) for column in columns.values()}
        if len(columns) != len(names) or len(lengths) != 1:
            raise DataFileError("its columns do not make a table")
        return {name: columns[name] for name in names}
    except (pickle.UnpicklingError, EOFError, *MALFORMED_ERRORS, DataFileError) as error:
        raise DataFileError(f"{where} is no table that can be read: {error}") from error
