"""Private estimators with scikit-learn's interface: no hyper-parameter to choose."""

from clipless.sklearn import _requirement as _requirement  # first, for its hint
from clipless.sklearn._classifier import CliplessClassifier
from clipless.sklearn._fits import RepeatedFitWarning
from clipless.sklearn._labels import read_labels, same_labels
from clipless.sklearn._persistence import load
from clipless.sklearn._regressor import CliplessRegressor
from clipless.sklearn._rule import TabularRule

__all__ = [
    "CliplessClassifier",
    "CliplessRegressor",
    "TabularRule",
    "RepeatedFitWarning",
    "load",
    "read_labels",
    "same_labels",
]
