"""`FederatedClient`: trains on its own data, bounds its update, adds its share of noise, counts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from clipless.common import Query, release_
from clipless.errors import BudgetExhaustedError, PrivacyError
from clipless.federated._cost import FederatedCost
from clipless.federated._grid import encoded_update
from clipless.federated._shares import SHARE_STEPS, NoiseShare
from clipless.federated._task import (
    RoundTask,
    copied_weights,
    flat_difference,
    load_weights,
    trained_parameters,
)
from clipless.federated._terms import FederatedTerms
from clipless.ledger import EntryKind
from clipless.privacy import Ledger, Relation

LocalTraining = Callable[[nn.Module, int], None]
"""Trains a model in place on the client's own records, for the round of that number."""
_LABEL = "federated round "
_INSECURE = " (not private: insecure_seed)"
_TERMS = "federated terms "
_BOOKING = threading.Lock()
"""Held from the look whether a round was answered until it is in the ledger."""


class FederatedClient:
    """One client of a federated run, with a ledger of its own.

    Guarantee, which needs no trust in the server: a message is an update of norm at most
    `terms.bound`, plus a share of noise where the terms say so, and is in the ledger before it is
    sent; each round is answered once, and no more than the planned ones. So the client's epsilon
    (`cost`) holds for everybody who sees sums of which the noise of the terms is a part: with
    shares, if all but `dropouts` and `colluding` clients add theirs and the server opens only the
    sum; with central noise, if the server adds it.

    Local training is any function, with any optimizer, data loader and number of steps; it needs
    no privacy of its own. If records within the client are to be protected as well, train with a
    `Trainer` or a `PrivacyEngine` there, whose ledger counts them.

    Args:
        model: the model to train; its weights are overwritten in every round.
        train: trains the model in place on the client's records.
        terms: what was agreed; a task under other terms is refused.
        ledger: a file that outlives the process, so that no round is answered twice.
        insecure_seed: for tests: noise that can be recomputed, and protects nothing.

    Example:
        >>> terms = FederatedTerms(clients=3, rounds=1, bound=1.0, noise_multiplier=1.0,
        ...                        noise="shares")
        >>> model = torch.nn.Linear(2, 1)
        >>> client = FederatedClient(model, lambda model, number: None, terms)
        >>> task = RoundTask(number=1, terms=terms.digest,
        ...                  weights={n: p.detach() for n, p in model.named_parameters()})
        >>> client.answer(task).shape, client.cost.rounds
        (torch.Size([3]), 1)
    """

    def __init__(
        self, model: nn.Module, train: LocalTraining, terms: FederatedTerms, *,
        ledger: str | os.PathLike[str] | Ledger | None = None, insecure_seed: int | None = None,
    ) -> None:  # fmt: skip
        self.model, self.terms = model, terms
        self._train = train
        terms.require_room(sum(each.numel() for each in trained_parameters(model).values()))
        self.ledger = opened_ledger(ledger, terms)
        self._noise = NoiseShare(insecure_seed=insecure_seed)
        self._mutex = threading.RLock()

    @property
    def answered(self) -> frozenset[int]:
        """The numbers of the rounds that were answered, by the ledger."""
        labels = (each.label for each in self.ledger.entries() if each.mechanism is not None)
        return frozenset(
            int(label.removeprefix(_LABEL).removesuffix(_INSECURE))
            for label in labels
            if label.startswith(_LABEL)
        )

    @property
    def cost(self) -> FederatedCost:
        """What the rounds so far have cost this client."""
        return FederatedCost.of(
            "this client", self.terms, self.ledger.history(), len(self.answered),
            insecure=self.ledger.insecure,
        )  # fmt: skip

    def answer(self, task: RoundTask) -> Tensor:
        """Train for one round, and return the message to be summed: (entries,) int64."""
        terms = self.terms
        if task.terms != terms.digest:
            raise PrivacyError(
                "the server's terms are not those that this client has agreed to: compare number "
                "of clients, rounds, bound, noise, rate, dropouts, colluding clients and delta"
            )
        if not 1 <= task.number <= terms.rounds:
            raise BudgetExhaustedError(
                f"round {task.number} is none of the {terms.rounds} that were agreed on"
            )
        with self._mutex:  # one model, hence one round at a time
            self._require_unanswered(task.number)
            load_weights(self.model, task.weights)
            before = copied_weights(self.model)
            self._train(self.model, task.number)
            moved = flat_difference(copied_weights(self.model), before)
            steps = encoded_update(moved, bound=terms.bound, limit=terms.limit)
            self._count(task.number)
            if terms.noise == "central":
                return steps
            message = steps.to(torch.float64)  # whole numbers far below 2^53: exact
            query = Query("federated update", float(terms.limit), float(SHARE_STEPS))
            release_([message], [query], self._noise)
            return message.to(torch.int64)

    def _count(self, number: int) -> None:
        """Write a round into the ledger, unless an answer went out during the training."""
        with _BOOKING:
            self._require_unanswered(number)
            label = f"{_LABEL}{number}{_INSECURE if self._noise.insecure else ''}"
            self.ledger.record(self.terms.taking_part, label=label)

    def _require_unanswered(self, number: int) -> None:
        if number in self.answered:
            raise PrivacyError(
                f"round {number} was answered before: another answer would cost once more"
            )


def opened_ledger(given: str | os.PathLike[str] | Ledger | None, terms: FederatedTerms) -> Ledger:
    """Return the ledger of one side, begun for these terms: a file is continued, or refused.

    The terms are named in it before the first round, as the cost of a round is told by them.
    """
    if isinstance(given, Ledger):
        _require_begun_for(given, terms)
        return given
    ledger = Ledger(given, dataset_size=terms.clients, relation=Relation.ZERO_OUT)
    try:
        _require_begun_for(ledger, terms)
    except BaseException:
        ledger.close()
        raise
    return ledger


def _require_begun_for(ledger: Ledger, terms: FederatedTerms) -> None:
    kept = (ledger.dataset_size, ledger.relation)
    if kept != (terms.clients, Relation.ZERO_OUT):
        raise PrivacyError(
            f"this ledger is about {kept[0]} units under {kept[1]}, and the terms are about "
            f"{terms.clients} clients under {Relation.ZERO_OUT}: give it a ledger of its own"
        )
    entries = ledger.entries()
    begun = {
        each.label.removeprefix(_TERMS)
        for each in entries
        if each.kind is EntryKind.OPEN and each.label.startswith(_TERMS)
    }
    if begun - {terms.digest} or (not begun and any(each.mechanism for each in entries)):
        raise PrivacyError(
            f"the ledger{' in memory' if ledger.path is None else ' ' + ledger.path} has counted "
            "something else, such as rounds under other terms, whose messages cost something "
            "else: agree on new terms with a ledger of their own, and add both costs up"
        )
    if not begun:
        ledger.begin_run(_TERMS + terms.digest)
