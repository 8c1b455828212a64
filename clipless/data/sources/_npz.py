"""Tables in NumPy's .npz files, with features X and labels y, as ADBench publishes them."""

from __future__ import annotations

import io
import zipfile
import zlib
from typing import Any

from numpy.lib import format as npy
from numpy.typing import NDArray

from clipless.data._errors import DataFileError

_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def parse_npz(
    contents: bytes, *, shape: tuple[int, ...], where: object
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return X, of this shape, and y, one for each row. Nothing is unpickled.

    Shapes and types are read first, so that a false header does not allocate memory.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(contents)) as archive:
            found = {name.removesuffix(".npy") for name in archive.namelist()}
            if not {"X", "y"} <= found:
                raise DataFileError(f"{where} has {sorted(found)}, not X and y")
            features = _read(archive, "X", (shape,), where)
            labels = _read(archive, "y", ((shape[0],), (shape[0], 1)), where)
    except DataFileError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        raise DataFileError(
            f"{where} is a truncated or corrupt .npz file of {len(contents):,} bytes ({error}). "
            "Delete it and get it again."
        ) from error
    return features, labels.reshape(-1)


def _read(
    archive: zipfile.ZipFile, name: str, shapes: tuple[tuple[int, ...], ...], where: object
) -> NDArray[Any]:
    try:
        with archive.open(f"{name}.npy") as stream:
            shape, _, dtype = _HEADERS[npy.read_magic(stream)](stream)
    except (ValueError, KeyError) as error:
        raise DataFileError(f"{where}: {name} has no readable header ({error})") from error
    if dtype.kind not in "biuf":
        raise DataFileError(f"{where}: {name} holds values of type {dtype}, not numbers")
    if shape not in shapes:
        raise DataFileError(f"{where}: {name} has shape {shape}, expected {shapes[0]}")
    with archive.open(f"{name}.npy") as stream:
        try:
            return npy.read_array(stream, allow_pickle=False)
        except ValueError as error:
            raise DataFileError(f"{where}: {name} cannot be read ({error})") from error
