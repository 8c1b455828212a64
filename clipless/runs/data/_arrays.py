"""Arrays of one's own: a .npz file with `x` and `y`, and perhaps `x_test` and `y_test`."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clipless.common import MALFORMED_ERRORS, error_text
from clipless.data import DataFileError, DataNotFoundError


def read_arrays(path: Path) -> dict[str, Any]:
    """Return inputs as float32 (rows, ...) and class labels as int64 (rows,), by name.

    Whole numbers of 8 bits are pixels: they are divided by 255, and `pixels` is True. Grey images
    without an axis for channels get one. Nothing is unpickled.

    Raises:
        DataNotFoundError: there is no such file.
        DataFileError: it is not what it should be; the array is named.
    """
    if not path.is_file():
        raise DataNotFoundError(f"there is no file {path}")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (
        OSError,
        EOFError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
        *MALFORMED_ERRORS,
    ) as error:
        # zipfile raises RuntimeError and NotImplementedError for what it does not unpack
        raise DataFileError(f"{path} is not a readable .npz file: {error_text(error)}") from error
    names = {"x", "y"} | ({"x_test", "y_test"} if {"x_test", "y_test"} & set(arrays) else set())
    if set(arrays) != names:
        raise DataFileError(
            f"{path} holds {', '.join(arrays) or 'nothing'}: it must hold x and y, or x, y, x_test "
            "and y_test"
        )
    found: dict[str, Any] = {"pixels": arrays["x"].dtype == np.uint8}
    for part in ("", "_test") if len(names) == 4 else ("",):
        found[f"x{part}"] = _inputs(arrays[f"x{part}"], f"x{part} of {path}")
        found[f"y{part}"] = _labels(
            arrays[f"y{part}"], len(found[f"x{part}"]), f"y{part} of {path}"
        )
    if len(names) == 4 and (
        arrays["x"].dtype != arrays["x_test"].dtype
        or found["x"].shape[1:] != found["x_test"].shape[1:]
    ):
        raise DataFileError(f"x and x_test of {path} differ in type or in the shape of an example")
    return found


def _inputs(array: Any, what: str) -> Tensor:
    if array.dtype.kind not in "fiub" or not 2 <= array.ndim <= 4 or len(array) < 8:
        raise DataFileError(
            f"{what} must be numbers of shape (rows, features), (rows, height, width) or (rows, "
            f"channels, height, width), at least 8 rows; got {array.dtype} of shape {array.shape}"
        )
    inputs = torch.from_numpy(array.astype(np.float32))
    if array.dtype == np.uint8:
        inputs = inputs / 255.0
    return inputs[:, None] if inputs.ndim == 3 else inputs


def _labels(array: Any, rows: int, what: str) -> Tensor:
    if array.dtype.kind not in "iub" or array.shape != (rows,):
        raise DataFileError(
            f"{what} must be {rows} class numbers; got {array.dtype} of shape {array.shape}"
        )
    return torch.from_numpy(array.astype(np.int64))
