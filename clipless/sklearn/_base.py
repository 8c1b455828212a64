"""What classifier and regressor share: from a table to a trained network, all of it paid for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import _num_samples, check_is_fitted, validate_data
from torch import Tensor

from clipless import nn as lip
from clipless.data._channels import fit_covariance
from clipless.data._custody import PrivateRows
from clipless.data._scaling import Scaling, fit_scaling
from clipless.losses import Loss
from clipless.privacy import Ledger, Relation, default_delta
from clipless.sklearn._encoder import Encoder
from clipless.sklearn._fits import count_fit
from clipless.sklearn._rule import TabularRule
from clipless.sklearn._table import HASH_BUCKETS, Schema, columns_of, encode, read_schema
from clipless.training import LayerAdam, Trainer

_PREDICTION_ROWS = 65_536

NOTES = (
    "The schema of the table is treated as public: its columns, their names, and which of them "
    "hold text.",
)


@dataclass(frozen=True)
class Task:
    """What a classifier or a regressor adds to the common part."""

    outputs: int
    labels: Tensor
    """Private: one number for each row, as the criterion wants it."""


class CliplessEstimator(BaseEstimator):
    """Common part of the estimators. Not public: use a subclass."""

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
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.categorical_features = categorical_features
        self.feature_bounds = feature_bounds
        self.rule = rule
        self.ledger = ledger
        self.random_state = random_state
        self.device = device
        self.progress = progress

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = True
        tags.input_tags.string = True
        tags.non_deterministic = self.random_state is None
        return tags

    # --- fitting ---------------------------------------------------------------------------------

    def _read(self, table: Any, *, reset: bool) -> tuple[Tensor, Tensor]:
        """Check a table as scikit-learn does, and return its numbers and hash buckets."""
        if not (hasattr(table, "columns") and hasattr(table, "iloc")):
            table = check_array(
                table, dtype=None, ensure_all_finite="allow-nan", estimator=self, input_name="X"
            )
            if table.dtype.kind in "cV":
                raise ValueError("Complex data not supported: X must hold real numbers or text.")
        elif table.shape[0] < 1 or table.shape[1] < 1:
            raise ValueError(
                f"Found a table with {table.shape[0]} sample(s) and {table.shape[1]} feature(s), "
                "while a minimum of 1 is required."
            )
        validate_data(self, table, reset=reset, skip_check_array=True)
        columns, names = columns_of(table)
        if reset:
            self._schema = read_schema(columns, names, self.categorical_features)
            self.n_features_in_ = len(columns)
        numbers, codes = encode(columns, self._schema)
        if torch.isinf(numbers).any():
            raise ValueError(
                "Input X contains infinity or a value too large for dtype('float64'). Missing "
                "values are welcome as NaN."
            )
        return numbers, codes

    def _fit(self, table: tuple[Tensor, Tensor], task: Task) -> Self:
        numbers, codes = table
        rows = len(numbers)
        if not (isinstance(self.epsilon, float | int) and 0 < self.epsilon < float("inf")):
            raise ValueError(f"epsilon must be a finite number above 0, got {self.epsilon!r}")
        delta = default_delta(rows) if self.delta is None else self.delta
        columns = numbers.shape[1] + codes.shape[1] + self._extra_columns
        rule = self.rule or TabularRule.choose(rows=rows, columns=columns, epsilon=self.epsilon)
        seed = None
        if self.random_state is not None:
            seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        given, owned = self.ledger, not isinstance(self.ledger, Ledger)
        ledger = (
            given
            if isinstance(given, Ledger)
            else Ledger(given, dataset_size=rows, relation=Relation.ADD_REMOVE)
        )
        try:
            private = PrivateRows(numbers, codes, task.labels, ledger=ledger, seed=seed)
            with _seeded(seed):
                self._train(private, task, rule, delta, ledger, seed)
        finally:
            if owned:
                ledger.close()
        count_fit(self.privacy_.epsilon, self.privacy_.delta)
        return self

    def _train(
        self, rows: PrivateRows, task: Task, rule: TabularRule, delta: float, ledger: Ledger,
        seed: int | None,
    ) -> None:  # fmt: skip
        """Everything from here on knows the data through `rows` alone."""
        self.rule_ = rule
        scaling = self._scaling(rows, rule)
        self._encoder = self._fitted_encoder(rows, self._feature_scaling(scaling), rule)
        network = build_network(self._encoder.features, rule.hidden, task.outputs)
        self._start(network, rows, scaling, rule)
        network[-1].bias.requires_grad_(False)
        trainer = Trainer(
            network,
            self._criterion(rule),
            target_epsilon=float(self.epsilon),
            target_delta=delta,
            batch_size=rule.batch_size,
            steps=rule.steps,
            optimizer=lambda parameters: LayerAdam(parameters, lr=rule.learning_rate),
            average=rule.average,
            product_clip=rule.product_clip,
            sampling="full_batch" if rule.full_batch else "poisson",
            ledger=ledger,
            seed=seed,
            device=self.device,
            progress=bool(self.progress),
        )
        encoder, target = self._encoder, self._target
        inputs = rows.map_rows(lambda x, codes, y: (encoder(x, codes), target(y)))
        result = trainer.fit(inputs.hand_over())
        assert trainer.average is not None
        trainer.average.copy_to(network)
        self.network_ = network.cpu().eval()
        self.n_iter_ = result.steps
        self.privacy_ = replace(trainer.report(), notes=self._notes())

    def _scaling(self, rows: PrivateRows, rule: TabularRule) -> Scaling:
        """Ask for centre and spread of the columns that have no public bounds."""
        schema = self._schema
        bounds = _public_bounds(self.feature_bounds, schema)
        asked = [index for index in range(schema.numeric) if index not in bounds]
        selected = torch.tensor(asked, dtype=torch.long)
        buckets = [HASH_BUCKETS + 1] * sum(schema.categorical)
        extra = self._extra_columns
        nothing = torch.zeros(0, dtype=torch.float64)
        found = Scaling(nothing, nothing, nothing, nothing.bool(), (), 0.0)
        if asked or buckets or extra:
            found = fit_scaling(
                rows,
                numbers=lambda x, codes, y: torch.cat(
                    [x[:, selected], y[:, None].double()] if extra else [x[:, selected]], 1
                ),
                numeric=len(asked) + extra,
                codes=lambda x, codes, y: codes,
                buckets=buckets,
                noise_multiplier=rule.query_noise,
            )
        return _with_bounds(found, asked, bounds, schema.numeric, extra)

    def _fitted_encoder(self, rows: PrivateRows, scaling: Scaling, rule: TabularRule) -> Encoder:
        """Ask for the covariance of the encoded features too, where it is worth that."""
        encoder = Encoder.from_scaling(scaling)
        if not rule.decorrelates(rows=len(rows), features=encoder.features):
            return encoder
        covariance = fit_covariance(
            rows,
            features=lambda x, codes, y: encoder(x, codes).unsqueeze(-1),
            noise_multiplier=rule.covariance_noise,
            label="feature covariance",
        )
        return encoder.decorrelated(covariance, noise=rule.covariance_noise / len(rows))

    # What subclasses fill in. A regressor scales its target like one more column.
    _extra_columns = 0

    def _criterion(self, rule: TabularRule) -> Loss:
        raise NotImplementedError

    def _feature_scaling(self, scaling: Scaling) -> Scaling:
        return scaling

    def _start(
        self, network: torch.nn.Sequential, rows: PrivateRows, scaling: Scaling, rule: TabularRule
    ) -> None:
        """Set the network's bias, by paying for what it takes. It is not trained: noise on it
        would shift all outputs at once.
        """

    def _target(self, y: Tensor) -> Tensor:
        """Map private labels to what the criterion wants, each by itself."""
        return y

    def _fitted_numbers(self) -> dict[str, Any]:
        """What a saved estimator holds besides weights and encoding, as plain data."""
        raise NotImplementedError

    def _restore_numbers(self, numbers: dict[str, Any]) -> None:
        raise NotImplementedError

    def _notes(self) -> tuple[str, ...]:
        return NOTES

    # --- predicting ------------------------------------------------------------------------------

    @torch.no_grad()
    def _outputs(self, table: Any) -> Tensor:
        """The network's outputs for a table, (n, outputs), in float64."""
        check_is_fitted(self, "network_")
        numbers, codes = self._read(table, reset=False)
        pieces = [
            self.network_(self._encoder(numbers[start:][:_PREDICTION_ROWS],
                                        codes[start:][:_PREDICTION_ROWS]))
            for start in range(0, len(numbers), _PREDICTION_ROWS)
        ]  # fmt: skip
        return torch.cat(pieces).double()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted estimator to one file, without pickle; `clipless.sklearn.load` reads
        it. It holds weights, released statistics, the privacy report: nothing else of the data.
        """
        from clipless.sklearn._persistence import save

        check_is_fitted(self, "network_")
        save(self, path)


def build_network(features: int, hidden: int, outputs: int) -> torch.nn.Sequential:
    """Two spectral layers behind an input guard that puts every row on the unit sphere."""
    return torch.nn.Sequential(
        lip.BoundedInput(1.0, mode="sphere"),
        lip.SpectralLinear(features, hidden, constraint="ball"),
        lip.GroupSort(2),
        lip.SpectralLinear(hidden, outputs, bias=True, constraint="ball"),
    )


def _public_bounds(given: Any, schema: Schema) -> dict[int, tuple[float, float]]:
    """Public bounds by the position among the numeric columns."""
    if given is None:
        return {}
    numeric = [index for index, is_text in enumerate(schema.categorical) if not is_text]
    if isinstance(given, Mapping):
        pairs = {}
        for key, pair in given.items():
            index = schema.names.index(key) if schema.names and key in schema.names else key
            if index not in numeric:
                raise ValueError(f"feature_bounds names {key!r}, which is no numeric column")
            pairs[numeric.index(index)] = pair
    else:
        array = np.asarray(given, dtype=np.float64)
        if array.shape != (2, len(numeric)):
            raise ValueError(
                f"feature_bounds must be a mapping from columns to (low, high), or two rows of "
                f"{len(numeric)} numbers, the lower and the upper bounds; got shape {array.shape}"
            )
        pairs = dict(enumerate(zip(*array, strict=True)))
    for index, (low, high) in pairs.items():
        if not (np.isfinite(low) and np.isfinite(high) and low < high):
            raise ValueError(
                f"feature_bounds of numeric column {index} are {low} and {high}: they must be "
                "finite numbers, the lower one first"
            )
    return {index: (float(low), float(high)) for index, (low, high) in pairs.items()}


def _with_bounds(
    found: Scaling, asked: list[int], bounds: dict[int, tuple[float, float]], numeric: int,
    extra: int,
) -> Scaling:  # fmt: skip
    """Put columns with public bounds, which nobody asked about, between those asked about."""
    size = numeric + extra
    center, spread, missing = (torch.zeros(size, dtype=torch.float64) for _ in range(3))
    for index, (low, high) in bounds.items():
        # The standard deviation of a uniform column.
        center[index], spread[index] = (low + high) / 2, (high - low) / 12**0.5
    places = torch.tensor([*asked, *range(numeric, size)], dtype=torch.long)
    center[places], spread[places], missing[places] = found.center, found.spread, found.missing
    switches = torch.zeros(size, dtype=torch.bool)
    switches[places] = found.switches
    return Scaling(center, spread, missing, switches, found.categories, found.resolution)


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Draw initial weights from `seed`, and leave torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        if seed is None:
            torch.seed()
        else:
            torch.manual_seed(seed)
        yield


def row_count(table: Any) -> int:
    """How many rows a table has."""
    return int(_num_samples(table))
