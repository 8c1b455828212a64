"""Values that a shell completes. A function is called with what was typed so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from clipless.folders import RunFile, RunFolder
from clipless.runs import DataConfig, PrivacyConfig, TrainingConfig

_MOST_FOLDERS = 50
TASKS = ("classification", "regression")
SAMPLERS = ("tpe", "gp", "random")
PRUNERS = ("hyperband", "none")
REPETITIONS = ("geometric", "logarithmic", "negative_binomial", "poisson")


def beginning(values: Iterable[str], typed: str) -> list[str]:
    """Return the values that begin with what was typed."""
    return [value for value in values if value.startswith(typed)]


def tasks(incomplete: str) -> list[str]:
    """What a target may be."""
    return beginning(TASKS, incomplete)


def samplers(incomplete: str) -> list[str]:
    """Ways to search."""
    return beginning(SAMPLERS, incomplete)


def pruners(incomplete: str) -> list[str]:
    """Ways to stop runs early."""
    return beginning(PRUNERS, incomplete)


def repetitions(incomplete: str) -> list[str]:
    """Distributions of the number of runs."""
    return beginning(REPETITIONS, incomplete)


def presets(incomplete: str) -> list[str]:
    """Search spaces of the paper."""
    from clipless.sweeps import presets as known

    return beginning(known(), incomplete)


def data_names(incomplete: str) -> list[str]:
    """Data sets by name, and files that can be trained on."""
    from clipless.data import SOURCES

    files = [str(path) for path in sorted(_siblings(incomplete)) if _is_data(path)]
    return beginning([*SOURCES, "digits", *files], incomplete)


def model_names(incomplete: str) -> list[str]:
    """Models by name."""
    from clipless.models import names

    return beginning([*names(), "scattering", "tabular"], incomplete)


def loss_names(incomplete: str) -> list[str]:
    """Losses by name."""
    from clipless.runs import loss_names as known

    return beginning(known(), incomplete)


def devices(incomplete: str) -> list[str]:
    """Devices that are here."""
    import torch

    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return beginning(["cpu", *(["cuda", *gpus] if gpus else [])], incomplete)


def setting_keys(incomplete: str) -> list[str]:
    """Keys of the sections data, privacy and training."""
    sections = {"data": DataConfig, "privacy": PrivacyConfig, "training": TrainingConfig}
    keys = [f"{name}.{each.name}=" for name, kind in sections.items() for each in fields(kind)]
    return beginning(keys, incomplete)


def run_folders(incomplete: str) -> list[str]:
    """Folders of runs, and folders on the way to them."""
    found = []
    for path in sorted(_siblings(incomplete))[:_MOST_FOLDERS]:
        if path.is_dir() and not path.name.startswith("."):
            run = RunFolder(str(path)).has(RunFile.CONFIG)
            found.append(str(path) if run else f"{path}/")
    return beginning(found, incomplete)


def _siblings(typed: str) -> list[Path]:
    """Return what is in the folder that was typed so far."""
    folder = Path(typed if typed.endswith("/") else Path(typed).parent)
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _is_data(path: Path) -> bool:
    return path.name.lower().endswith((".csv", ".tsv", ".parquet", ".npz"))
