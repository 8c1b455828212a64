"""Data frames inside pickles, read without running anything that a pickle may name.

Only the names below are known. pandas' classes are stood in for by recorders, so that what a file
says is data to look at, and does not depend on the version of pandas that wrote it.
"""

from __future__ import annotations

import io
import pickle
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


def _index(kind: Any, described: dict[str, Any]) -> Any:
    return described.get("data", range(int(described.get("stop", 0))))


def _known() -> dict[tuple[str, str], Callable[..., Any]]:
    reduced: Any = np.empty(0).__reduce__()
    names: dict[tuple[str, str], Callable[..., Any]] = {
        ("builtins", "slice"): slice,
        ("numpy", "dtype"): np.dtype,
        ("numpy", "ndarray"): np.ndarray,
        ("pandas.core.indexes.base", "_new_Index"): _index,
        ("pandas._libs.internals", "_unpickle_block"): _Recorded,
        ("pandas.core.internals.managers", "BlockManager"): _Recorded,
        ("pandas.core.frame", "DataFrame"): _Recorded,
        ("pandas", "DataFrame"): _Recorded,  # as newer versions call it
    }
    for module in ("pandas.core.indexes.base", "pandas.core.indexes.range", "pandas"):
        names |= {(module, each): _Recorded for each in ("Index", "RangeIndex")}
    for core in ("numpy.core", "numpy._core"):
        names[core + ".multiarray", "_reconstruct"] = reduced[0]
        names[core + ".numeric", "_frombuffer"] = _array_of
    return names


def _array_of(data: Any, dtype: Any, shape: Any, order: Any) -> Any:
    return np.frombuffer(data, dtype=dtype).reshape(shape, order=order)


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _known()[module, name]
        except KeyError:
            raise DataFileError(f"it names {module}.{name}, which no table does") from None


def read_pickled_frame(contents: bytes, *, where: object) -> Columns:
    """Return the columns of a pickled frame by their names."""
    try:
        frame = _Reader(io.BytesIO(contents)).load()
        blocks, axes = frame.state["_mgr"].arguments
        names = [str(name) for name in axes[0]]
        columns: Columns = {}
        for block in blocks:
            values, places, _ = block.arguments
            where_to = range(len(names))[places] if isinstance(places, slice) else places
            for row, place in zip(np.asarray(values), where_to, strict=True):
                columns[names[place]] = row
        lengths = {len(column) for column in columns.values()}
        if len(columns) != len(names) or len(lengths) != 1:
            raise DataFileError("its columns do not make a table")
        return {name: columns[name] for name in names}
    except (pickle.UnpicklingError, EOFError, *MALFORMED_ERRORS, DataFileError) as error:
        raise DataFileError(f"{where} is no table that can be read: {error}") from error
