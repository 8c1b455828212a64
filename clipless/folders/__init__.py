"""The run folder: its layout, its version, and everything that reads and writes its files.

Importing this package loads no torch: commands look at folders before anything heavy is needed.
"""

from clipless.folders._checkpoints import (
    CheckpointStore,
    UnreadableCheckpointError,
    read_checkpoint,
)
from clipless.folders._errors import RunFolderError
from clipless.folders._json import json_data
from clipless.folders._layout import PRIVATE_NAMES, CheckpointFile, RunFile
from clipless.folders._run_folder import CheckpointFacts, RunDescription, RunFolder
from clipless.folders._step_log import StepLog
from clipless.folders._writing import replace_file

__all__ = [
    "RunFolder",
    "RunFile",
    "RunDescription",
    "PRIVATE_NAMES",
    "StepLog",
    "CheckpointStore",
    "CheckpointFile",
    "CheckpointFacts",
    "read_checkpoint",
    "json_data",
    "replace_file",
    "RunFolderError",
    "UnreadableCheckpointError",
]
