"""`FederatedCost`: what a federated run has cost a client so far, and against whom."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from clipless.accounting import History, epsilon
from clipless.federated._terms import FederatedTerms


@dataclass(frozen=True, kw_only=True)
class FederatedCost:
    """Epsilon of one client, for two adversaries; as a client or the server counts it.

    Example:
        >>> terms = FederatedTerms(clients=100, rounds=5, bound=1.0, noise_multiplier=5.0)
        >>> cost = FederatedCost.of("the server", terms, ((terms.mechanism, 2),), 2)
        >>> 0.5 < cost.epsilon < 1.0, cost.message_epsilon
        (True, inf)
    """

    party: str
    rounds: int
    planned: int
    delta: float
    epsilon: float
    """For those who see every sum with its noise, hence the model after every round. Infinite if
    a seed made noise that somebody can compute again."""
    message_epsilon: float
    """For those who see the client's own messages: infinite where these have no noise."""
    insecure: bool = False
    """Whether a round had the noise of an `insecure_seed`: then nothing is private."""
    unit: str = "one client, with all its records"

    @classmethod
    def of(
        cls, party: str, terms: FederatedTerms, history: History, rounds: int, *,
        insecure: bool = False,
    ) -> FederatedCost:  # fmt: skip
        """Return the cost of a ledger's history, of which some releases are rounds of the terms.

        Whatever else the history counts is part of both figures.
        """
        delta = terms.target_delta
        released = math.inf if insecure else epsilon(history, delta)
        return cls(
            party=party,
            rounds=rounds,
            planned=terms.rounds,
            delta=delta,
            epsilon=released,
            message_epsilon=math.inf if insecure else _of_messages(terms, history),
            insecure=insecure,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; infinity becomes None."""
        return {
            name: None if isinstance(value, float) and math.isinf(value) else value
            for name, value in asdict(self).items()
        }

    def __str__(self) -> str:
        if self.insecure:
            return (
                f"{self.party}: {self.rounds} of {self.planned} rounds, not private: their noise "
                "came from an insecure_seed, which is for tests"
            )
        seen = (
            "no bound"
            if math.isinf(self.message_epsilon)
            else f"epsilon {self.message_epsilon:.3g}"
        )
        return (
            f"{self.party}: {self.rounds} of {self.planned} rounds cost a client epsilon "
            f"{self.epsilon:.3g} at delta {self.delta:.3g} for those who see what is released, "
            f"and {seen} for those who see its messages"
        )


def _of_messages(terms: FederatedTerms, history: History) -> float:
    """Return epsilon for those who see messages: each round is one, of the noise it has alone."""
    seen = []
    for mechanism, count in history:
        if mechanism in (terms.mechanism, terms.taking_part):
            if terms.message is None:
                return math.inf
            mechanism = terms.message
        seen.append((mechanism, count))
    return epsilon(tuple(seen), terms.target_delta)
