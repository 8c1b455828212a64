"""How a run folder knows its data again: by digests with a key that only the folder has.

A plain digest of private data tells whoever can guess the data that the guess is right, row by row
where all other rows are known. With a key from the operating system it tells nothing to those who
do not have the key, which is kept in `private/`.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from clipless.common._release import fresh_bits
from clipless.runs._data import RunData
from clipless.runs._errors import RunFolderError
from clipless.runs._folder import DATA, KEY, read_json, write_json

_NOTE = (
    "keyed digests of the private training data and of the test data; the key is in private/. Not "
    "covered by the guarantee: keep this file as you keep the data"
)
_PARTS = ("train", "test")


def data_digests(data: RunData) -> dict[str, Any]:
    """Return what data are known again by: sizes, and digests of both parts. Keep it in memory."""
    return {
        "kind": data.kind,
        "input_shape": list(data.input_shape),
        "classes": data.classes,
        "verified": data.verified,
        "train": {"size": len(data.train[0]), "sha256": _digest(data.train)},
        "test": {"size": len(data.test[0]), "sha256": _digest(data.test)},
    }


def write_digests(folder: Path, found: Mapping[str, Any]) -> None:
    """Write `data.json` for what `data_digests` found, with a new key."""
    path = folder / KEY
    path.parent.mkdir(mode=0o700, exist_ok=True)
    key = fresh_bits(256).to_bytes(32)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(key)
    keyed = {part: _keyed(found[part], key) for part in _PARTS}
    write_json(folder, DATA, {"note": _NOTE, **found, **keyed}, kind="data")


def check_data(folder: Path, data: RunData) -> None:
    """Refuse data that are not those that the run was made with."""
    check_digests(folder, data_digests(data))


def check_digests(folder: Path, found: Mapping[str, Any]) -> None:
    """Refuse data by what `data_digests` found. Folders of earlier versions have no key."""
    expected = read_json(folder, DATA, kind="data")
    for part in _PARTS:
        then, now = expected.get(part), found[part]
        if not isinstance(then, dict):
            raise RunFolderError(f"{folder / DATA} was damaged: it says nothing of the {part} data")
        if "hmac_sha256" in then:
            now = _keyed(now, _key(folder))
        if then != now:
            contents = ", of other contents" if then.get("size") == now["size"] else ""
            raise RunFolderError(
                f"the {part} data are not those of the run in {folder}: it had {then.get('size')} "
                f"examples, here are {now['size']}{contents}. Restore the data that it was trained "
                "on."
            )


def _key(folder: Path) -> bytes:
    try:
        return (folder / KEY).read_bytes()
    except OSError as error:
        raise RunFolderError(
            f"{folder / KEY} cannot be read: {error.strerror}. Without it, nobody can tell whether "
            "data are those of the run: restore it."
        ) from error


def _keyed(part: Mapping[str, Any], key: bytes) -> dict[str, Any]:
    digest = hmac.new(key, bytes.fromhex(part["sha256"]), hashlib.sha256).hexdigest()
    return {"size": part["size"], "hmac_sha256": digest}


def _digest(pair: tuple[Any, Any]) -> str:
    digest = hashlib.sha256()
    for part in pair:
        if isinstance(part, Tensor):
            digest.update(f"{tuple(part.shape)} {part.dtype}".encode())
            digest.update(part.detach().cpu().contiguous().numpy().data)
        else:  # a data frame or a column of one
            import pandas

            digest.update(str(part.shape).encode())
            digest.update(pandas.util.hash_pandas_object(part, index=False).to_numpy().tobytes())
    return digest.hexdigest()
