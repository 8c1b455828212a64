"""Common base of the estimators: private preprocessing and training on a table."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from clipless import nn as lip
from clipless.common import fresh_bits, not_set_error
from clipless.losses import Loss
from clipless.privacy import (
    Budget,
    FullBatch,
    Ledger,
    Mechanism,
    PrivacyOptions,
    ProvedBounds,
    Relation,
    SamplingName,
    named_sampling,
)
from clipless.sklearn._bounds import Bounds, public_bounds, with_bounds
from clipless.sklearn._encoder import Encoder
from clipless.sklearn._fits import count_fit
from clipless.sklearn._identifiers import ColumnWarning, identifiers, perhaps_identifiers
from clipless.sklearn._rule import TabularRule
from clipless.sklearn._table import (
    BALLOTS,
    HASH_BUCKETS,
    Rows,
    Schema,
    choose,
    columns_of,
    encode,
    read_schema,
)
from clipless.statistics import PrivateRows, Scaling, fit_covariance, fit_scaling
from clipless.training import LayerAdam, Trainer, TrainingOptions

_PREDICTION_ROWS = 65_536

NOTES = (
    "The schema of the table is treated as public: its columns, their names, and their types where "
    "it has types. Types that a reader guessed from the rows are part of what you call public.",
)
_VOTE_NOISE = 2.0
"""Noise of the vote on what columns hold, in units of that of other queries: majorities are plain.
"""
FAILURE_PART = 0.1
"""The part of delta that is spent on telling which classes there are."""


@dataclass(frozen=True)
class Head:
    """The network's last layer, as released values describe it: how many outputs, which bias."""

    outputs: int
    bias: Tensor | None = None


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
        tags.input_tags.sparse = True
        tags.input_tags.categorical = True
        tags.input_tags.string = True
        tags.non_deterministic = True  # noise is never drawn twice
        return tags

    # --- fitting ---------------------------------------------------------------------------------

    def _read(self, table: Any, *, reset: bool) -> Rows:
        """Check a table as scikit-learn does, and return its rows as tensors.

        Errors are about the container: its shape, names and types, never a value in it.
        """
        if isinstance(table, list | tuple):
            # numpy would give all values the type of the oddest one.
            table = np.array(table, dtype=object)
        if not (hasattr(table, "columns") and hasattr(table, "iloc")):
            table = check_array(
                table,
                dtype=None,
                accept_sparse=True,
                ensure_all_finite=False,
                estimator=self,
                input_name="X",
            )
        elif table.shape[0] < 1 or table.shape[1] < 1:
            raise ValueError(
                f"Found a table with {table.shape[0]} sample(s) and {table.shape[1]} feature(s), "
                "while a minimum of 1 is required."
            )
        validate_data(self, table, reset=reset, skip_check_array=True)
        columns, names = columns_of(table)
        if any(getattr(column.dtype, "kind", "O") in "cV" for column in columns):
            raise ValueError("Complex data not supported: X must hold real numbers or text.")
        if reset:
            self._schema = read_schema(
                columns, names, self.categorical_features, self.feature_bounds
            )
            self.n_features_in_ = len(columns)
            _warn_of_identifiers(self._schema)
        return encode(columns, self._schema)

    def _fit(self, table: Rows, labels: Tensor, present: Tensor) -> Self:
        """Train on rows and labels; `present` is False where a label is missing."""
        rows = len(labels)
        if not (isinstance(self.epsilon, float | int) and 0 < self.epsilon < float("inf")):
            raise ValueError(f"epsilon must be a finite number above 0, got {self.epsilon!r}")
        columns = len(self._schema.kinds) + self._extra_columns
        rule = self.rule or TabularRule.choose(rows=rows, columns=columns, epsilon=self.epsilon)
        bounds = public_bounds(self.feature_bounds, self._schema)
        filled = (table.codes < HASH_BUCKETS).any(1) | ~table.numbers.isnan().all(1)
        given, owned = self.ledger, not isinstance(self.ledger, Ledger)
        ledger = (
            given
            if isinstance(given, Ledger)
            else Ledger(given, dataset_size=rows, relation=Relation.ZERO_OUT)
        )
        try:
            budget = Budget.for_ledger(ledger, epsilon=float(self.epsilon), delta=self.delta)
            queries = self._queries(rule, rows, budget.delta, bounds)
            private = PrivateRows(*table, labels, ledger=ledger, present=present & filled)
            with ledger.held():  # fits that share a ledger come one after the other
                self._require_budget(rule, rows, ledger, budget, queries)
                before = ledger.releases
                try:
                    self._train(private, rule, budget.delta, ledger, bounds)
                finally:
                    if ledger.releases > before:  # also if it failed on the way
                        count_fit(budget.spent(ledger.history()), budget.delta)
        finally:
            if owned:
                ledger.close()
        return self

    def _require_budget(
        self,
        rule: TabularRule,
        rows: int,
        ledger: Ledger,
        budget: Budget,
        queries: list[tuple[float, float]],
    ) -> None:
        """Refuse, before anything is asked, what does not fit into the ledger's budget as a whole.

        All queries are known here, with their noise: they follow from public numbers alone.
        """
        whole = FullBatch(dataset_size=rows)
        planned = [
            (
                Mechanism(
                    noise_multiplier=noise,
                    sampling=whole,
                    relation=ledger.relation,
                    failure=failure,
                ),
                1,
            )
            for noise, failure in queries
        ]
        budget.require_all(ledger, planned)
        sampling = named_sampling(_sampling_name(rule), rows, rule.batch_size)
        budget.noise_multiplier(ledger, steps=rule.steps, sampling=sampling, before=planned)

    def _queries(
        self, rule: TabularRule, rows: int, delta: float, bounds: Bounds
    ) -> list[tuple[float, float]]:
        """Noise multiplier and failure probability of each query of a fit, in order."""
        schema = self._schema
        found = [(_VOTE_NOISE * rule.query_noise, 0.0)] if schema.undecided else []
        numeric = schema.numeric - len(bounds) + self._extra_columns
        if numeric or any(schema.categorical) or schema.undecided:
            found += [(rule.query_noise, 0.0)] * (3 if numeric or schema.undecided else 1)
        if rule.decorrelates(rows=rows, features=schema.expected_features):
            found.append((rule.covariance_noise, 0.0))
        return found

    def _train(
        self, rows: PrivateRows, rule: TabularRule, delta: float, ledger: Ledger, bounds: Bounds
    ) -> None:
        """Everything from here on knows the data through `rows` alone."""
        self.rule_ = rule
        before = self._schema
        rows = self._decide_kinds(rows, rule)
        scaling = self._scaling(rows, rule, bounds, ask_all=bool(before.undecided))
        decorrelates = rule.decorrelates(rows=len(rows), features=before.expected_features)
        self._encoder = self._fitted_encoder(
            rows, self._feature_scaling(scaling), rule, decorrelates
        )
        self._warn_of_columns()
        rows, head = self._fitted_head(rows, rule, delta)
        with _seeded(self.random_state):
            network = build_network(self._encoder.features, rule.hidden, head.outputs)
        _set_bias(network, head.bias)
        trainer = Trainer(
            network,
            self._criterion(rule),
            target_epsilon=float(self.epsilon),
            target_delta=delta,
            batch_size=rule.batch_size,
            steps=rule.steps,
            bounds=ProvedBounds(product_clip=rule.product_clip),
            options=PrivacyOptions(sampling=_sampling_name(rule)),
            training=TrainingOptions(
                optimizer=lambda parameters: LayerAdam(parameters, lr=rule.learning_rate),
                average=rule.average,
                ledger=ledger,
                device=self.device,
                progress=bool(self.progress),
            ),
        )
        encoder, target = self._encoder, self._target
        inputs = rows.map_rows(lambda x, codes, y: (encoder(x, codes), target(y)))
        result = trainer.fit(inputs.hand_over())
        if trainer.average is None:
            raise not_set_error("average")
        trainer.average.copy_to(network)
        self._finish_network(network.cpu(), rule)
        self.network_ = network.eval()
        self.n_iter_ = result.steps
        self.privacy_ = replace(trainer.report(), notes=self._notes())

    def _decide_kinds(self, rows: PrivateRows, rule: TabularRule) -> PrivateRows:
        """Put columns without a type to a vote, and leave every column in one form."""
        before, votes = self._schema, list[Tensor]()
        if before.undecided:
            votes = rows.noisy_counts(
                lambda x, codes, votes, y: votes,
                bins=[len(BALLOTS)] * len(before.undecided),
                noise_multiplier=_VOTE_NOISE * rule.query_noise,
                label="column kinds",
            )
        self._schema = before.decided(votes)
        one_form = choose(before, self._schema)
        return rows.map_rows(lambda x, codes, votes, y: (*one_form(x, codes, votes)[:2], y))

    def _scaling(
        self, rows: PrivateRows, rule: TabularRule, bounds: Bounds, *, ask_all: bool
    ) -> Scaling:
        """Ask for centre and spread of the columns that have no public bounds."""
        schema = self._schema
        numeric = [index for index, kind in enumerate(schema.kinds) if kind == "number"]
        public = {numeric.index(column): pair for column, pair in bounds.items()}
        asked = [index for index in range(schema.numeric) if index not in public]
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
                ask_all=ask_all,
            )
        return with_bounds(found, asked, public, schema.numeric, extra)

    def _fitted_encoder(
        self, rows: PrivateRows, scaling: Scaling, rule: TabularRule, decorrelates: bool
    ) -> Encoder:
        """Ask for the covariance of the encoded features too, where it is worth that."""
        encoder = Encoder.from_scaling(scaling)
        if not decorrelates:
            return encoder
        covariance = fit_covariance(
            rows,
            features=lambda x, codes, y: encoder(x, codes).unsqueeze(-1),
            noise_multiplier=rule.covariance_noise,
            label="feature covariance",
        )
        return encoder.decorrelated(covariance, noise=rule.covariance_noise / len(rows))

    def _warn_of_columns(self) -> None:
        """Name columns of categories of which none is frequent: by released counts alone."""
        coded = [at for at, each in enumerate(self._schema.categorical) if each]
        for at, kept in zip(coded, self._encoder.buckets, strict=True):
            if not len(kept):
                warnings.warn(
                    f"column {self._schema.name(at)} holds no value that many rows share, by a "
                    "noisy count: it tells the model nothing. It may be an identifier or free "
                    "text: leave it out, since every column takes a part of the budget. Or the "
                    "table is too small for its categories at this epsilon.",
                    ColumnWarning,
                    stacklevel=2,
                )

    # What subclasses fill in. A regressor scales its target like one more column.
    _extra_columns = 0

    def _criterion(self, rule: TabularRule) -> Loss:
        raise NotImplementedError

    def _feature_scaling(self, scaling: Scaling) -> Scaling:
        return scaling

    def _fitted_head(
        self, rows: PrivateRows, rule: TabularRule, delta: float
    ) -> tuple[PrivateRows, Head]:
        """Return the rows with labels as `_target` wants them, and the network's last layer.

        The bias is paid for here and not trained: noise on it would shift all outputs at once.
        """
        return rows, Head(outputs=1)

    def _finish_network(self, network: torch.nn.Sequential, rule: TabularRule) -> None:
        """Change the trained network by released or public numbers alone."""

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
        numbers, codes, _ = self._read(table, reset=False)
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


def _warn_of_identifiers(schema: Schema) -> None:
    """Say which columns are left out, or may have to be, by their names alone."""
    names = schema.names or ()
    for at in sorted(identifiers(names) | perhaps_identifiers(names)):
        if schema.kinds[at] == "ignored":
            words = (
                "is not used: by its name it numbers the rows, and what a model learns from that "
                "does not carry over. To use it, name it in categorical_features or feature_bounds"
            )
        elif at in perhaps_identifiers(names) and schema.kinds[at] != "category":
            words = (
                "may hold identifiers, by its name, and is used like any other column. Leave it "
                "out if it tells people apart; name it in categorical_features if its numbers are "
                "categories"
            )
        else:
            continue
        warnings.warn(f"column {schema.name(at)} {words}.", ColumnWarning, stacklevel=2)


def _sampling_name(rule: TabularRule) -> SamplingName:
    return "full_batch" if rule.full_batch else "poisson"


def build_network(features: int, hidden: int, outputs: int) -> torch.nn.Sequential:
    """Two spectral layers behind an input guard that puts every row on the unit sphere."""
    return torch.nn.Sequential(
        lip.BoundedInput(1.0, mode="sphere"),
        lip.SpectralLinear(features, hidden, constraint="ball"),
        lip.GroupSort(2),
        lip.SpectralLinear(hidden, outputs, bias=True, constraint="ball"),
    )


def add_to_bias(network: torch.nn.Sequential, shift: Tensor) -> None:
    """Shift the outputs of a trained network, as far as the bound of its last bias lets."""
    head = network[-1]
    if not isinstance(head, lip.SpectralLinear) or head.bias is None:
        raise TypeError("the network must end in a spectral layer with a bias")
    with torch.no_grad():
        head.bias.add_(shift)
    head.project()


def _set_bias(network: torch.nn.Sequential, bias: Tensor | None) -> None:
    head = network[-1]
    if not isinstance(head, lip.SpectralLinear) or head.bias is None:
        raise TypeError("the network must end in a spectral layer with a bias")
    if bias is not None:
        with torch.no_grad():
            head.bias.copy_(bias)
        head.project()
    head.bias.requires_grad_(False)


@contextlib.contextmanager
def _seeded(random_state: Any) -> Iterator[None]:
    """Draw initial weights by `random_state`, and leave torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        if random_state is None:
            torch.manual_seed(fresh_bits(63))
        else:
            torch.manual_seed(int(check_random_state(random_state).randint(2**31 - 1)))
        yield
