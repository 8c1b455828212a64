"""Training: a trainer for people who want no loop, an optimizer for noisy gradients, averages."""

from clipless.training._averaging import WeightAverage
from clipless.training._callbacks import Callback, MetricsWriter, TensorBoardWriter
from clipless.training._layer_adam import LayerAdam
from clipless.training._options import TrainingOptions
from clipless.training._result import FitResult
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
]
