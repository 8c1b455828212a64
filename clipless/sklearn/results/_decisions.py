"""What a fitted classifier says of rows: decisions, probabilities, certificates, private scores."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted

from clipless.robustness import certified_radius
from clipless.sklearn._base import CliplessEstimator
from clipless.sklearn._labels import same_labels
from clipless.sklearn.results._scores import PrivateScores
from clipless.sklearn.results._scoring import AnyLedger, score_classifier


class Decisions(CliplessEstimator):
    """Predictions of a classifier. Not public: use a subclass."""

    classes_: Any
    calibration_: tuple[float, float]
    decision_threshold_: float

    def decision_function(self, X: Any) -> Any:  # noqa: N803
        """Return logits: (n,) for two classes, or (n, classes)."""
        logits = self._outputs(X).numpy() * self.rule_.temperature
        return logits[:, 0] if len(self.classes_) == 2 else logits

    def predict(self, X: Any) -> Any:  # noqa: N803
        """Return the most likely label of every row; of two, by `decision_threshold_`."""
        logits = self.decision_function(X)
        if logits.ndim == 1:
            return self.classes_[(logits > self._threshold_logit).astype(int)]
        return self.classes_[logits.argmax(axis=1)]

    @property
    def _threshold_logit(self) -> float:
        """The logit from which on the second of two classes is predicted."""
        threshold = self.decision_threshold_
        if not 0 <= threshold <= 1:
            raise ValueError(f"decision_threshold_ must be a probability, got {threshold!r}")
        scale, shift = self.calibration_
        with np.errstate(divide="ignore"):
            odds = float(np.log(threshold) - np.log1p(-threshold))
        return odds if (scale, shift) == (1.0, 0.0) else (odds - shift) / scale

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:  # noqa: N803
        """Return the part of the rows whose label is predicted; a missing label never is."""
        right = same_labels(self.predict(X), y)
        return float(np.average(right, weights=sample_weight))

    def predict_proba(self, X: Any) -> Any:  # noqa: N803
        """Return the probability of every class, (n, classes)."""
        logits = torch.from_numpy(self.decision_function(X))
        scale, shift = self.calibration_
        logits = logits * scale
        if logits.ndim == 1:
            logits = torch.stack([torch.zeros_like(logits), logits + shift], 1)
        return torch.softmax(logits, dim=1).numpy()

    def predict_log_proba(self, X: Any) -> Any:  # noqa: N803
        """Return the logarithm of every probability."""
        return np.log(np.maximum(self.predict_proba(X), np.finfo(np.float64).tiny))

    def certified_radius(self, X: Any) -> Any:  # noqa: N803
        """Return how far the numbers of each row can move without changing its prediction.

        The distance is Euclidean over the numeric columns, each in units of its `spread_`: proved,
        not estimated. Categories, and which values are missing, are taken as they are. For texts,
        it is the distance that the unit vector of a text can move.
        """
        check_is_fitted(self, "network_")
        numbers, codes, _ = self._read(X, reset=False)
        encoded = self._encoder(numbers, codes)
        threshold = 0.0
        if len(self.classes_) == 2:
            threshold = self._threshold_logit / self.rule_.temperature
        if not np.isfinite(threshold):
            return np.full(len(encoded), np.inf)  # one class whatever the row
        radii = certified_radius(self.network_, encoded, threshold=threshold)
        return (radii / self._encoder.lipschitz()).numpy()

    def score_privately(
        self,
        X: Any,  # noqa: N803
        y: Any,
        *,
        epsilon: float,
        delta: float | None = None,
        ledger: AnyLedger = None,
    ) -> PrivateScores:
        """Return accuracy, AUROC, calibration and confusion matrix on private rows, with noise.

        Guarantee: the result is (epsilon, delta)-differentially private with respect to replacing
        one of these rows by an empty one. One release, of counts, is written to `ledger` first:
        that of the fit if they are the rows of the fit, else one of their own. Disjoint sets of
        rows have a ledger each, and nobody is promised more than the largest of their epsilons.
        """
        check_is_fitted(self, "network_")
        return score_classifier(self, X, y, epsilon=epsilon, delta=delta, ledger=ledger)

    def calibrate(self, scores: PrivateScores) -> Self:
        """Fit scale and shift of the log odds to released counts; costs nothing more.

        For two classes. Which label is predicted changes with the probabilities:
        `decision_threshold_` is about the calibrated ones.
        """
        if self.calibration_ != (1.0, 0.0):
            raise ValueError("this estimator is calibrated already: scores are about its old odds")
        self.calibration_ = scores.calibration()
        return self
