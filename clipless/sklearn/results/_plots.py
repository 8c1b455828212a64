"""Figures of classifiers: utility over epsilon, and calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from clipless.plots import calibration_figure, privacy_utility_figure
from clipless.sklearn._labels import same_labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ClassifierPlots:
    """What a classifier draws of itself. Not covered by the guarantee: each looks at given rows."""

    def plot_privacy_utility(
        self,
        X: Any,  # noqa: N803 - scikit-learn's names
        y: Any,
        *,
        test: tuple[Any, Any],
        epsilons: Sequence[float] = (0.3, 1.0, 3.0, 10.0),
        repeats: int = 1,
    ) -> Figure:
        """Return a figure of the score on `test` over epsilon, by fits of copies to (X, y).

        It is made for public data. On private rows every fit is a release: together they cost at
        most the sum of all epsilons, times `repeats`, whatever is done with the figure. An
        estimator with a ledger is refused: its budget is not for trying out. The dashed line is
        the share of the largest class of the test labels, which a constant prediction reaches.
        """
        import numpy as np
        from sklearn.base import clone

        if getattr(self, "ledger", None) is not None:
            raise ValueError(
                "plot_privacy_utility trains a model for each epsilon, and this estimator has a "
                "ledger that would pay for all of them: take a copy without one, on public rows"
            )
        points = []
        for epsilon in epsilons:
            for _ in range(repeats):
                copy = clone(self).set_params(epsilon=epsilon)
                points.append((float(epsilon), float(copy.fit(X, y).score(*test))))
        _, counts = np.unique(np.asarray(test[1]), return_counts=True)
        return privacy_utility_figure(
            points, baseline=float(counts.max() / counts.sum()), metric="score"
        )

    def plot_calibration(self, X: Any, y: Any, *, bins: int = 10) -> Figure:  # noqa: N803
        """Return a figure of how often predictions on (X, y) are right, over their confidence."""
        estimator: Any = self
        confidence = estimator.predict_proba(X).max(axis=1)
        right = same_labels(estimator.predict(X), y)
        return calibration_figure(confidence.tolist(), [bool(r) for r in right], bins=bins)
