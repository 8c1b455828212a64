"""The trainer, its options and callbacks, Adam per layer, and weight averages."""

from clipless.training._averaging import WeightAverage
from clipless.training._callbacks import Callback, MetricsWriter, TensorBoardWriter, step_log
from clipless.training._layer_adam import LayerAdam
from clipless.training._metrics import FitResult, StopReason
from clipless.training._options import TrainingOptions
from clipless.training._processes import join_torchrun
from clipless.training._progress import EpsilonGauge
from clipless.training._signal import LittleSignalWarning
from clipless.training._state import (
    from_files,
    generator_states,
    restore_generators,
    tensors_to_bytes,
    to_files,
)
from clipless.training._trainer import Trainer

__all__ = [
    "Trainer",
    "TrainingOptions",
    "FitResult",
    "Callback",
    "MetricsWriter",
    "TensorBoardWriter",
    "LayerAdam",
    "WeightAverage",
    "LittleSignalWarning",
    "StopReason",
    "EpsilonGauge",
    "from_files",
    "generator_states",
    "join_torchrun",
    "restore_generators",
    "step_log",
    "tensors_to_bytes",
    "to_files",
]
