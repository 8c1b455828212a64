"""What a run folder holds besides what the trainer keeps in it, and reading it back.

config.json        the exact configuration, everything filled in
environment.json   versions and device
data.json          digests of the data, by which they are known again. Not covered: keep it private
model.safetensors  the final weights (for tables: the fitted estimator)
result.json        how training ended, at what price, and the digest of the weights
robustness.json, audit.json, report.html, report.json   by other commands, later
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipless.runs._config import RunConfig
from clipless.runs._data import RunData
from clipless.runs._errors import RunFolderError
from clipless.runs._plain import plain
from clipless.training._checkpoint import replace_file

CONFIG, ENVIRONMENT, DATA = "config.json", "environment.json", "data.json"
RESULT, WEIGHTS, PLAN, LEDGER = "result.json", "model.safetensors", "plan.json", "ledger.jsonl"
ROBUSTNESS, AUDIT, REPORT = "robustness.json", "audit.json", "report.html"
_VERSION = 1
_PACKAGES = ("torch", "numpy", "dp-accounting", "safetensors", "scikit-learn", "pandas", "rich")
_DATA_NOTE = (
    "digests of the private training data and of the test data: not covered by the guarantee, keep "
    "this file as you keep the data"
)


def write_json(folder: Path, name: str, fields: Mapping[str, Any], *, kind: str) -> Path:
    """Write a JSON file of a run folder, in one operation; `kind` names its format."""
    content = {"format": f"clipless-{kind}", "version": _VERSION, **plain(fields)}
    replace_file(folder / name, (json.dumps(content, indent=2) + "\n").encode())
    return folder / name


def read_json(folder: Path, name: str, *, kind: str) -> dict[str, Any]:
    """Return the fields of a JSON file of a run folder, or say what is wrong with it."""
    path = folder / name
    try:
        data = json.loads(path.read_bytes())
        if (data.pop("format"), data.pop("version")) != (f"clipless-{kind}", _VERSION):
            raise ValueError("it has another format or version than this clipless reads")
    except FileNotFoundError as error:
        raise RunFolderError(f"{folder} has no {name}: it is not a run folder, or not whole") from (
            error
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(f"{path} was damaged: {error}") from error
    return dict(data)


def stored_config(folder: Path) -> RunConfig:
    """Return the configuration that a run folder was made with."""
    fields = read_json(folder, CONFIG, kind="config")
    try:
        return RunConfig.from_dict(fields)
    except ValueError as error:
        raise RunFolderError(f"{folder / CONFIG} was damaged: {error}") from error


def environment(device: str) -> dict[str, Any]:
    """Return the versions of what takes part in training, and where it takes place."""
    from clipless import __version__

    versions: dict[str, str] = {"clipless": __version__}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    chosen = torch.device(device)
    hardware = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else platform.machine()
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "device": device,
        "hardware": hardware,
        "threads": torch.get_num_threads(),
        "packages": versions,
    }


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def data_digests(data: RunData) -> dict[str, Any]:
    """Return what data are known again by: sizes, and digests of both parts."""
    return {
        "note": _DATA_NOTE,
        "kind": data.kind,
        "input_shape": list(data.input_shape),
        "classes": data.classes,
        "verified": data.verified,
        "train": {"size": len(data.train[0]), "sha256": _digest(data.train)},
        "test": {"size": len(data.test[0]), "sha256": _digest(data.test)},
    }


def check_data(folder: Path, data: RunData, *, parts: tuple[str, ...] = ("train", "test")) -> None:
    """Refuse data that are not those that the run was made with."""
    check_digests(folder, data_digests(data), parts=parts)


def check_digests(
    folder: Path, found: Mapping[str, Any], *, parts: tuple[str, ...] = ("train", "test")
) -> None:
    """Refuse data by their digests; see `data_digests`."""
    expected = read_json(folder, DATA, kind="data")
    for part in parts:
        if expected.get(part) != found[part]:
            raise RunFolderError(
                f"the {part} data are not those of the run in {folder}: it had "
                f"{expected.get(part, {}).get('size')} examples, here are {found[part]['size']}"
                + (", of other contents" if expected.get(part, {}).get("size") ==
                   found[part]["size"] else "")
                + ". Restore the data that it was trained on."
            )  # fmt: skip


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
