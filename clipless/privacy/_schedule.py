"""When the steps of a run are paid for: each for itself, or all of a pass at its first.

Steps that read data in one fixed order (`FixedOrder`) are accounted for together. An example takes
part once in any n steps in a row, n to a pass, and with a strategy C of at most n bands the columns
of its steps have no row in common. So the first n steps after the one with which noise begins are
one Gaussian mechanism, the next n another, and what is paid for p of them is the largest squared
sensitivity that a place in the order can have in p passes (`pass_costs`). Buffers have all bands,
and passes are not apart; the largest squared sensitivity of p of them is known all the same, and
paid for.

With cyclic Poisson sampling (`CyclicPoissonSampling`) any `groups` steps in a row are a round, in
which an example has one chance. With at most `groups` bands a round is one Poisson-sampled release
of the Gaussian mechanism, with the norm of the longest column for its sensitivity.

Noise that begins anew in the middle of a run (see `clipless.privacy.step._book`) is a mechanism of
its own, `C[t:, t:] G + z` for the steps from t on, whose passes are counted, and paid for, from t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from clipless.accounting import (
    Accountant,
    CyclicPoissonSampling,
    FixedOrder,
    FullBatch,
    History,
    Mechanism,
    Relation,
    Sampling,
    epsilon,
    merge_releases,
    noise_multiplier_for,
    steps_paid_together,
)
from clipless.accounting.correlated import (
    BufferedStrategy,
    Strategy,
    pass_costs,
)
from clipless.errors import BudgetExhaustedError, PrivacyError

_MARGIN = 1e-6
"""By how much noise grows if rounding has put what passes cost together above the budget."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What is paid at which step, for a way to sample and a strategy of the noise.

    Example:
        >>> order = FixedOrder(dataset_size=100, batch_size=25)
        >>> schedule = Schedule(sampling=order, relation=Relation.ZERO_OUT, noise_multiplier=2.0)
        >>> [schedule.due(step) is None for step in range(5)]
        [False, True, True, True, False]
    """

    sampling: Sampling
    relation: Relation
    noise_multiplier: float
    strategy: Strategy | None = None

    def __post_init__(self) -> None:
        """Refuse noise that an example would meet twice."""
        if self.strategy is None:
            return
        if isinstance(self.sampling, CyclicPoissonSampling):
            if isinstance(self.strategy, BufferedStrategy):
                raise PrivacyError(
                    "cyclic sampling needs bands: buffers reach back to every earlier step"
                )
            if self.strategy.bands > self.sampling.groups:
                raise PrivacyError(
                    f"{self.strategy.bands} bands, but an example may come again after "
                    f"{self.sampling.groups} steps, and would meet its own noise: use at most "
                    f"{self.sampling.groups}"
                )
            return
        if not isinstance(self.sampling, FixedOrder):
            raise PrivacyError(
                "noise that is correlated over steps needs a sampling in which an example takes "
                "part every so many steps: sampling='epochs', a FixedOrder, or a "
                "CyclicPoissonSampling"
            )
        self.strategy.pass_costs(steps_per_pass=self.period)

    @property
    def mechanism(self) -> Mechanism:
        """The release of a step; or of a pass, for an example that is counted once in it."""
        return Mechanism(
            noise_multiplier=self.noise_multiplier, sampling=self.sampling, relation=self.relation
        )

    @property
    def period(self) -> int:
        """How many steps are paid for together."""
        return steps_paid_together(self.sampling)

    def due(self, step: int, *, first: int = 0) -> Mechanism | None:
        """Return what is to be paid before a step, of noise that has begun with step `first`.

        None stands for a step that is paid for with an earlier one, of the same pass mostly.
        """
        if step < first:
            raise ValueError(f"step {step} comes before step {first}, with which noise begins")
        if self.strategy is not None and step >= self.strategy.steps:
            raise BudgetExhaustedError(
                f"the noise of this run was planned for {self.strategy.steps} steps, and all of "
                "them are taken. Plan more steps, or begin another run"
            )
        number, rest = divmod(step - first, self.period)
        if rest:
            return None
        if self.strategy is None or not self.noise_multiplier:
            return self.mechanism
        cost = self._cost_of(number, first)
        if cost == 0:  # others take part more often, and what they cost is paid
            return None
        return replace(self.mechanism, noise_multiplier=self.noise_multiplier / math.sqrt(cost))

    def _cost_of(self, number: int, first: int) -> float:
        """Return what a pass adds to the squared sensitivity, or the square of a round's."""
        if self.strategy is None:
            return 1.0
        if isinstance(self.sampling, CyclicPoissonSampling):
            # Rounds are sampled anew: each counts as one in which the longest column takes part.
            return _largest_square(self.strategy)
        return _costs(self.strategy, first, self.period)[number]

    def cost(self, begin: int, end: int, *, first: int = 0) -> History:
        """Return what is paid before the steps from `begin` on, up to `end`."""
        if self.strategy is not None:
            end = min(end, self.strategy.steps)
        if self.period == 1 and self.strategy is None:
            return ((self.mechanism, end - begin),) if end > begin else ()
        # The steps at which something is due.
        start = begin + (first - begin) % self.period
        due = (self.due(step, first=first) for step in range(start, end, self.period))
        return merge_releases([(each, 1) for each in due if each is not None])

    def planned(self, steps: int | None) -> set[Mechanism]:
        """Return the releases that a run of so many steps has, if nothing interrupts it."""
        if self.period == 1 or self.strategy is None:
            return {self.mechanism}
        return {each for each, _ in self.cost(0, self.strategy.steps if steps is None else steps)}

    def fitted(
        self, *, target_epsilon: float, target_delta: float, steps: int, accountant: Accountant,
        history: History = (),
    ) -> Schedule:  # fmt: skip
        """Return the schedule with the least noise that keeps a budget for so many steps."""
        if not isinstance(self.sampling, FixedOrder):
            sigma = noise_multiplier_for(
                target_epsilon=target_epsilon, target_delta=target_delta,
                steps=-(-steps // self.period), sampling=self.sampling, relation=self.relation,
                accountant=accountant, history=history,
            )  # fmt: skip
            if self.strategy is not None:
                sigma *= math.sqrt(_largest_square(self.strategy)) * (1.0 + 1e-12)
            return replace(self, noise_multiplier=sigma)
        # All passes together are one release of the unsampled mechanism.
        one = noise_multiplier_for(
            target_epsilon=target_epsilon, target_delta=target_delta, steps=1,
            sampling=FullBatch(dataset_size=self.sampling.dataset_size), relation=self.relation,
            accountant=accountant, history=history,
        )  # fmt: skip
        unit = replace(self, noise_multiplier=1.0).cost(0, steps)
        square = math.fsum(count * each.noise_multiplier**-2 for each, count in unit)
        found = replace(self, noise_multiplier=one * math.sqrt(square))
        while (
            epsilon((*history, *found.cost(0, steps)), target_delta, accountant=accountant)
            > target_epsilon
        ):
            found = replace(found, noise_multiplier=found.noise_multiplier * (1 + _MARGIN))
        return found


@lru_cache(maxsize=64)
def _largest_square(strategy: Strategy) -> float:
    """Return the square of the longest column's norm, enlarged by what rounding may hide."""
    return strategy.sensitivity(participations=1, separation=strategy.steps) ** 2


@lru_cache(maxsize=64)
def _costs(strategy: Strategy, first: int, period: int) -> Sequence[float]:
    """Return the costs of the passes of noise that begins with step `first`."""
    if isinstance(strategy, BufferedStrategy):  # whose passes meet each other's noise
        return strategy.after(first).pass_costs(steps_per_pass=period)
    return pass_costs(strategy.column_squares()[first:].tolist(), steps_per_pass=period)
