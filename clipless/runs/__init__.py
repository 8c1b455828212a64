"""A run as a folder: its configuration, training it, and opening it again, checked.

Importing this package is quick: what needs torch is loaded when it is first used.
"""

from typing import TYPE_CHECKING

from clipless.common._lazy import lazy

if TYPE_CHECKING:
    from clipless.folders import RunFolderError
    from clipless.runs._open import Run, open_run
    from clipless.runs._result import TrainedRun
    from clipless.runs._train import train_run
    from clipless.runs.config._errors import ConfigError
    from clipless.runs.config._recipes import recipe, recipes
    from clipless.runs.config._sections import (
        Choice,
        DataConfig,
        PrivacyConfig,
        RunConfig,
        TrainingConfig,
    )
    from clipless.runs.data._load import RunData, load_data

__all__ = [
    "RunConfig",
    "DataConfig",
    "Choice",
    "PrivacyConfig",
    "TrainingConfig",
    "recipe",
    "recipes",
    "train_run",
    "TrainedRun",
    "open_run",
    "Run",
    "load_data",
    "RunData",
    "ConfigError",
    "RunFolderError",
]

if not TYPE_CHECKING:
    _HOMES = {
        "config._sections": (
            "Choice",
            "DataConfig",
            "PrivacyConfig",
            "RunConfig",
            "TrainingConfig",
        ),
        "data._load": ("RunData", "load_data"),
        "config._errors": ("ConfigError",),
        "_open": ("Run", "open_run"),
        "config._recipes": ("recipe", "recipes"),
        "_result": ("TrainedRun",),
        "_train": ("train_run",),
    }
    __getattr__, __dir__ = lazy(
        __name__,
        {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}
        | {"RunFolderError": "clipless.folders"},
    )
