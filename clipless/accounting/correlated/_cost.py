"""What correlated noise costs: the releases that the ledger counts, and the noise for a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clipless.accounting._calibration import noise_multiplier_for
from clipless.accounting._history import Accountant, Runs
from clipless.accounting._mechanism import FullBatch, Mechanism, PoissonSampling, Relation
from clipless.accounting.correlated._banded import BandedStrategy
from clipless.accounting.correlated._buffered import BufferedStrategy

Strategy = BandedStrategy | BufferedStrategy


def strategy_from_dict(data: Mapping[str, Any]) -> Strategy:
    """Restore a strategy from what its `to_dict` wrote; anything else raises `ValueError`."""
    kind = BufferedStrategy if "decays" in data else BandedStrategy
    return kind.from_dict(data)


@dataclass(frozen=True, kw_only=True)
class FixedOrderEpochs:
    """Passes over all examples in one order that does not depend on them, the same in each pass.

    An example takes part once a pass, every `steps_per_pass` steps. Nothing is sampled, and no
    amplification is claimed. A pass is one release of the unsampled Gaussian mechanism, and counts
    as a whole from its first step on.
    """

    dataset_size: int
    steps_per_pass: int

    def __post_init__(self) -> None:
        """Refuse passes of no steps, and of more steps than there are examples."""
        if not 1 <= self.steps_per_pass <= self.dataset_size:
            raise ValueError(f"steps_per_pass must lie in [1, dataset_size] in {self}")

    def releases(
        self, strategy: Strategy, *, noise_multiplier: float, steps: int | None = None,
        relation: Relation = Relation.ZERO_OUT,
    ) -> Runs:  # fmt: skip
        """Return what a run costs that has begun so many steps, by default all: one entry a pass.

        z has the standard deviation `noise_multiplier` times the largest norm of one example's
        contribution to a step. Pass p counts with the noise multiplier that makes all passes
        up to it cost what the sensitivity of the strategy's first p passes says.
        """
        passes = self.passes(strategy.steps if steps is None else steps)
        sampling = FullBatch(dataset_size=self.dataset_size)
        return tuple(
            (
                Mechanism(
                    noise_multiplier=noise_multiplier / math.sqrt(cost),
                    sampling=sampling,
                    relation=relation,
                ),
                1,
            )
            for cost in self.costs(strategy)[:passes]
            if cost > 0
        )

    def costs(self, strategy: Strategy) -> tuple[float, ...]:
        """Return what each pass adds to the squared sensitivity."""
        return strategy.pass_costs(steps_per_pass=self.steps_per_pass)

    def passes(self, steps: int) -> int:
        """Return how many passes have begun after so many steps."""
        return -(-steps // self.steps_per_pass)

    def noise_for(
        self, strategy: Strategy, *, target_epsilon: float, target_delta: float,
        relation: Relation = Relation.ZERO_OUT, accountant: Accountant = "pld",
    ) -> float:  # fmt: skip
        """Return the smallest noise multiplier with which the whole run keeps the budget.

        Example:
            >>> from clipless.accounting import epsilon
            >>> order = FixedOrderEpochs(dataset_size=50_000, steps_per_pass=25)
            >>> strategy = BandedStrategy.square_root(steps=100, bands=25)
            >>> sigma = order.noise_for(strategy, target_epsilon=3.0, target_delta=1e-6)
            >>> spent = epsilon(order.releases(strategy, noise_multiplier=sigma), 1e-6)
            >>> 2.99 < spent <= 3.0
            True
        """
        one = noise_multiplier_for(
            target_epsilon=target_epsilon, target_delta=target_delta, steps=1, relation=relation,
            sampling=FullBatch(dataset_size=self.dataset_size), accountant=accountant,
        )  # fmt: skip
        return one * math.sqrt(math.fsum(self.costs(strategy))) * (1.0 + 1e-12)


@dataclass(frozen=True, kw_only=True)
class CyclicPoisson:
    """Examples in `groups` groups, drawn once; step t takes each of group `t mod groups`, or not.

    Groups do not depend on the data. An example of the group is taken with probability
    `rate * groups`, independently. With a strategy of at most `groups` bands and columns of norm
    at most 1, so many steps in a row are one release of the Gaussian mechanism, Poisson-sampled at
    `rate * groups` (Choquette-Choo et al. 2023). It counts from its first step on.
    """

    dataset_size: int
    rate: float
    """The share of all examples that a step takes: its expected batch size is `rate * N`."""
    groups: int

    def __post_init__(self) -> None:
        """Refuse rates that no probability gives."""
        if self.groups < 1 or not 0 < self.rate * self.groups <= 1:
            raise ValueError(f"rate * groups must lie in (0, 1] in {self}")

    @property
    def sampling(self) -> PoissonSampling:
        """What an example's chance in a round of `groups` steps is accounted for as."""
        return PoissonSampling(
            dataset_size=self.dataset_size, rate=min(self.rate * self.groups, 1.0)
        )

    def releases(
        self, strategy: Strategy, *, noise_multiplier: float, steps: int | None = None,
        relation: Relation = Relation.ZERO_OUT,
    ) -> Runs:  # fmt: skip
        """Return what a run costs that has begun so many steps, by default all."""
        sigma = noise_multiplier / self._largest_column(strategy)
        release = Mechanism(noise_multiplier=sigma, sampling=self.sampling, relation=relation)
        return ((release, self.rounds(strategy.steps if steps is None else steps)),)

    def rounds(self, steps: int) -> int:
        """Return how many rounds have begun after so many steps."""
        return -(-steps // self.groups)

    def noise_for(
        self, strategy: Strategy, *, target_epsilon: float, target_delta: float,
        relation: Relation = Relation.ZERO_OUT, accountant: Accountant = "pld",
    ) -> float:  # fmt: skip
        """Return the smallest noise multiplier with which the whole run keeps the budget."""
        one = noise_multiplier_for(
            target_epsilon=target_epsilon, target_delta=target_delta,
            steps=self.rounds(strategy.steps), sampling=self.sampling, relation=relation,
            accountant=accountant,
        )  # fmt: skip
        return one * self._largest_column(strategy) * (1.0 + 1e-12)

    def _largest_column(self, strategy: Strategy) -> float:
        if not isinstance(strategy, BandedStrategy):
            raise ValueError(
                "cyclic sampling needs bands: buffers reach back to every earlier step"
            )
        if strategy.bands > self.groups:
            raise ValueError(
                f"{strategy.bands} bands, but an example may come again after {self.groups} steps"
            )
        return strategy.sensitivity(participations=1, separation=max(self.groups, strategy.bands))
