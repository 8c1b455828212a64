"""Vectors of texts on the disk, found again by what they were made of."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from clipless.errors import DamagedFileError

Vectors = NDArray[np.float32]
_KEY_BYTES = 16


class VectorCache:
    """A folder of vectors, each under a digest of its text; one subfolder for each encoder.

    The folder holds private data: vectors tell of the texts that they were made of, and digests
    tell who knows a text that it is there. Keep it as the texts are kept.

    Example:
        >>> import tempfile
        >>> cache = VectorCache(tempfile.mkdtemp(), encoder="lengths")
        >>> encode = lambda texts: np.array([[len(text)] for text in texts], dtype=np.float32)
        >>> cache.get(["a", "bcd"], encode).ravel().tolist()
        [1.0, 3.0]
        >>> cache.get(["bcd"], None).ravel().tolist()
        [3.0]
    """

    def __init__(self, folder: str | os.PathLike[str], *, encoder: str) -> None:
        name = hashlib.blake2b(encoder.encode(), digest_size=_KEY_BYTES).hexdigest()
        self._folder = Path(folder) / name

    def get(self, texts: Sequence[str], encode: object) -> Vectors:
        """Return the vectors of texts; those that are not there are made by `encode` and kept."""
        keys = [_key(text) for text in texts]
        with self._locked():
            known = self._read()
        lacking = {key: text for key, text in zip(keys, texts, strict=True) if key not in known}
        if lacking:
            if not callable(encode):
                raise DamagedFileError(f"{self._folder} has no vectors for {len(lacking)} texts")
            made = np.ascontiguousarray(encode(list(lacking.values())), dtype=np.float32)
            known |= dict(zip(lacking, made, strict=True))
            self._append(list(lacking), made)
        return np.stack([known[key] for key in keys])

    @property
    def _files(self) -> tuple[Path, Path]:
        return self._folder / "keys", self._folder / "vectors.npy-rows"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self._folder / "lock"):
            yield

    def _read(self) -> dict[bytes, Vectors]:
        """All vectors by their keys. What a killed process has written by half is not counted."""
        keys_file, vectors_file = self._files
        if not keys_file.is_file() or not vectors_file.is_file():
            return {}
        data = keys_file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        keys = [
            data[start : start + _KEY_BYTES]
            for start in range(8, len(data) - _KEY_BYTES + 1, _KEY_BYTES)
        ]
        values = np.fromfile(vectors_file, dtype="<f4")
        if size < 1 or len(values) < size * len(keys):
            raise DamagedFileError(f"{self._folder} is damaged: delete it, and it is made anew")
        return dict(zip(keys, values[: size * len(keys)].reshape(-1, size), strict=True))

    def _append(self, keys: list[bytes], vectors: Vectors) -> None:
        """Write vectors first and keys last: keys say how much of the file counts."""
        keys_file, vectors_file = self._files
        with self._locked():
            there = self._read()
            size = vectors.shape[1]
            if there and len(next(iter(there.values()))) != size:
                raise DamagedFileError(
                    f"{self._folder} holds vectors of another length than {size}: the encoder has "
                    "changed. Use another folder for it."
                )
            new = [place for place, key in enumerate(keys) if key not in there]
            vectors_file.touch()
            with vectors_file.open("r+b") as file:
                file.truncate(len(there) * size * 4)
                file.seek(0, os.SEEK_END)
                file.write(vectors[new].astype("<f4").tobytes())
                file.flush()
                os.fsync(file.fileno())
            listed = size.to_bytes(8, "little") + b"".join(
                [*there, *(keys[place] for place in new)]
            )
            partial = keys_file.with_suffix(".partial")
            partial.write_bytes(listed)
            os.replace(partial, keys_file)


def _key(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).digest()
