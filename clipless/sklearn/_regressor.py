"""The private regressor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_consistent_length, check_is_fitted
from torch import Tensor

from clipless.losses import Huber, Loss
from clipless.privacy import Ledger
from clipless.sklearn._base import given_users
from clipless.sklearn._labels import read_labels
from clipless.sklearn._rule import TabularRule
from clipless.sklearn.results._scoring import AnyLedger, PrivateErrors, score_regressor
from clipless.sklearn.tables._table_inputs import TableInputs
from clipless.statistics import Scaling

_STEEPNESS = 8.0  # how many spreads of the target one unit of the network's output is
_HUBER = 1.35  # in spreads: 95% as efficient as squared error on Gaussian errors
_REACH = 4.0  # targets are clipped to this many spreads from their centre


class CliplessRegressor(RegressorMixin, TableInputs):
    """A regressor for tables, trained with differential privacy and nothing to tune.

    Guarantee and arguments are those of `CliplessClassifier`. The target is scaled like one more
    column, by the same three private queries; predictions lie within a few spreads of its centre.
    Errors are measured by a Huber loss, which follows the conditional mean but forgives outliers.

    Example:
        >>> from sklearn.datasets import make_regression
        >>> X, y = make_regression(5000, 8, noise=5.0, random_state=0)
        >>> regressor = CliplessRegressor(epsilon=2.0, random_state=0).fit(X, y)
        >>> regressor.privacy_.epsilon <= 2.0, regressor.score(X, y) > 0.7
        (True, True)
    """

    _extra_columns = 1

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float | None = None,
        *,
        categorical_features: Sequence[str | int] | None = None,
        feature_bounds: Any = None,
        rule: TabularRule | None = None,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        random_state: Any = None,
        device: str | None = None,
        progress: bool = False,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(
            epsilon, delta, rule=rule, ledger=ledger, random_state=random_state, device=device,
            progress=progress, run_dir=run_dir,
        )  # fmt: skip
        self.categorical_features = categorical_features
        self.feature_bounds = feature_bounds

    def fit(self, X: Any, y: Any, users: Any = None) -> Self:  # noqa: N803 - scikit-learn's names
        """Train on a table and one number for each of its rows.

        A table larger than memory is given as what `clipless.data.LargeTable` reads, and `y` is
        then the name of its target.

        A row without a target, or without any value, is an empty record and contributes nothing.

        `users`: whose each row is, if a person may have several: ids, or `Users(ids, records=k)`.
        What is protected is then a user with all rows, who counts once in every statistic and step.
        An id is no feature: leave its column out of the table.
        """
        if y is None:
            raise ValueError(
                f"This {type(self).__name__} estimator requires y to be passed, but the target y "
                "is None."
            )
        large = self._in_pieces(X, y)
        if large is not None:
            read = self._read_large(large, y, numeric=True)
            whose = given_users(users, len(read.target))
            return self._fit(read.table, read.target, ~read.target.isnan(), whose, read.scratch)
        table = self._read(X, reset=True)
        labels = read_labels(y)
        check_consistent_length(X, labels.positions)
        if labels.dtype.kind in "US":
            raise ValueError("y holds text: the target of a regressor must be numbers.")
        numbers = np.array([cell.number for cell in labels.cells])[labels.positions]
        target = torch.from_numpy(numbers)
        return self._fit(table, target, ~target.isnan(), given_users(users, len(target)))

    def _criterion(self, rule: TabularRule) -> Loss:
        return Huber(delta=_HUBER / _STEEPNESS)

    def _take_target(self, scaling: Scaling) -> Scaling:
        """Take the target's centre and spread off the end."""
        self._target_center = scaling.center[-1].item()
        self._target_spread = scaling.spread[-1].item()
        return replace(
            scaling,
            center=scaling.center[:-1],
            spread=scaling.spread[:-1],
            missing=scaling.missing[:-1],
            switches=scaling.switches[:-1],
            occupied=scaling.occupied[:-1],
        )

    def _target(self, y: Tensor) -> Tensor:
        scaled = ((y - self._target_center) / self._target_spread).clamp(-_REACH, _REACH)
        return (scaled / _STEEPNESS).float()[:, None]

    def _fitted_numbers(self) -> dict[str, Any]:
        return {"center": self._target_center, "spread": self._target_spread}

    def _restore_numbers(self, numbers: dict[str, Any]) -> None:
        self._target_center, self._target_spread = numbers["center"], numbers["spread"]

    @property
    def _output_unit(self) -> float:
        return self._target_spread * _STEEPNESS

    @property
    def _output_zero(self) -> float:  # type: ignore[override]
        return self._target_center

    @property
    def _target_scale(self) -> tuple[float, float]:
        """Centre and spread of the target, as released."""
        return self._target_center, self._target_spread

    def score_privately(
        self,
        X: Any,  # noqa: N803
        y: Any,
        *,
        epsilon: float,
        delta: float | None = None,
        ledger: AnyLedger = None,
    ) -> PrivateErrors:
        """Return the errors on private rows, with noise; see `CliplessClassifier`'s.

        Errors are counted on half octaves, from which means follow to within some percent.
        """
        check_is_fitted(self, "network_")
        return score_regressor(self, X, y, epsilon=epsilon, delta=delta, ledger=ledger)

    def predict(self, X: Any) -> Any:  # noqa: N803
        """Return the predicted number of every row."""
        outputs = self._outputs(X)[:, 0].numpy()
        return self._target_center + self._output_unit * outputs
