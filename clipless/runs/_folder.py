"""What a run folder holds besides what the trainer keeps in it, and reading it back.

config.json        the exact configuration, everything filled in
environment.json   versions and device
data.json          keyed digests of the data, by which they are known again. Private
private/           the key of these digests. Private, like the checkpoints
model.safetensors  the final weights (for tables: the fitted estimator)
result.json        how training ended, at what price, with metrics on test data. Private
robustness.json, audit.json   by other commands, later: measured on data. Private
report.html, report.json      by `clipless report`: released and public things only
report-private.html, report-private.json   the rest. Private
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

from clipless.common._malformed import MALFORMED, reason
from clipless.runs._config import RunConfig
from clipless.runs._errors import RunFolderError
from clipless.runs._plain import plain
from clipless.training._checkpoint import replace_file

CONFIG, ENVIRONMENT, DATA = "config.json", "environment.json", "data.json"
RESULT, WEIGHTS, PLAN, LEDGER = "result.json", "model.safetensors", "plan.json", "ledger.jsonl"
ROBUSTNESS, AUDIT, REPORT = "robustness.json", "audit.json", "report.html"
KEY = "private/data.key"
PRIVATE = frozenset(
    (DATA, RESULT, ROBUSTNESS, AUDIT, "metrics.jsonl", "tightness.jsonl", "checkpoints", "private",
     "report-private.html", "report-private.json")
)  # fmt: skip
"""Files and folders that the guarantee does not cover: measured on data, or secret."""
_VERSION = 1
_PACKAGES = ("torch", "numpy", "dp-accounting", "safetensors", "scikit-learn", "pandas", "rich")


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
    except (OSError, *MALFORMED) as error:
        raise RunFolderError(f"{path} was damaged: {reason(error)}") from error
    return dict(data)


def stored_config(folder: Path) -> RunConfig:
    """Return the configuration that a run folder was made with."""
    fields = read_json(folder, CONFIG, kind="config")
    try:
        return RunConfig.from_dict(fields)
    except MALFORMED as error:
        raise RunFolderError(f"{folder / CONFIG} was damaged: {reason(error)}") from error


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
