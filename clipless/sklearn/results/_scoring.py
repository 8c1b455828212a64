"""`score_privately`: what a fitted estimator reaches on private rows, by one noisy release."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from clipless.errors import BudgetExhaustedError
from clipless.privacy import Budget, FullBatch, Ledger, Relation
from clipless.sklearn._labels import read_labels
from clipless.sklearn.results._scores import BINS, PrivateScores, bins_of, noise_deviation
from clipless.statistics import PrivateRows

_OCTAVES = 16  # of distances, half of them below one spread of the target

AnyLedger = Ledger | str | os.PathLike[str] | None


@dataclass(frozen=True, kw_only=True)
class PrivateErrors:
    """What noisy sums say of a regressor on private rows; safe to publish."""

    rows: int
    epsilon: float
    delta: float
    mean_absolute_error: float
    root_mean_squared_error: float
    r2: float
    """One minus the mean square of errors over that of the target's distances from its centre."""


def score_classifier(
    estimator: Any, table: Any, y: Any, *, epsilon: float, delta: float | None, ledger: AnyLedger
) -> PrivateScores:
    """Return the scores of a fitted classifier on private rows."""
    probabilities = np.asarray(estimator.predict_proba(table))
    names = [cell.name for cell in read_labels(list(estimator.classes_)).cells]
    predicted = _places(names, estimator.predict(table))
    true = _places(names, y)
    if len(names) == 2:
        side, score = true, probabilities[:, 1]
    else:
        side = np.where(true >= 0, (true == predicted).astype(np.int64), -1)
        score = probabilities[np.arange(len(true)), predicted]
    size, width = len(names), len(true)
    with _book(ledger, width, epsilon, delta) as (book, budget, multiplier):
        rows = PrivateRows(
            torch.from_numpy(np.where(true >= 0, true * size + predicted, -1)),
            torch.from_numpy(np.where(side >= 0, side * BINS + bins_of(score), -1)),
            ledger=book,
        )
        confusion, histogram = rows.noisy_counts(
            lambda cells, scores: torch.stack([cells, scores], 1),
            bins=[size * size, 2 * BINS],
            noise_multiplier=multiplier,
            label="test scores",
        )
        return PrivateScores(
            classes=tuple(estimator.classes_.tolist()), rows=width,
            epsilon=budget.spent(book.history()), delta=budget.delta,
            deviation=noise_deviation(multiplier),
            confusion=confusion.reshape(size, size).numpy(),
            histogram=histogram.reshape(2, BINS).numpy(),
        )  # fmt: skip


def score_regressor(
    estimator: Any, table: Any, y: Any, *, epsilon: float, delta: float | None, ledger: AnyLedger
) -> PrivateErrors:
    """Return the errors of a fitted regressor on private rows."""
    labels = read_labels(y)
    target = np.array([cell.number for cell in labels.cells], dtype=np.float64)[labels.positions]
    center, spread = estimator._target_scale
    predicted = torch.from_numpy(np.asarray(estimator.predict(table), dtype=np.float64))
    count = len(target)
    with _book(ledger, count, epsilon, delta) as (book, budget, multiplier):
        known = ~torch.from_numpy(target).isnan()
        rows = PrivateRows(predicted, torch.from_numpy(target), ledger=book, present=known)

        def bins(guess: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            distances = torch.stack([value - guess, value - center], 1).abs() / spread
            return (2 * (distances.log2() + _OCTAVES / 2)).clamp(0, 2 * _OCTAVES - 1).long()

        errors, distances = rows.noisy_counts(
            bins, bins=[2 * _OCTAVES] * 2, noise_multiplier=multiplier, label="test errors"
        )
        absolute, square = _moments(errors.numpy(), noise_deviation(multiplier))
        _, variance = _moments(distances.numpy(), noise_deviation(multiplier))
        return PrivateErrors(
            rows=count, epsilon=budget.spent(book.history()), delta=budget.delta,
            mean_absolute_error=absolute * spread,
            root_mean_squared_error=math.sqrt(square) * spread,
            r2=1 - square / variance if variance > 0 else 0.0,
        )  # fmt: skip


def _moments(counts: Any, deviation: float) -> tuple[float, float]:
    """Mean and mean square of distances counted on half octaves.

    Bins that noise alone may have filled count as empty: one of them, far out, would be most of a
    mean square. Within a bin from a to sqrt(2) a, logarithms are taken to be uniform.
    """
    kept = np.where(counts > 3 * deviation, counts, 0.0)
    if kept.sum() <= 0:
        kept = np.clip(counts, 0, None)
    edges = 2.0 ** (np.arange(len(counts)) / 2 - _OCTAVES / 2)
    total = max(kept.sum(), 1e-12)
    mean = (kept * edges).sum() / total * (math.sqrt(2) - 1) / math.log(math.sqrt(2))
    return float(mean), float((kept * edges**2).sum() / total / math.log(2))


def _places(names: list[str | None], labels: Any) -> Any:
    """The position of each label among the classes, -1 for those that are none."""
    found = read_labels(labels)
    known = np.array(
        [names.index(c.name) if c.name in names else -1 for c in found.cells], dtype=np.int64
    )
    return known[found.positions]


@contextlib.contextmanager
def _book(
    given: AnyLedger, rows: int, epsilon: float, delta: float | None
) -> Iterator[tuple[Ledger, Budget, float]]:
    """A ledger of the scored rows, the budget, and the noise of one release that it allows."""
    owned = not isinstance(given, Ledger)
    book = (
        given
        if isinstance(given, Ledger)
        else Ledger(given, dataset_size=rows, relation=Relation.ZERO_OUT)
    )
    try:
        with book.held():
            budget = Budget.for_ledger(book, epsilon=float(epsilon), delta=delta)
            multiplier = budget.noise_multiplier(
                book, steps=1, sampling=FullBatch(dataset_size=rows), before=[]
            )
            if noise_deviation(multiplier) > rows / 20:
                raise BudgetExhaustedError(
                    f"of epsilon={epsilon:g} at delta={budget.delta:g}, "
                    f"{budget.spent(book.history()):.4g} is spent: noise of "
                    f"{noise_deviation(multiplier):.3g} in every count of {rows} rows would leave "
                    "nothing of the scores. Nothing was released: agree on a larger budget, or "
                    "score more rows"
                )
            yield book, budget, multiplier
    finally:
        if owned:
            book.close()
