"""Tools for the training loop: an optimizer for noisy gradients, and averages of the weights."""

from clipless.training._averaging import WeightAverage
from clipless.training._layer_adam import LayerAdam

__all__ = ["LayerAdam", "WeightAverage"]
