"""Common base of the estimators: a budget, private queries, training, and what is kept."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from clipless.common import not_set_error
from clipless.data import LargeTable, Scratch, as_large_table
from clipless.losses import Loss
from clipless.privacy import (
    BatchOptions,
    Budget,
    FullBatch,
    Ledger,
    Mechanism,
    PrivacyOptions,
    ProvedBounds,
    Relation,
    SamplingName,
    Users,
    named_sampling,
)
from clipless.sklearn._fit_folder import FitFolder
from clipless.sklearn._fits import count_fit
from clipless.sklearn._network import build_network, seeded, set_bias
from clipless.sklearn._rule import TabularRule
from clipless.sklearn.tables._table import HASH_BUCKETS, Rows
from clipless.statistics import PrivateRows, Scaling
from clipless.training import LayerAdam, Trainer, TrainingOptions

_PREDICTION_ROWS = 65_536
_CHECKPOINT_EVERY = 25  # steps, with a run folder
_ROWS_AT_ONCE = 32_768  # of a training step

Query = tuple[float, float]
"""Noise multiplier and failure probability of a private query."""
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
        rule: TabularRule | None = None,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        random_state: Any = None,
        device: str | None = None,
        progress: bool = False,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.rule = rule
        self.ledger = ledger
        self.random_state = random_state
        self.device = device
        self.progress = progress
        self.run_dir = run_dir

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = True  # noise is never drawn twice
        return tags

    # --- fitting ---------------------------------------------------------------------------------

    def _fit(
        self,
        table: Rows,
        labels: Tensor,
        present: Tensor,
        users: Users | None = None,
        scratch: Scratch | None = None,
    ) -> Self:
        """Train on rows and labels; `present` is False where a label is missing.

        With `users`, all that counts rows from here on counts users. With `scratch`, rows are
        tensors in files, and what is made of them is kept there too.
        """
        rows = len(labels) if users is None else users.number
        if not (isinstance(self.epsilon, float | int) and 0 < self.epsilon < float("inf")):
            raise ValueError(f"epsilon must be a finite number above 0, got {self.epsilon!r}")
        rule = self.rule or self._choose_rule(rows)
        if self.run_dir is not None and self.ledger is not None:
            raise ValueError("give either a ledger or run_dir, which keeps its own")
        folder = None if self.run_dir is None else FitFolder(self.run_dir)
        given = self.ledger if folder is None else folder.ledger
        owned = not isinstance(given, Ledger)
        ledger = (
            given
            if isinstance(given, Ledger)
            else Ledger(
                given,
                dataset_size=rows,
                relation=Relation.ZERO_OUT,
                unit=None if users is None else users.digest,
            )
        )
        try:
            budget = Budget.for_ledger(ledger, epsilon=float(self.epsilon), delta=self.delta)
            queries = self._queries(rule, rows, budget.delta)
            about = self._about(table, rule, rows, budget.delta, users)
            answers = None if folder is None else folder.answers(about)
            private = PrivateRows(
                *table,
                labels,
                ledger=ledger,
                present=present & _filled(table),
                users=users,
                scratch=scratch,
                answers=answers,
            )
            with ledger.held():  # fits that share a ledger come one after the other
                before = ledger.history()
                if answers is not None:  # those that were kept are in the ledger
                    queries = queries[len(answers) :]
                # Once training has begun, its plan keeps the budget.
                trained = folder is not None and folder.training
                if queries or not trained:
                    self._require_budget(rule, rows, ledger, budget, queries, train=not trained)
                try:
                    self._train(private, rule, budget.delta, ledger, folder, users)
                finally:
                    after = ledger.history() if folder is None else folder.history()
                    if after != before:  # also if it failed on the way
                        count_fit(budget.spent(after), budget.delta)
        finally:
            if owned:
                ledger.close()
        if folder is not None:
            self.save(folder.estimator)
            folder.describe(self)
        return self

    def _about(
        self, table: Rows, rule: TabularRule, rows: int, delta: float, users: Users | None
    ) -> dict[str, Any]:
        """What a fit that goes on must share with its beginning: public, as plain data."""
        schema = getattr(self, "_schema", None)
        return {
            "estimator": type(self).__name__,
            "epsilon": float(self.epsilon),
            "delta": delta,
            "rule": asdict(rule),
            "rows": rows,
            **({} if users is None else {"users": users.digest}),
            "inputs": [part.shape[1] for part in table],
            "columns": None if schema is None else schema.to_dict(),
            "classes": str(getattr(self, "classes", None)),
        }

    def _require_budget(
        self,
        rule: TabularRule,
        rows: int,
        ledger: Ledger,
        budget: Budget,
        queries: list[Query],
        *,
        train: bool,
    ) -> None:
        """Refuse, before anything is asked, what does not fit into the ledger's budget as a whole.

        All queries are known here, with their noise: they follow from public numbers alone. Of a
        fit that goes on they are those to come; what it has spent, on failures too, is in the
        ledger.
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
        if not train:
            return
        sampling = named_sampling(_sampling_name(rule), rows, rule.batch_size)
        budget.noise_multiplier(ledger, steps=rule.steps, sampling=sampling, before=planned)

    def _train(
        self,
        rows: PrivateRows,
        rule: TabularRule,
        delta: float,
        ledger: Ledger,
        folder: FitFolder | None,
        users: Users | None,
    ) -> None:
        """Everything from here on knows the data through `rows` alone."""
        self.rule_ = rule
        rows = self._prepare(rows, rule)
        rows, head = self._fitted_head(rows, rule, delta)
        with seeded(self.random_state):
            network = build_network(self._encoder.features, rule.hidden, head.outputs)
        set_bias(network, head.bias)
        if folder is not None:
            ledger.close()  # the trainer goes on with the file
        trainer = Trainer(
            network,
            self._criterion(rule),
            target_epsilon=float(self.epsilon),
            target_delta=delta,
            batch_size=rule.batch_size,
            steps=rule.steps,
            bounds=ProvedBounds(product_clip=rule.product_clip),
            options=PrivacyOptions(
                sampling=_sampling_name(rule),
                unit=users,
                batches=BatchOptions(micro_batch_size=_micro_batch_size(rule)),
            ),
            run_dir=None if folder is None else folder.path,
            training=TrainingOptions(
                optimizer=lambda parameters: LayerAdam(parameters, lr=rule.learning_rate),
                average=rule.average,
                ledger=ledger if folder is None else None,
                resume=folder is not None,
                checkpoint_every=_CHECKPOINT_EVERY,
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

    # What kinds of inputs fill in: tables, texts.

    _encoder: Any
    """Maps (n, p) numbers and (n, q) codes to (n, features) inputs of the network."""

    def _read(self, table: Any, *, reset: bool) -> Rows:
        """Check what is passed to `fit` or `predict`, and return its rows as tensors."""
        raise NotImplementedError

    _reads_pieces = False
    """Whether tables that are read in pieces are taken, too."""

    def _in_pieces(self, table: Any, target: Any) -> LargeTable | None:
        """Return the table if it is read in pieces: not one in memory, with a target of its own."""
        if not self._reads_pieces or (hasattr(table, "shape") and not isinstance(target, str)):
            return None
        return as_large_table(table)

    def _pieces_of(self, table: LargeTable) -> Iterable[Rows]:
        """Yield the rows of a table that is read in pieces."""
        raise NotImplementedError

    def _choose_rule(self, rows: int) -> TabularRule:
        raise NotImplementedError

    def _queries(self, rule: TabularRule, rows: int, delta: float) -> list[Query]:
        """All private queries of a fit, in order: known before the first one is asked."""
        raise NotImplementedError

    def _prepare(self, rows: PrivateRows, rule: TabularRule) -> PrivateRows:
        """Ask what the encoder is made of; return rows of numbers, codes and label."""
        raise NotImplementedError

    def _describe_inputs(self) -> dict[str, Any]:
        """Return what a saved estimator holds of its inputs, besides the encoder's tensors."""
        raise NotImplementedError

    def _restore_inputs(
        self, described: dict[str, Any], parts: dict[str, Tensor], encoder: Any
    ) -> None:
        """Restore what `_describe_inputs` and the tensors of the encoder say."""
        raise NotImplementedError

    # What kinds of targets fill in. A regressor scales its target like one more column.

    _extra_columns = 0

    @property
    def _output_unit(self) -> float:
        """How much one unit of the network's output means: in logits, or in the target."""
        return self.rule_.temperature

    _output_zero = 0.0
    """What an output of zero means: in logits, or in the target."""

    def _criterion(self, rule: TabularRule) -> Loss:
        raise NotImplementedError

    def _take_target(self, scaling: Scaling) -> Scaling:
        """Return the scaling of the columns alone, without the target's at the end."""
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
        raise NotImplementedError

    # --- predicting ------------------------------------------------------------------------------

    @torch.no_grad()
    def _outputs(self, table: Any) -> Tensor:
        """The network's outputs for a table, (n, outputs), in float64."""
        check_is_fitted(self, "network_")
        large = as_large_table(table) if self._reads_pieces else None
        tables = [self._read(table, reset=False)] if large is None else self._pieces_of(large)
        pieces = [
            self.network_(self._encoder(rows.numbers[start:][:_PREDICTION_ROWS],
                                        rows.codes[start:][:_PREDICTION_ROWS]))
            for rows in tables
            for start in range(0, len(rows.numbers), _PREDICTION_ROWS)
        ]  # fmt: skip
        return torch.cat(pieces).double()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted estimator to one file, without pickle; `clipless.sklearn.load` reads
        it. It holds weights, released statistics, the privacy report: nothing else of the data.
        """
        from clipless.sklearn._persistence import save

        check_is_fitted(self, "network_")
        save(self, path)


def given_users(users: Any, rows: int) -> Users | None:
    """Return whose the rows of a table are: what `fit` was given, as `Users`."""
    if users is None:
        return None
    found = users if isinstance(users, Users) else Users(users)
    if len(found) != rows:
        raise ValueError(
            f"users has ids for {len(found)} rows, but the table has {rows}: give one for each"
        )
    return found


def _filled(table: Rows) -> Tensor:
    """Return which rows hold any value."""
    parts = [
        (codes < HASH_BUCKETS).any(1) | ~numbers.isnan().all(1)
        for numbers, codes in zip(
            table.numbers.split(_PREDICTION_ROWS), table.codes.split(_PREDICTION_ROWS), strict=True
        )
    ]
    return torch.cat(parts)


def _micro_batch_size(rule: TabularRule) -> int | None:
    """Return how many rows of a step are in memory at a time, where there are many."""
    return _ROWS_AT_ONCE if rule.batch_size > _ROWS_AT_ONCE else None


def _sampling_name(rule: TabularRule) -> SamplingName:
    return "full_batch" if rule.full_batch else "poisson"
