"""Tables as the input of an estimator: schema, private queries on the columns, and the encoder."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from sklearn.utils import check_array
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from clipless.data import LargeTable
from clipless.sklearn._base import CliplessEstimator, Query
from clipless.sklearn._rule import TabularRule
from clipless.sklearn.results._explain import contributions, dependence, importances
from clipless.sklearn.tables._bounds import Bounds, public_bounds, with_bounds
from clipless.sklearn.tables._encoder import Encoder
from clipless.sklearn.tables._identifiers import ColumnWarning, identifiers, perhaps_identifiers
from clipless.sklearn.tables._large import LargeRows, check_target, encode_piece, read_large
from clipless.sklearn.tables._table import (
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

_NOTE = (
    "The schema of the table is treated as public: its columns, their names, and their types where "
    "it has types. Types that a reader guessed from the rows are part of what you call public."
)
_VOTE_NOISE = 2.0
"""Noise of the vote on what columns hold, in units of that of other queries: majorities are plain.
"""


class TableInputs(CliplessEstimator):
    """What an estimator knows of tables. Not public: use a subclass."""

    categorical_features: Sequence[str | int] | None
    feature_bounds: Any
    _schema: Schema

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.categorical = True
        tags.input_tags.string = True
        tags.input_tags.allow_nan = True
        return tags

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

    _reads_pieces = True

    def _read_large(self, table: LargeTable, target: Any, *, numeric: bool = False) -> LargeRows:
        """Read a table that does not fit into memory, and its target: a column of it."""
        check_target(table, target)
        types = table.types.drop(columns=target)
        validate_data(self, types, reset=True, skip_check_array=True)
        columns, names = columns_of(types)
        self._schema = read_schema(columns, names, self.categorical_features, self.feature_bounds)
        self.n_features_in_ = len(columns)
        _warn_of_identifiers(self._schema)
        return read_large(table, target, self._schema, numeric=numeric)

    def _pieces_of(self, table: LargeTable) -> Iterator[Rows]:
        """Yield the rows of a table that is read in pieces: of the columns that were fitted."""
        names = self._schema.names
        lacking = [name for name in names or () if name not in table.names]
        if names is None or lacking:
            raise ValueError(
                f"{table.name} lacks columns that the estimator was fitted on: "
                f"{', '.join(lacking) or 'they have no names'}"
            )
        for piece in table.pieces(names):
            yield encode_piece(piece, names, self._schema)

    @property
    def feature_importances_(self) -> Any:
        """How much each column moves the output, adding up to 1, from released numbers alone."""
        check_is_fitted(self, "network_")
        return importances(self.network_, self._encoder, self._schema)

    def describe_columns(self) -> list[dict[str, Any]]:
        """Return what a model makes of each column, as plain data, from released numbers alone.

        Of each: its name, what it holds, its importance; and of numbers the partial dependence:
        `values` from one end of the column to the other, and what the output is there on average
        (log odds for two classes, the target for a regressor; one list for each class of more).
        """
        check_is_fitted(self, "network_")
        importance = self.feature_importances_
        curves = dependence(self.network_, self._encoder, self._schema)
        found = list[dict[str, Any]]()
        for at, kind in enumerate(self._schema.kinds):
            name = str(at) if self._schema.names is None else self._schema.names[at]
            column = {"name": name, "kind": kind, "importance": float(importance[at])}
            if at in curves:
                values, outputs = curves[at]
                lines = (self._output_zero + self._output_unit * outputs).T.tolist()
                column |= {"values": values.tolist(), "outputs": lines}
            found.append(column)
        return found

    def contributions(self, X: Any) -> Any:  # noqa: N803
        """Return what each column adds to the output of each row: (n, columns).

        Parts add up to the difference from a row of centres: of logits for two classes, of the
        target for a regressor. For more classes, (n, classes, columns).
        """
        check_is_fitted(self, "network_")
        numbers, codes, _ = self._read(X, reset=False)
        parts = contributions(self.network_, self._encoder, self._schema, numbers, codes)
        parts = parts * self._output_unit
        return parts[:, 0] if parts.shape[1] == 1 else parts

    def _choose_rule(self, rows: int) -> TabularRule:
        columns = len(self._schema.kinds) + self._extra_columns
        return TabularRule.choose(rows=rows, columns=columns, epsilon=self.epsilon)

    def _queries(self, rule: TabularRule, rows: int, delta: float) -> list[Query]:
        """Noise multiplier and failure probability of each query of a fit, in order."""
        schema = self._schema
        bounds = public_bounds(self.feature_bounds, schema)
        found = [(_VOTE_NOISE * rule.query_noise, 0.0)] if schema.undecided else []
        numeric = schema.numeric - len(bounds) + self._extra_columns
        if numeric or any(schema.categorical) or schema.undecided:
            found += [(rule.query_noise, 0.0)] * (3 if numeric or schema.undecided else 1)
        if rule.decorrelates(rows=rows, features=schema.expected_features):
            found.append((rule.covariance_noise, 0.0))
        return found

    def _prepare(self, rows: PrivateRows, rule: TabularRule) -> PrivateRows:
        before = self._schema
        bounds = public_bounds(self.feature_bounds, before)
        rows = self._decide_kinds(rows, rule)
        scaling = self._scaling(rows, rule, bounds, ask_all=bool(before.undecided))
        decorrelates = rule.decorrelates(rows=len(rows), features=before.expected_features)
        self._encoder = self._fitted_encoder(rows, self._take_target(scaling), rule, decorrelates)
        self._warn_of_columns()
        return rows

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
        encoder = Encoder.from_scaling(scaling, step=rule.knot_step)
        covariance, noise = None, rule.covariance_noise / len(rows)
        if decorrelates:
            covariance = fit_covariance(
                rows,
                features=lambda x, codes, y: encoder(x, codes).unsqueeze(-1),
                noise_multiplier=rule.covariance_noise,
                label="feature covariance",
            )
        directions = rule.product_directions(rows=len(rows), features=encoder.base)
        if directions:
            return encoder.with_products(covariance, noise=noise, directions=directions)
        return encoder if covariance is None else encoder.decorrelated(covariance, noise=noise)

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

    def _notes(self) -> tuple[str, ...]:
        return (_NOTE,)

    def _describe_inputs(self) -> dict[str, Any]:
        return self._schema.to_dict()

    def _restore_inputs(
        self, described: dict[str, Any], parts: dict[str, Tensor], encoder: Any
    ) -> None:
        self._schema = Schema.from_dict(described)
        self.n_features_in_ = len(self._schema.kinds)
        if self._schema.names is not None:
            self.feature_names_in_ = np.array(self._schema.names, dtype=object)
        self._encoder = Encoder.from_dict(parts)


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
