"""A run as a folder: its configuration, training it, and opening it again, checked.

Importing this package is quick: what needs torch is loaded when it is first used.
"""

from typing import TYPE_CHECKING

from clipless.common import lazy_names

if TYPE_CHECKING:
    from clipless.folders import RunFolderError
    from clipless.runs._build import (
        build_loss,
        loss_names,
        resolved_config,
        resolved_loss,
        targets_for,
        usable_device,
    )
    from clipless.runs._model_kinds import default_model, run_kind
    from clipless.runs._open import Run, open_run
    from clipless.runs._process_agreement import RunProcesses
    from clipless.runs._result import TrainedRun
    from clipless.runs._tabular import as_arrays
    from clipless.runs._torchrun import is_first_process, torchrun_rank, was_restarted
    from clipless.runs._train import train_on, train_run
    from clipless.runs._trainer import make_trainer
    from clipless.runs.config._errors import ConfigError
    from clipless.runs.config._fields import (
        as_type,
        check_setting,
        parse_value,
        read_section,
        refuse_unknown,
    )
    from clipless.runs.config._files import merge_config_layers, read_config_file
    from clipless.runs.config._recipes import recipe, recipes
    from clipless.runs.config._schema import config_schema, section_schema, type_schema
    from clipless.runs.config._sections import (
        Choice,
        DataConfig,
        PrivacyConfig,
        RunConfig,
        TrainingConfig,
        stored_config,
    )
    from clipless.runs.data._digests import check_data
    from clipless.runs.data._load import PIXELS, RunData, load_data

__all__ = [
    "RunConfig",
    "config_schema",
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
    "PIXELS",
    "RunProcesses",
    "as_arrays",
    "build_loss",
    "loss_names",
    "check_data",
    "default_model",
    "is_first_process",
    "run_kind",
    "merge_config_layers",
    "make_trainer",
    "parse_value",
    "read_config_file",
    "read_section",
    "refuse_unknown",
    "check_setting",
    "resolved_loss",
    "was_restarted",
    "stored_config",
    "targets_for",
    "torchrun_rank",
    "train_on",
    "as_type",
    "resolved_config",
    "section_schema",
    "type_schema",
    "usable_device",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__)
