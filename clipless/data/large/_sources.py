"""Where pieces of a table come from: files, arrow, DuckDB, Polars. Each is read when it is asked.

Pieces have a bounded number of rows, and no more than a few are in memory at a time.
"""

from __future__ import annotations

import glob
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipless.data._errors import DataFileError, DataNotFoundError
from clipless.data._table import text_pieces, text_separator
from clipless.data.large._columns import Piece, arrow_piece, arrow_types

_PARQUET = (".parquet", ".pq")
_ARROW = (".arrow", ".ipc", ".feather")
_TEXT = (".csv", ".tsv")


@dataclass(frozen=True)
class Source:
    """Something that can be read in pieces, again and again."""

    name: str
    """What to call it in an error."""
    types: Any
    """A data frame without rows: the columns' names and types, which are public."""
    read: Callable[[Sequence[str] | None, int], Iterator[Piece]]
    """Yields the pieces: of some columns, each of about so many rows at most."""
    count: Callable[[], int] | None
    """How many rows there are, where that takes no reading."""


def is_source(given: Any) -> bool:
    """Whether `given` is a table that is read in pieces, rather than one in memory.

    Example:
        >>> is_source("people.parquet"), is_source([[1.0, 2.0]])
        (True, False)
    """
    if isinstance(given, str | os.PathLike):
        return True
    if isinstance(given, list | tuple):
        return bool(given) and all(isinstance(each, os.PathLike) for each in given)
    kind = type(given)
    origin, name = kind.__module__.partition(".")[0], kind.__name__
    if origin in ("duckdb", "_duckdb"):
        return name == "DuckDBPyRelation"
    if origin == "polars":
        return name in ("DataFrame", "LazyFrame")
    return origin == "pyarrow" and (name == "Table" or name.endswith("Dataset"))


def open_source(given: Any, separator: str | None = None) -> Source:
    """Return where to read a table from that `is_source` knows.

    Raises:
        DataNotFoundError: there are no such files.
        DataFileError: they are of an unknown kind, or of several.
        TypeError: it is nothing that can be read in pieces.
    """
    if isinstance(given, str | os.PathLike):
        return _files(_found(os.fspath(given)), separator)
    if isinstance(given, list | tuple) and is_source(given):
        return _files([Path(each) for each in given], separator)
    if not is_source(given):
        raise TypeError(
            f"a {type(given).__name__} cannot be read in pieces: give the path or pattern of "
            "Parquet, Arrow or CSV files, a pyarrow Dataset or Table, a DuckDB relation, or a "
            "Polars frame"
        )
    origin = type(given).__module__.partition(".")[0]
    if origin in ("duckdb", "_duckdb"):
        return _duckdb(given)
    return _polars(given) if origin == "polars" else _arrow(given, type(given).__name__)


def _found(pattern: str) -> list[Path]:
    if os.path.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), "*")
    paths = [Path(pattern)] if os.path.isfile(pattern) else map(Path, sorted(glob.glob(pattern)))
    found = [path for path in paths if path.is_file()]
    if not found:
        raise DataNotFoundError(f"there is no file {pattern}")
    return found


def _ending(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def _files(paths: list[Path], separator: str | None) -> Source:
    for path in paths:
        if not path.is_file():
            raise DataNotFoundError(f"there is no file {path}")
    endings = {_ending(path) for path in paths}
    name = str(paths[0]) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
    if endings <= set(_TEXT):
        return _text(paths, separator, name)
    if separator is not None:
        raise ValueError(f"{name}: only text tables have a separator")
    for known, kind in ((_PARQUET, "parquet"), (_ARROW, "ipc")):
        if endings <= set(known):
            dataset = _pyarrow("pyarrow.dataset")
            try:
                opened = dataset.dataset([str(path) for path in paths], format=kind)
            except Exception as error:  # pyarrow has errors of its own
                raise DataFileError(f"{name} cannot be read as {kind}: {error}") from error
            return _arrow(opened, name)
    raise DataFileError(
        f"{name}: names must end in .parquet, .arrow, .feather, .csv or .tsv, and all in the same"
    )


def _pyarrow(module: str = "pyarrow") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError("tables in pieces need pyarrow: pip install 'clipless[data]'") from error


def _arrow(given: Any, name: str) -> Source:
    """A pyarrow `Table` or `Dataset`."""
    in_memory = type(given).__name__ == "Table"

    def read(columns: Sequence[str] | None, rows: int) -> Iterator[Piece]:
        if in_memory:
            chosen = given if columns is None else given.select(list(columns))
            batches = chosen.to_batches(max_chunksize=rows)
        else:
            ahead: dict[str, Any] = {"batch_readahead": 2, "fragment_readahead": 1}
            arrow = _pyarrow("pyarrow.dataset")
            if isinstance(getattr(given, "format", None), arrow.ParquetFileFormat):
                # Otherwise all that was read of a file stays in memory up to its end.
                ahead["fragment_scan_options"] = arrow.ParquetFragmentScanOptions(pre_buffer=False)
            wanted = None if columns is None else list(columns)
            batches = given.to_batches(columns=wanted, batch_size=rows, **ahead)
        try:
            yield from (arrow_piece(batch) for batch in batches if len(batch))
        except OSError as error:  # pyarrow's own errors of files are of this kind
            raise DataFileError(f"{name} cannot be read: {error}") from error

    count = (lambda: given.num_rows) if in_memory else given.count_rows
    return Source(name, arrow_types(given.schema), read, count)


def _duckdb(relation: Any) -> Source:
    def reader(rows: int) -> Any:
        make = getattr(relation, "to_arrow_reader", None) or relation.fetch_record_batch
        return make(rows)

    def read(columns: Sequence[str] | None, rows: int) -> Iterator[Piece]:
        for batch in reader(rows):
            chosen = batch if columns is None else batch.select(list(columns))
            if len(chosen):
                yield arrow_piece(chosen)

    _pyarrow()
    return Source("the DuckDB relation", arrow_types(reader(1).schema), read, None)


def _polars(frame: Any) -> Source:
    if type(frame).__name__ == "DataFrame":

        def read(columns: Sequence[str] | None, rows: int) -> Iterator[Piece]:
            chosen = frame if columns is None else frame.select(list(columns))
            for part in chosen.iter_slices(rows):
                yield from map(arrow_piece, part.to_arrow().to_batches())

        schema = frame.head(0).to_arrow().schema
        return Source("the Polars frame", arrow_types(schema), read, lambda: len(frame))

    def lazily(columns: Sequence[str] | None, rows: int) -> Iterator[Piece]:
        chosen = frame if columns is None else frame.select(list(columns))
        for part in chosen.collect_batches(chunk_size=rows, maintain_order=True):
            for piece in part.iter_slices(rows):
                yield from map(arrow_piece, piece.to_arrow().to_batches())

    schema = frame.head(0).collect().to_arrow().schema
    return Source("the Polars query", arrow_types(schema), lazily, None)


def _text(paths: list[Path], separator: str | None, name: str) -> Source:
    def pieces(path: Path, rows: int) -> Iterator[Any]:
        return text_pieces(path, separator or text_separator(path), rows)

    heads = [next(pieces(path, 1)).iloc[:0] for path in paths]
    for path, head in zip(paths, heads, strict=True):
        if list(head.columns) != list(heads[0].columns):
            raise DataFileError(f"{path} has other columns than {paths[0]}")

    def read(columns: Sequence[str] | None, rows: int) -> Iterator[Piece]:
        for path in paths:
            for frame in pieces(path, rows):
                wanted = frame.columns if columns is None else columns
                if len(frame):
                    yield {column: frame[column] for column in wanted}

    return Source(name, heads[0], read, None)
