"""`FederatedServer`: asks clients, checks and sums what they send, adds noise, counts."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from clipless.common import Query, fresh_bits, release_
from clipless.errors import BudgetExhaustedError, PrivacyError
from clipless.federated._client import opened_ledger
from clipless.federated._cost import FederatedCost
from clipless.federated._grid import decoded_update, excess
from clipless.federated._task import RoundTask, copied_weights, trained_parameters
from clipless.federated._terms import FederatedTerms
from clipless.privacy import GaussianNoise, Ledger

_Name = TypeVar("_Name", bound=Hashable)
_LABEL = "federated round"
_COIN_BITS = 64


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """What a round has come to: for the server's eyes, except the update."""

    number: int
    summed: tuple[Hashable, ...]
    """The clients whose messages are part of the sum."""
    refused: Mapping[Any, str]
    """Why others are not."""
    update: Tensor
    """The noisy mean update, (entries,) float64: what is released."""


class FederatedServer:
    """The server of a federated run: rounds of asking, summing, noise and one optimizer step.

    Guarantee, for each client: what is released, and the model after every round, is
    (epsilon, delta)-private by `cost`, provided that the server is trusted with single updates
    (central noise), or opens only the sum (shares). A message that is longer than the bound counts
    as nothing; with shares that cannot be seen in a message, and each client bounds its own, on
    which its own guarantee rests and nobody else's.

    The mean is the sum over the public expected number of clients, never over those that came.
    Rounds are in the ledger before clients are asked. With a file for a ledger, a server that
    starts again goes on with the next round, under fresh noise.

    Args:
        model: the model whose weights are sent out, and moved by what comes back.
        terms: what was agreed with all clients.
        optimizer: moves the weights along the mean update, as if it were minus a gradient. By
            default SGD with rate 1, which is federated averaging.
        after_step: what follows each step, such as a projection: post-processing.
        ledger: a file, or a ledger; by default one in memory.
        insecure_seed: for tests: noise that can be recomputed, and protects nothing.

    Example:
        >>> terms = FederatedTerms(clients=2, rounds=1, bound=1.0, noise_multiplier=0.01)
        >>> server = FederatedServer(torch.nn.Linear(2, 1), terms)
        >>> task = server.begin_round()
        >>> asked = server.chosen(["a", "b"])
        >>> result = server.finish_round({name: torch.zeros(3).long() for name in asked})
        >>> result.summed, server.cost.rounds
        (('a', 'b'), 1)
    """

    def __init__(
        self, model: nn.Module, terms: FederatedTerms, *,
        optimizer: torch.optim.Optimizer | None = None,
        after_step: Callable[[nn.Module], None] | None = None,
        ledger: str | os.PathLike[str] | Ledger | None = None, insecure_seed: int | None = None,
    ) -> None:  # fmt: skip
        self.model, self.terms = model, terms
        parameters = trained_parameters(model)
        self._entries = sum(each.numel() for each in parameters.values())
        terms.require_room(self._entries)
        self.optimizer = optimizer or torch.optim.SGD(parameters.values(), lr=1.0)
        self._after_step = after_step
        self.ledger = opened_ledger(ledger, terms)
        self._noise = GaussianNoise(insecure_seed=insecure_seed)
        self._asked: tuple[Hashable, ...] | None = None
        self._open = False

    @property
    def number(self) -> int:
        """The number of the last round that has begun, 0 before the first."""
        return self.ledger.releases

    @property
    def cost(self) -> FederatedCost:
        """What the rounds so far have cost each client."""
        return FederatedCost.of(
            "the server", self.terms, self.ledger.history(), self.number,
            insecure=self.ledger.insecure,
        )  # fmt: skip

    def begin_round(self) -> RoundTask:
        """Count the next round, and return what its clients are to be sent."""
        if self.number >= self.terms.rounds:
            raise BudgetExhaustedError(
                f"all {self.terms.rounds} rounds of the terms are taken: agree on new ones, under "
                "another ledger, whose cost adds to this one's"
            )
        insecure = " (not private: insecure_seed)" if self._noise.insecure else ""
        self.ledger.record(self.terms.mechanism, label=f"{_LABEL} {self.number + 1}{insecure}")
        self._open, self._asked = True, None
        weights = copied_weights(self.model)
        return RoundTask(number=self.number, terms=self.terms.digest, weights=weights)

    def chosen(self, available: Sequence[_Name]) -> list[_Name]:
        """Return which of the clients are asked: each with probability `terms.rate`, once a round.

        Coins come from the operating system. Who was asked is secret where the rate is below 1.

        Raises:
            PrivacyError: if fewer clients are there than shares of noise are needed, so that
                nobody answers, and pays, for a sum that could not be opened; or more than agreed.
        """
        self._require_open()
        if self._asked is not None:
            raise PrivacyError("the clients of this round are chosen: a second draw is none of "
                               "the sampling that is accounted for")  # fmt: skip
        if len(set(available)) != len(available) or len(available) > self.terms.clients:
            raise PrivacyError(
                f"{len(available)} clients are there, of {len(set(available))} names, but the "
                f"terms are for {self.terms.clients}: the number of clients is public and fixed"
            )
        threshold = int(self.terms.rate * 2**_COIN_BITS)  # rounded down: never above the rate
        if self.terms.noise == "shares" and len(available) < self._least:
            raise PrivacyError(
                f"{len(available)} clients are there, but the terms need {self._least} shares of "
                f"noise (of {self.terms.clients} clients {self.terms.dropouts} may drop out): "
                "nobody is asked. Wait for more, and choose again"
            )
        asked = [each for each in available if fresh_bits(_COIN_BITS) < threshold]
        self._asked = tuple(asked)
        return asked

    def finish_round(self, messages: Mapping[_Name, Tensor]) -> RoundResult:
        """Sum the messages of a round, add the noise that is due, and take a step.

        Raises:
            PrivacyError: if fewer shares have come than the planned noise needs; nothing is
                opened then, and the round stays counted.
        """
        self._require_open()
        if self._asked is None:
            raise PrivacyError("choose the clients of a round first: chosen(available)")
        refused = {name: why for name, each in messages.items() if (why := self._flaw(name, each))}
        summed = tuple(name for name in messages if name not in refused)
        self._open = False
        if self.terms.noise == "shares" and len(summed) < self._least:
            raise PrivacyError(
                f"{len(summed)} shares of noise have come, but the terms need {self._least} (of "
                f"{self.terms.clients} clients {self.terms.dropouts} may drop out): the sum must "
                "not be opened"
            )
        total = torch.zeros(self._entries, dtype=torch.int64)
        for name in summed:
            total += messages[name].cpu()
        noisy = total.to(torch.float64)
        if self.terms.noise == "central":
            limit = float(self.terms.limit)
            query = Query(_LABEL, limit, self.terms.noise_multiplier * limit)
            release_([noisy], [query], self._noise)
        mean = decoded_update(noisy, bound=self.terms.bound, limit=self.terms.limit)
        update = mean / self.terms.expected
        self._step(update)
        return RoundResult(number=self.number, summed=summed, refused=refused, update=update)

    @property
    def _least(self) -> int:
        """How many shares a sum needs that is opened."""
        return self.terms.clients - self.terms.dropouts

    def _flaw(self, name: Hashable, message: Tensor) -> str | None:
        """Return why a message counts as nothing, or None."""
        if self._asked is None or name not in self._asked:
            return "was not asked in this round"
        if message.dtype != torch.int64 or tuple(message.shape) != (self._entries,):
            return f"is no vector of {self._entries} whole numbers"
        if self.terms.noise == "central":
            return "is longer than the bound" if excess(message, limit=self.terms.limit) else None
        most = 2**52 // self.terms.clients  # sums stay exact in float64, and far from overflow
        outside = int(message.max()) > most or int(message.min()) < -most
        return "has entries that no update and share have" if outside else None

    @torch.no_grad()
    def _step(self, update: Tensor) -> None:
        parameters = trained_parameters(self.model).values()
        parts = update.split([each.numel() for each in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = -part.view(parameter.shape).to(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self._after_step is not None:
            self._after_step(self.model)

    def _require_open(self) -> None:
        if not self._open:
            raise PrivacyError("no round is open: call begin_round first")
