"""Bytes of files: read, inflated, and compared with a checksum."""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from pathlib import Path

from clipless.data._errors import DataFileError, DataNotFoundError
from clipless.data.sources._info import FileInfo

_CHUNK = 1 << 24
_LIMIT = 1 << 31
"""No data set here inflates to 2 GiB; a file that does is refused before it fills memory."""


def contents_of(path: Path, *, inflate: bool) -> bytes:
    """Return the bytes of a file; with `inflate`, those inside it if it is compressed by gzip."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise DataNotFoundError(f"there is no file {path}") from error
    except OSError as error:
        raise DataFileError(f"{path} cannot be read: {error}") from error
    return inflated(raw, where=path) if inflate else raw


def inflated(raw: bytes, *, where: object) -> bytes:
    """Return what is inside bytes compressed by gzip, all of it and intact; or the bytes as is."""
    if not raw.startswith(b"\x1f\x8b"):
        return raw
    chunks, size = [], 0
    try:
        with gzip.open(io.BytesIO(raw)) as stream:
            while size < _LIMIT and (chunk := stream.read(_CHUNK)):
                chunks.append(chunk)
                size += len(chunk)
    except (OSError, EOFError, zlib.error) as error:
        raise DataFileError(
            f"{where} is a truncated or corrupt gzip file of {len(raw):,} bytes ({error}). Delete "
            "it and get it again."
        ) from error
    if size >= _LIMIT:
        raise DataFileError(f"{where} inflates to more than {_LIMIT:,} bytes; it is no data set")
    return b"".join(chunks)


def holds_one_file(file: FileInfo) -> bool:
    """Whether the published file is one compressed file, whose checksum is that of its contents."""
    return file.name.endswith(".gz") and not file.name.endswith(".tar.gz")


def checksum(contents: bytes, *, like: str) -> str:
    """Return the checksum of `contents` by the algorithm of another one."""
    algorithm = like.partition(":")[0]
    digest = hashlib.new(algorithm, contents, usedforsecurity=False).hexdigest()
    return f"{algorithm}:{digest}"
