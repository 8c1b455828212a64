"""IDX, the format of MNIST and its relatives: a short header, then numbers, big end first."""

from __future__ import annotations

import math
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipless.data._errors import DataFileError
from clipless.data.sources._contents import contents_of

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: str | PathLike[str]) -> Tensor:
    """Read an IDX file, compressed by gzip or not, into a tensor of its shape and type.

    Bytes 0 and 1 are zero, byte 2 is the type, byte 3 the number of axes; the lengths of the axes
    follow with 4 bytes each. A file of any other length than that makes is refused.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "labels-idx1-ubyte"
        >>> _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3]) + bytes([7, 2, 1]))
        >>> read_idx(path)
        tensor([7, 2, 1], dtype=torch.uint8)
    """
    array = parse_idx(contents_of(Path(path), inflate=True), where=path)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))


def parse_idx(contents: bytes, *, where: object) -> NDArray[np.generic]:
    """Return the array in an IDX file's contents; `where` is what errors call it."""
    if len(contents) < 4 or contents[:2] != b"\0\0" or contents[2] not in _TYPES:
        raise DataFileError(
            f"{where} is not an IDX file: it begins with {contents[:4].hex(' ') or 'nothing'}, "
            "not with 00 00, a type and a number of axes"
        )
    dtype, axes = np.dtype(_TYPES[contents[2]]), contents[3]
    start = 4 + 4 * axes
    if len(contents) < start:
        raise DataFileError(f"{where} is truncated: it ends within its header of {start} bytes")
    shape = tuple(
        int.from_bytes(contents[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(axes)
    )
    expected = start + math.prod(shape) * dtype.itemsize
    if len(contents) != expected:
        wrong = "truncated" if len(contents) < expected else "too long"
        raise DataFileError(
            f"{where} is {wrong}: a header for shape {shape} makes {expected:,} bytes, and there "
            f"are {len(contents):,}"
        )
    try:
        return np.frombuffer(contents, dtype, offset=start).reshape(shape)
    except ValueError as error:
        raise DataFileError(f"{where} has a header of {axes} axes: {error}") from error
