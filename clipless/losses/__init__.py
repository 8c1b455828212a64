"""Per-example losses, each with a proved bound of its gradient at the model's output."""

from clipless.losses._base import Loss
from clipless.losses._classification import BinaryCrossEntropy, CosineSimilarity, CrossEntropy
from clipless.losses._margin import HingeKR, KantorovichRubinstein, MulticlassHinge
from clipless.losses._per_example import PerExample
from clipless.losses._regression import AbsoluteError, Huber, SquaredError
from clipless.losses._tokens import TokenCrossEntropy

__all__ = [
    "Loss",
    "CrossEntropy",
    "TokenCrossEntropy",
    "BinaryCrossEntropy",
    "CosineSimilarity",
    "MulticlassHinge",
    "KantorovichRubinstein",
    "HingeKR",
    "AbsoluteError",
    "Huber",
    "SquaredError",
    "PerExample",
]
