"""Private estimators with scikit-learn's interface: no hyper-parameter to choose.

Importing this package is quick: scikit-learn and torch are loaded with the first estimator.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from clipless.common import lazy_names

if find_spec("sklearn") is None:
    raise ImportError("clipless.sklearn needs scikit-learn: pip install 'clipless[sklearn]'")

if TYPE_CHECKING:
    from clipless.sklearn._classifier import CliplessClassifier
    from clipless.sklearn._fits import RepeatedFitWarning
    from clipless.sklearn._labels import read_labels, same_labels
    from clipless.sklearn._persistence import load
    from clipless.sklearn._regressor import CliplessRegressor
    from clipless.sklearn._rule import TabularRule
    from clipless.sklearn.results._scores import PrivateScores
    from clipless.sklearn.results._scoring import PrivateErrors
    from clipless.sklearn.tables._identifiers import ColumnWarning
    from clipless.sklearn.texts._text import CliplessTextClassifier, CliplessTextRegressor
    from clipless.sklearn.texts._text_encoders import FolderEncoder, HashedNgrams

__all__ = [
    "CliplessClassifier",
    "CliplessRegressor",
    "CliplessTextClassifier",
    "CliplessTextRegressor",
    "HashedNgrams",
    "FolderEncoder",
    "PrivateScores",
    "PrivateErrors",
    "TabularRule",
    "RepeatedFitWarning",
    "ColumnWarning",
    "load",
    "read_labels",
    "same_labels",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__)
