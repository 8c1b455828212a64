"""Tables of people's data: CSV and parquet files, through pandas."""

from __future__ import annotations

import difflib
import importlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clipless.data._cells import parse_cells
from clipless.data._errors import DataFileError, DataNotFoundError

_PARQUET = (".parquet", ".pq")
_SEPARATORS = {".csv": ",", ".tsv": "\t"}


def read_table(
    path: str | os.PathLike[str], *, target: str, separator: str | None = None
) -> tuple[Any, Any]:
    """Read a table and take one column as the target: a pandas DataFrame and a pandas Series.

    `.csv`, `.tsv` (either may end in `.gz`) and `.parquet` files are known by their endings;
    `separator` is for text files that use another one. A parquet file has types, which are public.
    A text file has none, and guessing one for a column would tell of its rows: each field is read
    by itself, as a number, a boolean, a date (2024-02-29), text or None, and columns hold objects.
    The estimators find out privately which columns hold numbers. Where rows and fields begin and
    end, by line ends and quotes, is public; what a row then holds never stops the others from being
    read: fields beyond those of the header are ignored, those that lack are None, and bytes that
    are no UTF-8 become escapes.

    Raises:
        DataNotFoundError: there is no such file.
        DataFileError: it cannot be read, is empty, has a column twice, or has no such target.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "people.csv"
        >>> _ = path.write_text("age,job,income\\n41,baker,1\\n27,,0\\n")
        >>> features, target = read_table(path, target="income")
        >>> list(features.columns), target.tolist()
        (['age', 'job'], [1, 0])
    """
    table = read_rows(path, separator=separator)
    _check(table, Path(path), target)
    return table.drop(columns=target), table[target]


def read_rows(path: str | os.PathLike[str], *, separator: str | None = None) -> Any:
    """Read a table without a target: a pandas DataFrame, as `read_table` reads it."""
    path = Path(path)
    if not path.is_file():
        raise DataNotFoundError(f"there is no file {path}")
    ending = Path(path.name.removesuffix(".gz")).suffix.lower()
    if ending in _PARQUET:
        if separator is not None:
            raise ValueError("a parquet file has no separator")
        table = _parquet(path)
    elif ending in _SEPARATORS:
        table = _text(path, separator or _SEPARATORS[ending])
    else:
        raise DataFileError(
            f"{path}: the name must end in .csv, .tsv (or .gz after it) or .parquet"
        )
    return table


def _pandas() -> Any:
    try:
        return importlib.import_module("pandas")
    except ImportError as error:
        raise ImportError("tables need pandas: pip install 'clipless[data]'") from error


def _parquet(path: Path) -> Any:
    pandas = _pandas()
    try:
        return pandas.read_parquet(path)
    except ImportError as error:
        raise ImportError(f"{path}: parquet needs pyarrow: pip install 'clipless[data]'") from error
    except Exception as error:  # pyarrow has errors of its own
        raise DataFileError(f"{path} is not a readable parquet file: {error}") from error


def _text(path: Path, separator: str) -> Any:
    return next(text_pieces(path, separator, None))


def text_separator(path: Path) -> str:
    """Return the usual separator of a text table, by the ending of its name."""
    return _SEPARATORS[Path(path.name.removesuffix(".gz")).suffix.lower()]


def text_pieces(path: Path, separator: str, rows: int | None) -> Iterator[Any]:
    """Yield data frames of so many rows of a text table, or one of all; each value by itself."""
    pandas = _pandas()
    try:
        # pandas renames a column that comes twice, and a copy of the target would be a feature.
        options = {"sep": separator, "dtype": str}
        header = pandas.read_csv(
            path, header=None, nrows=1, encoding_errors="surrogateescape", **options
        )
        names = header.iloc[0].dropna().tolist()
        "".join(names).encode()  # the header, unlike a row, must be UTF-8
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DataFileError(f"{path} has columns twice: {', '.join(twice)}")
        # A row of more fields than there are names loses the others, and no other row is touched.
        found = pandas.read_csv(
            path,
            keep_default_na=False,
            index_col=False,
            usecols=range(header.shape[1]),
            encoding_errors="backslashreplace",
            chunksize=rows,
            **options,
        )
        for table in [found] if rows is None else found:
            cells = {name: parse_cells(table[name]) for name in table.columns}
            yield pandas.DataFrame(cells, index=table.index, dtype=object)
    except pandas.errors.EmptyDataError as error:
        raise DataFileError(f"{path} is empty") from error
    except DataFileError:
        raise
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise DataFileError(f"{path} is not a readable text table: {error}") from error


def _check(table: Any, path: Path, target: str) -> None:
    columns = [str(column) for column in table.columns]
    if target not in table.columns:
        near = difflib.get_close_matches(target, columns, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        if len(columns) == 1:
            hint = " There is a single column: is the separator right?"
        shown = ", ".join(columns[:20]) + (", ..." if len(columns) > 20 else "")
        raise DataFileError(f"{path} has no column {target!r}.{hint} It has {shown}.")
    if not table.columns.is_unique:
        raise DataFileError(f"{path} has columns of the same name: {', '.join(columns)}")
    if len(columns) == 1:
        raise DataFileError(f"{path} has no column besides the target {target!r}")
    if len(table) == 0:
        raise DataFileError(f"{path} has columns, but no rows")
