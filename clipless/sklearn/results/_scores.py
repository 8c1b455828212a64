"""Scores of a classifier on private rows: one release of counts, and what follows from it.

Each row adds one to a count of the confusion matrix, and one to a histogram of scores: of the
probability of the second class by true class where there are two classes, else of the probability
of the predicted class by whether it is right. Both together move by sqrt(2) with one row, in one
Gaussian mechanism. Accuracy, AUROC, calibration and thresholds are computed from the noisy counts:
post-processing. Intervals come from drawing counts anew, rows and noise alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.float64]

BINS = 32
"""Of the histogram: equal steps of the log odds from -6 to 6, open at both ends."""
_REACH = 6.0
_DRAWS = 400
_LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class PrivateScores:
    """What noisy counts say of a classifier on private rows; safe to publish.

    Intervals hold the value on other rows from the same source, at 95%, approximately: they cover
    the noise and that rows are a sample.
    """

    classes: tuple[Any, ...]
    rows: int
    epsilon: float
    delta: float
    deviation: float
    """The standard deviation of the noise in every count."""
    confusion: Counts = field(repr=False)
    """(classes, classes) noisy counts: true class by predicted class."""
    histogram: Counts = field(repr=False)
    """(2, bins) noisy counts: of scores by true class, or of confidence by wrong and right."""

    @property
    def accuracy(self) -> float:
        """The part of the rows that are predicted right; rows without a class never are."""
        return _accuracy(self.confusion, self.rows)

    @property
    def auroc(self) -> float | None:
        """The area under the ROC curve, from the histogram; None for more than two classes."""
        return _auroc(self.histogram) if len(self.classes) == 2 else None

    @property
    def calibration_error(self) -> float:
        """The mean distance, over rows, of predicted and observed frequency in a bin.

        Bins that noise alone may have filled are left out.
        """
        return _calibration_error(self.histogram, self.deviation)

    def interval(self, name: str) -> tuple[float, float]:
        """Return an interval of 95% for `accuracy`, `auroc` or `calibration_error`."""
        generator = np.random.default_rng(0)  # of simulations: nothing private depends on it
        found = []
        for _ in range(_DRAWS):
            confusion, histogram = (
                self._drawn(counts, generator) for counts in (self.confusion, self.histogram)
            )
            if name == "accuracy":
                found.append(_accuracy(confusion, self.rows))
            elif name == "auroc" and len(self.classes) == 2:
                found.append(_auroc(histogram))
            elif name == "calibration_error":
                found.append(_calibration_error(histogram, self.deviation))
            else:
                raise ValueError(f"there is no interval for {name!r}")
        low, high = np.quantile(found, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
        return float(low), float(high)

    def reliability(self) -> tuple[Counts, Counts, Counts]:
        """Return for each bin: predicted probability, observed frequency, noisy number of rows.

        Observed frequencies are NaN where noise alone may have filled a bin.
        """
        totals = self.histogram.sum(0)
        with np.errstate(divide="ignore", invalid="ignore"):
            observed = np.clip(self.histogram[1] / totals, 0, 1)
        observed[totals < 4 * self.deviation] = np.nan
        return bin_centers(), observed, totals

    def threshold(self, *, recall: float | None = None, precision: float | None = None) -> float:
        """Return the probability above which to decide for the second class.

        The largest threshold with the recall that is asked for, or the smallest with the precision,
        by the released counts; without either, the one with the most rows right. It is one of the
        edges between bins.
        """
        if len(self.classes) != 2:
            raise ValueError("thresholds are for two classes")
        if recall is not None and precision is not None:
            raise ValueError("ask for a recall or a precision, not both")
        negative, positive = np.clip(self.histogram, 0, None)
        edges = bin_edges()
        above = np.cumsum(positive[::-1])[::-1][1:]  # positives above each inner edge
        wrong = np.cumsum(negative[::-1])[::-1][1:]
        if recall is not None:
            kept = np.flatnonzero(above >= recall * positive.sum())
            return float(edges[kept[-1]]) if len(kept) else 0.0
        if precision is not None:
            kept = np.flatnonzero(above >= precision * np.maximum(above + wrong, 1e-12))
            return float(edges[kept[0]]) if len(kept) else 1.0
        return float(edges[np.argmax(above + negative.sum() - wrong)])

    def calibration(self) -> tuple[float, float]:
        """Return scale and shift of the log odds that fit the released counts best."""
        if len(self.classes) != 2:
            raise ValueError("the released counts of more than two classes fix no shift")
        from scipy.optimize import minimize

        odds, counts = _centers_of_odds(), np.clip(self.histogram, 0, None)

        def loss(x: Any) -> float:
            z = x[0] * odds + x[1]
            return float((counts[1] * np.logaddexp(0, -z) + counts[0] * np.logaddexp(0, z)).sum())

        fitted = minimize(loss, np.array([1.0, 0.0]), method="Nelder-Mead")
        scale, shift = fitted.x
        return float(max(scale, 1e-3)), float(shift)

    def _drawn(self, counts: Counts, generator: np.random.Generator) -> Counts:
        """Counts as far from the released ones as those are from what other rows would give.

        Rows in a bin vary as a Poisson number does. Counts below zero stay: to cut them off would
        put rows where there are none.
        """
        spread = np.sqrt(np.clip(counts, 0, None) + self.deviation**2)
        return np.asarray(counts + spread * generator.normal(size=counts.shape), dtype=np.float64)

    def __str__(self) -> str:
        lines = [
            f"Scores on {self.rows} private rows, (epsilon, delta) = ({self.epsilon:.4g}, "
            f"{self.delta:.3g}), noise of {self.deviation:.3g} in every count"
        ]
        for name in ("accuracy", "auroc", "calibration_error"):
            value = getattr(self, name)
            if value is not None:
                low, high = self.interval(name)
                words = name.replace("_", " ")
                lines.append(f"  {words:18} {value:.4f}  (95%: {low:.4f} to {high:.4f})")
        lines.append("  confusion matrix, rows are true classes:")
        for label, line in zip(self.classes, self.confusion, strict=True):
            lines.append(f"    {label!s:>12}  " + "  ".join(f"{count:9.1f}" for count in line))
        return "\n".join(lines)


def bins_of(probability: Counts) -> NDArray[np.int64]:
    """Return the bin of each probability."""
    clipped = np.clip(probability, 1e-12, 1 - 1e-12)
    odds = np.log(clipped) - np.log1p(-clipped)
    return np.asarray(np.digitize(odds, _edges_of_odds()), dtype=np.int64)


def bin_edges() -> Counts:
    """Return the probabilities between bins."""
    return 1 / (1 + np.exp(-_edges_of_odds()))


def bin_centers() -> Counts:
    """Return the probability in the middle of each bin."""
    return 1 / (1 + np.exp(-_centers_of_odds()))


def _edges_of_odds() -> Counts:
    # An edge at 0, where decisions between two classes are made.
    return np.linspace(-_REACH, _REACH, BINS - 1)


def _centers_of_odds() -> Counts:
    edges = _edges_of_odds()
    half = (edges[1] - edges[0]) / 2
    return np.concatenate([[edges[0] - half], (edges[1:] + edges[:-1]) / 2, [edges[-1] + half]])


def _accuracy(confusion: Counts, rows: int) -> float:
    return float(np.clip(np.trace(confusion) / max(rows, 1), 0, 1))


def _auroc(histogram: Counts) -> float:
    """The chance that a positive has a higher score than a negative, ties counting one half."""
    negative, positive = histogram
    below = np.concatenate([[0.0], np.cumsum(negative)[:-1]])
    pairs = positive.sum() * negative.sum()
    if positive.sum() <= 0 or negative.sum() <= 0:
        return 0.5
    return float(np.clip((positive * (below + negative / 2)).sum() / pairs, 0, 1))


def _calibration_error(histogram: Counts, deviation: float) -> float:
    totals = histogram.sum(0)
    used = totals > 4 * deviation
    gaps = np.abs(histogram[1] - bin_centers() * totals)[used]
    return float(np.clip(gaps.sum() / max(totals[used].sum(), 1e-12), 0, 1))


def noise_deviation(multiplier: float) -> float:
    """Return the noise in every count: two histograms share a release."""
    return multiplier * math.sqrt(2)
