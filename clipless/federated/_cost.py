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
    """For those who see every sum with its noise, hence the model after every round."""
    message_epsilon: float
    """For those who see the client's own messages: infinite where these have no noise."""
    unit: str = "one client, with all its records"

    @classmethod
    def of(cls, party: str, terms: FederatedTerms, history: History, rounds: int) -> FederatedCost:
        """Return the cost of a history of rounds."""
        delta, message = terms.target_delta, terms.message
        alone = math.inf if message is None else 0.0
        if message is not None and rounds:
            alone = epsilon(((message, rounds),), delta)
        return cls(
            party=party,
            rounds=rounds,
            planned=terms.rounds,
            delta=delta,
            epsilon=epsilon(history, delta) if rounds else 0.0,
            message_epsilon=alone if rounds else 0.0,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; infinity becomes None."""
        found = asdict(self)
        if math.isinf(self.message_epsilon):
            found["message_epsilon"] = None
        return found

    def __str__(self) -> str:
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
