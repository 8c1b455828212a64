"""The versions and the device of a run."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

_PACKAGES = ("torch", "numpy", "dp-accounting", "safetensors", "scikit-learn", "pandas", "rich")


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
