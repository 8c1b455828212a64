"""`FederatedTerms`: what clients and server have agreed on before the first round."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Literal

from clipless.accounting import (
    Accountant,
    FullBatch,
    Mechanism,
    PoissonSampling,
    chosen_delta,
    epsilon,
    noise_multiplier_for,
)
from clipless.common import require_positive
from clipless.errors import PrivacyError
from clipless.federated._shares import SHARE_STEPS
from clipless.privacy import default_delta

NoiseKind = Literal["central", "shares"]
_CENTRAL_LIMIT = 2**24
_LARGEST_LIMIT = 2**31
_MOST_DRAWS = 2**38
"""Of noise, in the whole run: what the accountant's margin for the sampler covers."""


@dataclass(frozen=True, kw_only=True)
class FederatedTerms:
    """The public terms of a federated run. Client and server hold the same, or refuse each other.

    Neighbours differ by one client, whose update is zero in every round of one of the two runs
    (zero-out), whatever its records are. The number of clients, the terms and the order of rounds
    are public.

    Args:
        clients: how many there are, N.
        rounds: how many rounds are planned; no client takes part in more.
        bound: the largest norm of a client's update; what is longer is scaled to it.
        noise_multiplier: the standard deviation of the noise of a sum, over `bound`.
        noise: `"central"`: a trusted server sees every update, sums and adds noise.
            `"shares"`: each client adds a share to its update, for a server that sees only the
            sum, by secure aggregation.
        rate: with which probability each client is asked in a round. Central noise only: the
            sample has to be secret.
        dropouts: of how many clients the shares may be missing in a round.
        colluding: of how many clients the shares may be known to the adversary. The shares of all
            others add up to the planned noise.
        delta: by default 0.1 / N, rounded down. One above that needs `LargeDelta`, and 1 / N is
            refused.

    Example:
        >>> terms = FederatedTerms.for_epsilon(3.0, clients=200, rounds=10, bound=1.0,
        ...                                    noise="shares", dropouts=20, colluding=30)
        >>> 2.99 < terms.epsilon() <= 3.0, terms.honest
        (True, 150)
    """

    clients: int
    rounds: int
    bound: float
    noise_multiplier: float
    noise: NoiseKind = "central"
    rate: float = 1.0
    dropouts: int = 0
    colluding: int = 0
    delta: float | None = None

    def __post_init__(self) -> None:
        """Refuse terms that mean nothing, or that the grid has no room for."""
        for name in ("clients", "rounds", "dropouts", "colluding"):
            value, least = getattr(self, name), int(name in ("clients", "rounds"))
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}: {value!r}")
        require_positive("bound", self.bound)
        require_positive("noise_multiplier", self.noise_multiplier)
        if self.noise not in ("central", "shares"):
            raise ValueError(f"noise must be 'central' or 'shares', got {self.noise!r}")
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate must lie in (0, 1], got {self.rate!r}")
        if self.noise == "central" and (self.dropouts or self.colluding):
            raise ValueError("dropouts and colluding clients are about shares: leave them out")
        if self.noise == "shares" and self.rate != 1:
            raise ValueError(
                "with shares every client is asked in every round, rate=1: a share is as large as "
                "the number of those that take part says, and the sum shows who does"
            )
        if self.honest < 1:
            raise ValueError(
                f"of {self.clients} clients, {self.dropouts} may drop out and {self.colluding} "
                "collude: nobody's share is left to rely on"
            )
        if not 1 <= self.limit <= _LARGEST_LIMIT:
            raise ValueError(
                f"a noise multiplier of {self.noise_multiplier:g} for {self.clients} clients is "
                "outside of what the grid of updates has room for"
            )
        chosen_delta(self.delta, self.clients)

    @classmethod
    def for_epsilon(
        cls, target_epsilon: float, *, clients: int, rounds: int, bound: float,
        noise: NoiseKind = "central", rate: float = 1.0, dropouts: int = 0, colluding: int = 0,
        delta: float | None = None,
    ) -> FederatedTerms:  # fmt: skip
        """Return the terms with the least noise that keep a budget for all rounds."""
        plain = cls(
            clients=clients, rounds=rounds, bound=bound, noise_multiplier=1.0, noise=noise,
            rate=rate, dropouts=dropouts, colluding=colluding, delta=delta,
        )  # fmt: skip
        sigma = noise_multiplier_for(
            target_epsilon=target_epsilon, target_delta=plain.target_delta, steps=rounds,
            sampling=plain.mechanism.sampling,
        )  # fmt: skip
        return cls(**{**asdict(plain), "noise_multiplier": sigma})

    @property
    def honest(self) -> int:
        """How many shares are sure to count: of neither dropouts nor colluding clients."""
        return self.clients - self.dropouts - self.colluding

    @property
    def limit(self) -> int:
        """The largest norm of an update in steps of the grid, which is `bound / limit` wide."""
        if self.noise == "central":
            return _CENTRAL_LIMIT
        # Shares of the honest add up to a deviation of 2^20 sqrt(honest) steps.
        return math.floor(SHARE_STEPS * math.sqrt(self.honest) / self.noise_multiplier)

    @property
    def target_delta(self) -> float:
        """Delta of all statements."""
        return default_delta(self.clients) if self.delta is None else self.delta

    @property
    def expected(self) -> float:
        """How many clients a sum is divided by: the public, expected number."""
        return self.rate * self.clients

    @property
    def mechanism(self) -> Mechanism:
        """What one round costs, for those who see what is released and not who took part."""
        sampling = (
            FullBatch(dataset_size=self.clients)
            if self.rate == 1
            else PoissonSampling(dataset_size=self.clients, rate=self.rate)
        )
        return Mechanism(noise_multiplier=self.noise_multiplier, sampling=sampling)

    @property
    def taking_part(self) -> Mechanism:
        """What a round costs a client that took part in it, and whose part in it is no secret."""
        return Mechanism(
            noise_multiplier=self.noise_multiplier, sampling=FullBatch(dataset_size=self.clients)
        )

    @property
    def message(self) -> Mechanism | None:
        """What a message costs if somebody sees it by itself; None for one without noise."""
        if self.noise == "central":
            return None
        return Mechanism(
            noise_multiplier=SHARE_STEPS / self.limit,
            sampling=FullBatch(dataset_size=self.clients),
        )

    def epsilon(self, *, accountant: Accountant = "pld") -> float:
        """Return epsilon of all planned rounds, for one client."""
        return epsilon(((self.mechanism, self.rounds),), self.target_delta, accountant=accountant)

    def require_room(self, entries: int) -> None:
        """Refuse models so large that noise is drawn more often than is accounted for."""
        drawn = entries * self.rounds * (self.clients if self.noise == "shares" else 1)
        if drawn > _MOST_DRAWS:
            raise PrivacyError(
                f"{drawn:.3g} numbers of noise in all rounds are more than the 2^38 that the "
                "accountant covers: take fewer rounds, or a smaller model"
            )

    @property
    def digest(self) -> str:
        """A name for these terms, which nobody has for others."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
