"""The private classifier."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.validation import check_consistent_length
from torch import Tensor

from clipless.common import not_set_error
from clipless.data import Cell, Scratch, read_cell
from clipless.losses import BinaryCrossEntropy, CrossEntropy, Loss
from clipless.privacy import Ledger
from clipless.sklearn._base import FAILURE_PART, Head, Query, given_users
from clipless.sklearn._labels import (
    class_array,
    declared_classes,
    read_labels,
    sorted_cells,
)
from clipless.sklearn._network import add_to_bias
from clipless.sklearn._rule import TabularRule
from clipless.sklearn.results._decisions import Decisions
from clipless.sklearn.results._plots import ClassifierPlots
from clipless.sklearn.tables._table_inputs import TableInputs
from clipless.statistics import PrivateRows, value_threshold

_MOST_NUMBERS = 50  # different numbers, not declared as classes, that are not yet a quantity
_LEAST_COVERED = 0.5  # of the rows must have a label that was found


class CliplessClassifier(Decisions, ClassifierMixin, ClassifierPlots, TableInputs):
    """A classifier for tables, trained with differential privacy and nothing to tune.

    Guarantee: the fitted estimator is (epsilon, delta)-differentially private with respect to
    replacing one row of the training table by an empty one, scaling and class balance included.
    What that rests on, and what is not covered, is in `privacy_`. Predictions for other rows cost
    nothing; scores computed on private rows are not covered.

    Tables are arrays or data frames, with numbers, text, dates, and missing values. Text is hashed;
    the categories that are frequent, by a noisy count, get an input of their own.

    Args:
        epsilon: the total budget.
        delta: by default a tenth of one over the number of rows, rounded down.
        classes: the labels that there can be; by default, those that a noisy count finds in many
            rows, for a tenth of delta and some of epsilon, or False and True if `y` has that type.
            Rows of other labels contribute nothing.
        categorical_features: names or positions of columns that hold categories; all others hold
            numbers. By default, a column's type says so; columns of objects are put to a private
            vote.
        feature_bounds: public bounds of numeric columns, which then cost nothing to scale: a
            mapping from names or positions to (low, high), or an array of two rows.
        rule: choices other than those of `TabularRule.choose`.
        ledger: a `Ledger` or the path of one. Several fits with one ledger share one budget.
        random_state: fixes the initial weights. Noise and samples come from the operating system
            and are never the same twice, so fits differ all the same.
        device: where to train; by default on the CPU.
        progress: show a progress bar.
        run_dir: a folder that keeps the run: ledger, plan, released statistics, checkpoints, and
            the estimator. A fit that was broken off goes on where it was if it is called again with
            the same arguments and rows; `clipless report RUN` writes the report.
        class_weight: how much each class counts in predictions, by label (1 where not named), or
            "balanced" for one over its released frequency. The trained network's logits are shifted
            by the logarithm: no example's part grows, so it costs no noise.

    Attributes:
        classes_: the labels, sorted.
        decision_threshold_: the probability of the second of two classes from which on it is
            predicted; 0.5, until you set it, to `scores.threshold(recall=0.9)` for example.
        calibration_: scale and shift of the log odds; 1 and 0 until `calibrate` is called.
        feature_importances_: how much each column moves the output, from released numbers.
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
        class_weight: Mapping[Any, float] | str | None = None,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(
            epsilon, delta, rule=rule, ledger=ledger, random_state=random_state, device=device,
            progress=progress, run_dir=run_dir,
        )  # fmt: skip
        self.categorical_features = categorical_features
        self.feature_bounds = feature_bounds
        self.classes = classes
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, users: Any = None) -> Self:  # noqa: N803 - scikit-learn's names
        """Train on a table and its labels, of any type.

        A table larger than memory is given as what `clipless.data.LargeTable` reads, such as the
        path of Parquet files, and `y` is then the name of its target.

        A row without a label, or without any value, is an empty record and contributes nothing.

        `users`: whose each row is, if a person may have several: ids, or `Users(ids, records=k)`.
        What is protected is then a user with all rows, who counts once in every statistic and step.
        An id is no feature: leave its column out of the table.
        """
        if y is None:
            raise ValueError(
                f"This {type(self).__name__} estimator requires y to be passed, but the target y "
                "is None."
            )
        _check_weights(self.class_weight)
        large = self._in_pieces(X, y)
        scratch: Scratch | None = None
        if large is None:
            table = self._read(X, reset=True)
            labels = read_labels(y)
            check_consistent_length(X, labels.positions)
            positions = torch.from_numpy(labels.positions)
        else:
            rows = self._read_large(large, y)
            if rows.labels is None:
                raise not_set_error("labels")
            table, labels, positions, scratch = rows.table, rows.labels, rows.target, rows.scratch
        self._labels = labels
        self._public_classes = declared_classes(self.classes, labels.dtype)
        try:
            present = torch.tensor([cell.name is not None for cell in labels.cells])
            whose = given_users(users, len(positions))
            return self._fit(table, positions, present[positions], whose, scratch)
        finally:
            del self._labels

    def _criterion(self, rule: TabularRule) -> Loss:
        kind = BinaryCrossEntropy if len(self.classes_) == 2 else CrossEntropy
        return kind(tau=rule.temperature)

    def _queries(self, rule: TabularRule, rows: int, delta: float) -> list[Query]:
        found = super()._queries(rule, rows, delta)
        if self._public_classes is not None:
            return [*found, (rule.label_noise, 0.0)]
        failure = FAILURE_PART * delta
        threshold = value_threshold(noise_multiplier=rule.class_noise, failure=failure)
        if rows < 2 * threshold:
            raise ValueError(
                f"n_samples={rows} are too few to find out privately which classes there are: at "
                f"epsilon={self.epsilon:g} it takes about {threshold:.0f} rows of each. Name them: "
                "classes=[...]."
            )
        return [*found, (rule.class_noise, failure)]

    def _fitted_head(
        self, rows: PrivateRows, rule: TabularRule, delta: float
    ) -> tuple[PrivateRows, Head]:
        """Find out which classes there are, if that is not public, and how frequent they are."""
        cells, public = self._labels.cells, self._public_classes
        if public is None:
            counted = rows.noisy_values(
                lambda x, codes, y: y,
                values=[cell.name or "" for cell in cells],
                noise_multiplier=rule.class_noise,
                failure=FAILURE_PART * delta,
                label="classes",
            )
            by_name = {cell.name: cell for cell in cells if cell.name in counted}
            public = sorted_cells(by_name.values())
            self._require_two(public, rule, delta)
            found = [counted[cell.name] for cell in public if cell.name]
            self._require_labels(public, found, len(rows))
        names = [cell.name for cell in public]
        # The class of each label that occurs; labels that are no class are empty records.
        place = torch.tensor([names.index(c.name) if c.name in names else -1 for c in cells])
        rows = rows.map_rows(lambda x, codes, y: (x, codes, place[y.clamp(0, len(place) - 1)]))
        rows = rows.where(lambda x, codes, y: y >= 0)
        self.classes_ = class_array(public, self._labels)
        if self._public_classes is None:
            counts = torch.tensor([counted[name] for name in names if name is not None])
        else:
            counts = rows.noisy_counts(
                lambda x, codes, y: y[:, None],
                bins=[len(names)],
                noise_multiplier=rule.label_noise,
                label="class counts",
            )[0]
        prior = counts.clamp(min=max(1.0, 1e-3 * len(rows)))
        self._log_weights = self._weigh(self.class_weight, prior)
        logits = torch.log(prior / prior.sum())
        binary = len(names) == 2
        bias = (logits[1] - logits[0])[None] if binary else logits - logits.mean()
        return rows, Head(outputs=1 if binary else len(names), bias=bias / rule.temperature)

    def _require_two(self, found: list[Cell], rule: TabularRule, delta: float) -> None:
        if len(found) >= 2:
            return
        least = value_threshold(noise_multiplier=rule.class_noise, failure=FAILURE_PART * delta)
        fractions = "Unknown label type: " if self._labels.dtype.kind == "f" else ""
        raise ValueError(
            f"{fractions}a classifier needs at least two classes, and a noisy count shows "
            f"{len(found)} label(s) that more than about {least:.0f} rows have"
            f"{''.join(f' ({cell.value!r})' for cell in found)}. If you know the classes, name "
            "them: classes=[...]. Otherwise rare ones take more rows or a larger epsilon; for a "
            "target that is a quantity there is CliplessRegressor. What was asked is spent."
        )

    def _require_labels(self, found: list[Cell], counts: list[float], rows: int) -> None:
        """Refuse what looks like a quantity, and warn of rows left out: by noisy counts alone."""
        part = min(sum(counts) / rows, 1.0)
        covered = f"together about {part:.0%} of the rows"
        numbers = all(cell.kind == "number" for cell in found)
        if numbers and (len(found) > _MOST_NUMBERS or part < _LEAST_COVERED):
            raise ValueError(
                f"the target seems to be a quantity: a noisy count shows {len(found)} different "
                f"numbers that many rows hold, {covered}. For a quantity use CliplessRegressor "
                "(clipless train --task regression); if the numbers are classes, name them: "
                "classes=[...]. What was asked is spent."
            )
        if part < _LEAST_COVERED:
            warnings.warn(
                f"the {len(found)} classes found hold {covered}: all others have labels too rare "
                "to be told, or none, and contribute nothing. Name the classes: classes=[...].",
                stacklevel=2,
            )

    def _weigh(self, weights: Any, counts: Tensor) -> Tensor:
        """The logarithm of each class's weight: given, or one over its released frequency."""
        if weights is None:
            return torch.zeros_like(counts)
        if isinstance(weights, str):
            return -torch.log(counts / counts.sum())
        given = dict(zip((read_cell(key).name for key in weights), weights.values(), strict=True))
        names = [read_cell(each).name for each in self.classes_]
        return torch.log(torch.tensor([float(given.get(name, 1.0)) for name in names]).double())

    def _finish_network(self, network: torch.nn.Sequential, rule: TabularRule) -> None:
        """Shift the logits by the weights: what training with them would tend to, for free."""
        self.calibration_, self.decision_threshold_ = (1.0, 0.0), 0.5
        shift = self._log_weights - self._log_weights.mean()
        shift = (shift[1] - shift[0])[None] if len(shift) == 2 else shift
        add_to_bias(network, shift / rule.temperature)

    def _target(self, y: Tensor) -> Tensor:
        return y.float() if len(self.classes_) == 2 else y

    def _notes(self) -> tuple[str, ...]:
        if self._public_classes is not None:
            return (
                *super()._notes(),
                "The set of classes is public: given by the user, or booleans.",
            )
        return (
            *super()._notes(),
            "Which classes there are was found by a noisy count, which is paid for. Rows of rarer "
            "labels contribute nothing; `classes` fixes the set.",
        )

    def _fitted_numbers(self) -> dict[str, Any]:
        if self.classes_.dtype.kind not in "OUSbiuf":
            raise ValueError(f"labels of type {self.classes_.dtype} cannot be saved")
        return {
            "classes": self.classes_.tolist(), "dtype": self.classes_.dtype.str,
            "calibration": list(self.calibration_), "threshold": self.decision_threshold_,
        }  # fmt: skip

    def _restore_numbers(self, numbers: dict[str, Any]) -> None:
        self.classes_ = np.array(numbers["classes"], dtype=np.dtype(numbers["dtype"]))
        scale, shift = map(float, numbers["calibration"])
        self.calibration_, self.decision_threshold_ = (scale, shift), float(numbers["threshold"])


def _check_weights(weights: Any) -> None:
    """Refuse weights that are not "balanced", None, or positive numbers by label."""
    if weights is None or weights == "balanced":
        return
    if not isinstance(weights, Mapping):
        raise ValueError(
            f'class_weight must be a mapping from labels to weights, "balanced" or None, got '
            f"{weights!r}"
        )
    bad = [label for label, weight in weights.items() if not 0 < float(weight) < float("inf")]
    if bad:
        raise ValueError(f"class_weight must be positive and finite, which it is not for {bad}")
