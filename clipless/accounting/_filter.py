"""Privacy filters: a budget that also covers noise, rates and steps chosen by looking at results.

Composition by privacy loss distributions, and by Rényi divergences at the best order, holds for a
schedule of noise levels, rates and numbers of steps that was fixed beforehand; the *queries* may
depend on earlier results, the schedule may not. A Rényi filter (Feldman and Zrnic 2021; Lécuyer
2021) lets the schedule depend on them as well: an order and a limit are declared before the first
release, and a release is refused if it would take the sum of divergences at that order above the
limit. Whatever was chosen on the way, all releases together have at most that divergence, and the
declared (epsilon, delta). It is declared in the ledger's first line, and the ledger enforces it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from clipless.accounting import rdp
from clipless.accounting._history import History, require_supported_sampling
from clipless.accounting._mechanism import SAMPLER_EPSILON, Mechanism, Relation, Sampling

_SLACK = 1e-9
"""What rounding may add to a sum of divergences, relative to the limit."""


@dataclass(frozen=True, kw_only=True)
class RenyiFilter:
    """A declared budget (epsilon, delta), kept at one Rényi order that is fixed beforehand.

    Guarantee: if every release `fits` before it is made, all of them together are
    (epsilon, delta)-differentially private, however their noise, sampling and number were chosen
    from earlier results. The price is that of Rényi accounting at one order, 5 to 10% more noise
    than distributions ask for; the claim is always the whole budget, however little was used.

    Example:
        >>> from clipless.privacy import Mechanism, PoissonSampling
        >>> step = Mechanism(noise_multiplier=1.0,
        ...                  sampling=PoissonSampling(dataset_size=60_000, rate=0.01))
        >>> declared = RenyiFilter.planned(epsilon=3.0, delta=1e-6, mechanism=step)
        >>> declared.order, declared.releases_left((), step)
        (7.5, 1678)
    """

    epsilon: float
    delta: float
    order: float

    def __post_init__(self) -> None:
        """Refuse a budget that means nothing, or that no release would fit into."""
        if not (self.epsilon > 0 and math.isfinite(self.epsilon)):
            raise ValueError(f"epsilon must be positive and finite, got {self.epsilon!r}")
        if not 0.0 < self.delta < 1.0:
            raise ValueError(f"delta must lie strictly between 0 and 1, got {self.delta!r}")
        if not (self.order > 1.01 and math.isfinite(self.order)):
            raise ValueError(f"order must be finite and above 1.01, got {self.order!r}")
        if not self.limit > 0:
            raise ValueError(
                f"at order {self.order:g} nothing fits into epsilon={self.epsilon:g} at "
                f"delta={self.delta:g}: use a larger order"
            )

    @classmethod
    def planned(cls, *, epsilon: float, delta: float, mechanism: Mechanism) -> RenyiFilter:
        """Return the filter whose order is best for many releases of a planned mechanism."""
        require_supported_sampling(((mechanism, 1),), "rdp")
        orders, divergences = rdp.step_divergences(mechanism)
        best, most = 0.0, 0.0
        for order, cost in zip(orders.tolist(), divergences.tolist(), strict=True):
            limit = epsilon - rdp.conversion(order, delta) if order > 1.01 else 0.0
            if limit / cost > most:
                best, most = order, limit / cost
        if most == 0.0:
            raise ValueError(f"no order has room for epsilon={epsilon:g} at delta={delta:g}")
        return cls(epsilon=epsilon, delta=delta, order=best)

    @classmethod
    def for_run(
        cls,
        *,
        epsilon: float,
        delta: float,
        sampling: Sampling,
        relation: Relation,
        steps: int | None,
        noise_multiplier: float | None,
    ) -> RenyiFilter:
        """Return the filter that suits a run: of given noise, or of so many steps."""
        if noise_multiplier is None:
            from clipless.accounting._calibration import noise_multiplier_for

            if steps is None:
                raise ValueError("give steps or noise_multiplier")
            noise_multiplier = noise_multiplier_for(
                target_epsilon=epsilon, target_delta=delta, steps=steps, sampling=sampling,
                relation=relation, accountant="rdp",
            )  # fmt: skip
        mechanism = Mechanism(
            noise_multiplier=noise_multiplier, sampling=sampling, relation=relation
        )
        return cls.planned(epsilon=epsilon, delta=delta, mechanism=mechanism)

    @property
    def limit(self) -> float:
        """The most that divergences at `order` may add up to."""
        return self.epsilon - SAMPLER_EPSILON - rdp.conversion(self.order, self.delta)

    @property
    def meter(self) -> str:
        """The accountant of what is used up so far: Rényi at this order, of a fixed schedule."""
        return f"rdp@{self.order!r}"

    def cost(self, mechanism: Mechanism) -> float:
        """Return the divergence of one release at `order`."""
        if mechanism.noise_multiplier == 0:
            return math.inf
        require_supported_sampling(((mechanism, 1),), "rdp")
        return rdp.divergence(mechanism, self.order)

    def spent(self, history: History) -> float:
        """Return the sum of divergences, to be compared with `limit`."""
        return math.fsum(count * self.cost(mechanism) for mechanism, count in history)

    def fits(self, spent: float) -> bool:
        """Return whether a sum of divergences keeps the limit, rounding included."""
        return spent <= self.limit * (1.0 - _SLACK)

    def releases_left(self, history: History, mechanism: Mechanism) -> int:
        """Return how many releases of `mechanism` fit on top of `history`."""
        return self.room(self.spent(history), mechanism)

    def room(self, spent: float, mechanism: Mechanism) -> int:
        """Return how many releases of `mechanism` fit on top of a sum of divergences."""
        cost = self.cost(mechanism)
        if not self.fits(spent + cost):
            return 0
        left = int((self.limit * (1.0 - _SLACK) - spent) / cost)
        return left if self.fits(spent + left * cost) else left - 1

    def to_dict(self) -> dict[str, float]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RenyiFilter:
        """Restore what `to_dict` wrote; anything else raises `ValueError`."""
        if set(data) != {"epsilon", "delta", "order"}:
            raise ValueError(f"a filter has epsilon, delta and order, got {sorted(data)}")
        return cls(**{name: float(value) for name, value in data.items()})

    def __str__(self) -> str:
        return f"filter(epsilon={self.epsilon!r}, delta={self.delta!r}, order={self.order!r})"


def meter_accountant(accountant: str) -> str:
    """Return the accountant that measures what is used up: for a filter, Rényi at its order."""
    declared = filter_of_name(accountant)
    return accountant if declared is None else declared.meter


def filter_of_name(accountant: str) -> RenyiFilter | None:
    """Return the filter that an accountant's name denotes, or None."""
    if not (accountant.startswith("filter(") and accountant.endswith(")")):
        return None
    pairs = (part.split("=") for part in accountant[len("filter(") : -1].split(", "))
    return RenyiFilter.from_dict({name: float(value) for name, value in pairs})
