"""The private classifier."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils import column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted
from torch import Tensor

from clipless import nn as lip
from clipless.data._custody import PrivateRows
from clipless.data._scaling import Scaling
from clipless.losses import BinaryCrossEntropy, CrossEntropy, Loss
from clipless.privacy import Ledger
from clipless.robustness import certified_radius
from clipless.sklearn._base import NOTES, CliplessEstimator, Task
from clipless.sklearn._rule import TabularRule


class CliplessClassifier(ClassifierMixin, CliplessEstimator):
    """A classifier for tables, trained with differential privacy and nothing to tune.

    Guarantee: the fitted estimator is (epsilon, delta)-differentially private with respect to
    adding or removing one row of the training table, scaling and class balance included. What that
    rests on, and what is not covered, is in `privacy_`. Predictions for other rows cost nothing;
    scores computed on private rows are not covered.

    Tables are arrays or data frames, with numbers, text, dates, and missing values. Text is hashed;
    the categories that are frequent, by a noisy count, get an input of their own.

    Args:
        epsilon: the total budget.
        delta: by default the largest power of ten below one over the number of rows.
        classes: the labels that there can be. By default those that occur in `y`, which are then
            treated as public. A label that is not among them is refused.
        categorical_features: names or positions of columns that hold categories. By default those
            that hold text or are declared categorical.
        feature_bounds: public bounds of numeric columns, which then cost nothing to scale: a
            mapping from names or positions to (low, high), or an array of two rows.
        rule: choices other than those of `TabularRule.choose`.
        ledger: a `Ledger` or the path of one. Several fits with one ledger share one budget.
        random_state: makes a fit reproducible, for experiments; the report then says that the
            guarantee does not hold against those who know it.
        device: where to train; by default on the CPU.
        progress: show a progress bar.

    Attributes:
        classes_: the labels, sorted.
        privacy_: the `PrivacyReport`: print it.
        network_: the trained network, on encoded rows.
        rule_: the hyper-parameters that were used.

    Example:
        >>> from sklearn.datasets import make_classification
        >>> X, y = make_classification(4000, n_informative=6, class_sep=2.0, random_state=0)
        >>> classifier = CliplessClassifier(epsilon=1.0, random_state=0).fit(X, y)
        >>> classifier.privacy_.epsilon <= 1.0, classifier.score(X, y) > 0.8
        (True, True)
    """

    classes_: Any

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float | None = None,
        *,
        classes: Sequence[Any] | None = None,
        categorical_features: Sequence[str | int] | None = None,
        feature_bounds: Any = None,
        rule: TabularRule | None = None,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        random_state: Any = None,
        device: str | None = None,
        progress: bool = False,
    ) -> None:
        super().__init__(
            epsilon, delta, categorical_features=categorical_features,
            feature_bounds=feature_bounds, rule=rule, ledger=ledger, random_state=random_state,
            device=device, progress=progress,
        )  # fmt: skip
        self.classes = classes

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803 - scikit-learn's names
        """Train on a table and its labels, of any type."""
        if y is None:
            raise ValueError(
                f"This {type(self).__name__} estimator requires y to be passed, but the target y "
                "is None."
            )
        table = self._read(X, reset=True)
        y = column_or_1d(y, warn=True)
        check_consistent_length(X, y)
        if any(value is None or value != value for value in y):
            raise ValueError("Input y contains NaN: every row needs a label.")
        check_classification_targets(y)
        labels = self._labels(y)
        count = len(self.classes_)
        return self._fit(table, Task(outputs=1 if count == 2 else count, labels=labels))

    def _criterion(self, rule: TabularRule) -> Loss:
        kind = BinaryCrossEntropy if len(self.classes_) == 2 else CrossEntropy
        return kind(tau=rule.temperature)

    def _labels(self, y: Any) -> Tensor:
        """Set `classes_`, and return the labels as their positions."""
        given = None if self.classes is None else np.asarray(self.classes)
        if given is not None and len(np.unique(given)) != len(given):
            raise ValueError(f"classes holds a label twice: {list(given)}")
        try:
            self.classes_ = np.unique(y if given is None else given)
            positions = np.searchsorted(self.classes_, y)
        except TypeError as error:
            raise ValueError(
                f"the labels cannot be compared with each other ({error}): give them one type"
            ) from error
        if len(self.classes_) < 2:
            raise ValueError(
                f"a classifier needs at least two classes; the labels hold one class only, "
                f"{self.classes_[0]!r}. If others can occur, name them all in `classes`."
            )
        positions = positions.clip(max=len(self.classes_) - 1)
        if (self.classes_[positions] != y).any():
            raise ValueError(
                f"y holds labels that are not among classes={list(self.classes_)}: add them, or "
                "leave those rows out"
            )
        return torch.from_numpy(positions.astype(np.int64))

    def _start(
        self, network: torch.nn.Sequential, rows: PrivateRows, scaling: Scaling, rule: TabularRule
    ) -> None:
        count = len(self.classes_)
        counts = rows.noisy_counts(
            lambda x, codes, y: y[:, None],
            bins=[count],
            noise_multiplier=rule.label_noise,
            label="class counts",
        )[0]
        prior = counts.clamp(min=max(1.0, 1e-3 * len(rows)))
        logits = torch.log(prior / prior.sum())
        head = network[-1]
        assert isinstance(head, lip.SpectralLinear)
        assert head.bias is not None
        start = (logits[1] - logits[0])[None] if count == 2 else logits - logits.mean()
        with torch.no_grad():
            head.bias.copy_(start / rule.temperature)
        head.project()

    def _target(self, y: Tensor) -> Tensor:
        return y.float() if len(self.classes_) == 2 else y

    def _notes(self) -> tuple[str, ...]:
        if self.classes is not None:
            return NOTES
        return (*NOTES, "The set of labels that occur is treated as public; `classes` fixes it.")

    def _fitted_numbers(self) -> dict[str, Any]:
        if self.classes_.dtype.kind not in "OUSbiuf":
            raise ValueError(f"labels of type {self.classes_.dtype} cannot be saved")
        return {"classes": self.classes_.tolist(), "dtype": self.classes_.dtype.str}

    def _restore_numbers(self, numbers: dict[str, Any]) -> None:
        self.classes_ = np.array(numbers["classes"], dtype=np.dtype(numbers["dtype"]))

    def decision_function(self, X: Any) -> Any:  # noqa: N803
        """Return logits: (n,) for two classes, positive for the second one, or (n, classes)."""
        logits = self._outputs(X).numpy() * self.rule_.temperature
        return logits[:, 0] if len(self.classes_) == 2 else logits

    def predict(self, X: Any) -> Any:  # noqa: N803
        """Return the most likely label of every row."""
        logits = self.decision_function(X)
        chosen = (logits > 0).astype(int) if logits.ndim == 1 else logits.argmax(axis=1)
        return self.classes_[chosen]

    def predict_proba(self, X: Any) -> Any:  # noqa: N803
        """Return the probability of every class, (n, classes)."""
        logits = torch.from_numpy(self.decision_function(X))
        if logits.ndim == 1:
            logits = torch.stack([torch.zeros_like(logits), logits], 1)
        return torch.softmax(logits, dim=1).numpy()

    def predict_log_proba(self, X: Any) -> Any:  # noqa: N803
        """Return the logarithm of every probability."""
        return np.log(np.maximum(self.predict_proba(X), np.finfo(np.float64).tiny))

    def certified_radius(self, X: Any) -> Any:  # noqa: N803
        """Return how far the numbers of each row can move without changing its prediction.

        The distance is Euclidean over the numeric columns, each in units of its `spread_`: proved,
        not estimated. Categories, and which values are missing, are taken as they are.
        """
        check_is_fitted(self, "network_")
        numbers, codes = self._read(X, reset=False)
        encoded = self._encoder(numbers, codes)
        return (certified_radius(self.network_, encoded) / self._encoder.lipschitz()).numpy()
