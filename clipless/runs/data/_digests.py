"""Keyed digests, by which a run folder recognises its data; only the folder has the key.

A plain digest of private data tells whoever can guess the data that the guess is right, row by row
where all other rows are known. With a key from the operating system it tells nothing to those who
do not have the key, which is kept in `private/`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from clipless.common import fresh_bits
from clipless.data import LargeTable, Repeated
from clipless.folders import RunFile, RunFolder, RunFolderError
from clipless.runs.data._load import RunData

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


def write_digests(folder: RunFolder, found: Mapping[str, Any]) -> None:
    """Write `data.json` for what `data_digests` found, with a new key."""
    key = fresh_bits(256).to_bytes(32)
    folder.write_data_key(key)
    keyed = {part: _keyed(found[part], key) for part in _PARTS}
    folder.write_json(RunFile.DATA, {"note": _NOTE, **found, **keyed})


def check_data(folder: RunFolder, data: RunData) -> None:
    """Refuse data that are not those that the run was made with."""
    check_digests(folder, data_digests(data))


def check_digests(folder: RunFolder, found: Mapping[str, Any]) -> None:
    """Refuse data by what `data_digests` found. Folders of earlier versions have no key."""
    expected = folder.read_json(RunFile.DATA)
    for part in _PARTS:
        then, now = expected.get(part), found[part]
        if not isinstance(then, dict):
            path = folder.file(RunFile.DATA)
            raise RunFolderError(f"{path} was damaged: it says nothing of the {part} data")
        if "hmac_sha256" in then:
            now = _keyed(now, folder.read_data_key())
        if then != now:
            contents = ", of other contents" if then.get("size") == now["size"] else ""
            raise RunFolderError(
                f"the {part} data are not those of the run in {folder.path}: it had "
                f"{then.get('size')} examples, here are {now['size']}{contents}. Restore the "
                "data that it was trained on."
            )


def _keyed(part: Mapping[str, Any], key: bytes) -> dict[str, Any]:
    digest = hmac.new(key, bytes.fromhex(part["sha256"]), hashlib.sha256).hexdigest()
    return {"size": part["size"], "hmac_sha256": digest}


def _digest(pair: tuple[Any, Any]) -> str:
    digest = hashlib.sha256()
    for part in pair:
        if isinstance(part, Tensor):
            digest.update(f"{tuple(part.shape)} {part.dtype}".encode())
            digest.update(part.detach().cpu().contiguous().numpy().data)
        elif isinstance(part, LargeTable):
            for piece in part.pieces():
                for column in piece.values():
                    digest.update(_of_column(column))
        elif isinstance(part, str):
            digest.update(part.encode())
        else:  # a data frame or a column of one
            import pandas

            digest.update(str(part.shape).encode())
            digest.update(pandas.util.hash_pandas_object(part, index=False).to_numpy().tobytes())
    return digest.hexdigest()


def _of_column(column: Any) -> bytes:
    """Return what a column of a piece holds, each row in eight bytes."""
    import pandas

    places = None
    if isinstance(column, Repeated):
        column, places = column
    values = np.asarray(column)
    found = pandas.util.hash_array(values.astype(str) if values.dtype == object else values)
    return bytes(np.ascontiguousarray(found if places is None else found[places]).data)
