"""CIFAR-10's two layouts: binary records, and pickled dictionaries read without unpickling."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipless.data._errors import DataFileError
from clipless.data.sources._contents import inflated

_PIXELS = 3 * 32 * 32
_RECORD = 1 + _PIXELS
_MEMBER_LIMIT = 1 << 26

Batch = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""Pixels, (rows, 3072), and labels, (rows,)."""


def parse_binary_batch(contents: bytes, *, rows: int, where: object) -> Batch:
    """Read records of one label byte and 3 x 32 x 32 pixel bytes, red plane first."""
    if len(contents) != rows * _RECORD:
        wrong = "truncated" if len(contents) < rows * _RECORD else "too long"
        raise DataFileError(
            f"{where} is {wrong}: {rows:,} records of {_RECORD} bytes make "
            f"{rows * _RECORD:,}, and there are {len(contents):,}"
        )
    records = np.frombuffer(contents, np.uint8).reshape(rows, _RECORD)
    return records[:, 1:], records[:, 0]


def parse_python_batch(contents: bytes, *, rows: int, where: object) -> Batch:
    """Read a pickled dictionary with `data` and `labels`, trusting nothing in it.

    A pickle may call any function it can name. Here it can name the three that rebuild an array,
    and what it gets for them are stand-ins that only take notes.
    """
    try:
        table = _NotesOnly(io.BytesIO(contents), encoding="bytes").load()
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DataFileError(
            f"{where} is not a batch of CIFAR-10 in the python layout, or it is truncated or "
            f"corrupt ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(table, dict):
        raise DataFileError(f"{where} holds a {type(table).__name__}, not a dictionary")
    entries = {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in table.items()}
    data, labels = entries.get("data"), entries.get("labels")
    if not isinstance(data, _ArrayNotes) or not isinstance(labels, list):
        raise DataFileError(f"{where} has no array `data` and list `labels`")
    if len(labels) != rows or not all(type(v) is int and 0 <= v < 256 for v in labels):
        raise DataFileError(
            f"{where} has {len(labels)} labels, expected {rows} whole numbers in [0, 256)"
        )
    return data.pixels(rows, where), np.array(labels, np.uint8)


def read_members(contents: bytes, *, names: Sequence[str], where: object) -> list[bytes]:
    """Return the contents of files in a .tar or .tar.gz, by their names without folders.

    Nothing is written to disk, so that no path in the archive can lead anywhere.
    """
    found: dict[str, bytes] = {}
    plain = inflated(contents, where=where)
    try:
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                stream = archive.extractfile(member) if name in names and member.isreg() else None
                if stream is not None:
                    found[name] = stream.read(_MEMBER_LIMIT)
                if len(found) == len(names):
                    break
    except (tarfile.TarError, OSError) as error:
        raise DataFileError(
            f"{where} is a truncated or corrupt archive of {len(contents):,} bytes ({error}). "
            "Delete it and get it again."
        ) from error
    missing = [name for name in names if name not in found]
    if missing:
        raise DataFileError(f"{where} has no {', '.join(missing)} in it; it may be truncated")
    return [found[name] for name in names]


class _ArrayNotes:
    """What a pickle said about an array: its shape, its type, its bytes."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        self.state = state if isinstance(state, tuple) else ()

    def pixels(self, rows: int, where: object) -> NDArray[np.uint8]:
        """Return the array if it is `rows` rows of bytes, in C order, and nothing else."""
        if len(self.state) == 5:
            _, shape, dtype, fortran, raw = self.state
            good = isinstance(dtype, _TypeNotes) and dtype.is_byte and not fortran
            good = good and shape == (rows, _PIXELS) and isinstance(raw, bytes)
            if good and len(raw) == rows * _PIXELS:
                return np.frombuffer(raw, np.uint8).reshape(rows, _PIXELS)
        raise DataFileError(f"{where}: `data` is not an array of {rows} x {_PIXELS} bytes")


class _TypeNotes:
    """What a pickle said about a type."""

    def __init__(self, name: object = None, *_: object) -> None:
        self.is_byte = name in (b"u1", "u1")

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like: bytes have none."""


class _NotesOnly(pickle.Unpickler):
    """An unpickler for which the functions that rebuild arrays are stand-ins, and nothing else is.

    They are new functions every time: a pickle could change what it is handed.
    """

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return lambda *_: _ArrayNotes()
        if (module, name) == ("numpy", "dtype"):
            return lambda *arguments: _TypeNotes(*arguments)
        if (module, name) == ("numpy", "ndarray"):
            return lambda *_: None
        if (module, name) == ("_codecs", "encode"):
            # How Python 3 writes bytes in the protocol of Python 2.
            return lambda text, encoding: (
                str(text).encode("latin1") if encoding == "latin1" else b""
            )
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed")
