"""A run as a folder: its configuration, training it, and opening it again, checked.

Importing this package is quick: what needs torch is loaded when it is first used.
"""

from typing import TYPE_CHECKING

from clipless.common._lazy import lazy

if TYPE_CHECKING:
    from clipless.runs._config import Choice, DataConfig, PrivacyConfig, RunConfig, TrainingConfig
    from clipless.runs._data import RunData, load_data
    from clipless.runs._errors import ConfigError, RunFolderError
    from clipless.runs._open import Run, open_run
    from clipless.runs._recipes import recipe, recipes
    from clipless.runs._result import TrainedRun
    from clipless.runs._train import train_run

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
        "_config": ("Choice", "DataConfig", "PrivacyConfig", "RunConfig", "TrainingConfig"),
        "_data": ("RunData", "load_data"),
        "_errors": ("ConfigError", "RunFolderError"),
        "_open": ("Run", "open_run"),
        "_recipes": ("recipe", "recipes"),
        "_result": ("TrainedRun",),
        "_train": ("train_run",),
    }
    __getattr__, __dir__ = lazy(
        __name__,
        {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names},
    )
