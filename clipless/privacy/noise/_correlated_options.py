"""`Correlated`: noise that remembers, and the rule that chooses how much of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from clipless.accounting import CyclicPoissonSampling, FixedOrder, steps_paid_together
from clipless.accounting.correlated import (
    BandedStrategy,
    BufferedStrategy,
    OptimizerWorkload,
    Strategy,
    mean_error,
    optimised_buffers,
    optimised_strategy,
)
from clipless.errors import PrivacyError
from clipless.privacy.noise._scales import NoiseStrategy

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROWS = 256
_BANDS = (4, 16)
"""Numbers of bands that are tried, besides the largest possible one."""
_WORTH_IT = 1.02
_BUFFERS = 3


@dataclass(frozen=True, kw_only=True)
class Correlated:
    """Noise of which a step takes back part of what earlier steps have added.

    For epochs in a fixed order, and for cyclic Poisson sampling (`CyclicPoissonSampling`).

    The strategy is optimised for the optimizer at hand (momentum, Nesterov, decay; of Adam and its
    kin the first moment) and the planned steps. How many bands it has, the present noise and that
    of `bands - 1` earlier steps, is a matter of the error to be expected; where it is one, noise is
    independent. What is given here costs accuracy at worst, never privacy.

    Args:
        scales: how noise is shared out among parameters: `"optimal"`, `"global"`, `"per_layer"`.
        bands: so many, and no choice; at most as many as a pass has steps, or there are groups.
        buffers: decaying sums of earlier noise instead of bands, of so many; for epochs only. By
            default three of them are tried where a pass has more steps than memory has bands for.
        most_memory: how many earlier noises may be kept, each of the size of the model.
        average: decay of the exponential average of the weights, if that is what will be used.
            A `Trainer` says so by itself.
        learning_rates: the rates of all steps, as far as their ratios go, or None for a constant
            one. A `Trainer` knows its own schedule.

    Example:
        >>> order = FixedOrder(dataset_size=1000, batch_size=100)
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> strategy, error = Correlated().chosen(optimizer, order, steps=40)
        >>> strategy, error < 0.6
        (BandedStrategy(steps=40, bands=10), True)
    """

    scales: NoiseStrategy = "optimal"
    bands: int | None = None
    buffers: int | None = None
    most_memory: int = 64
    average: float | None = None
    learning_rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.most_memory < 0 or (self.bands is not None and self.bands < 1):
            raise ValueError(f"bands must be at least 1, and most_memory at least 0, in {self}")
        if self.buffers is not None and (self.buffers < 1 or self.bands is not None):
            raise ValueError(f"give bands or buffers, at least one of them, in {self}")

    def chosen(
        self, optimizer: torch.optim.Optimizer, sampling: object, *, steps: int | None
    ) -> tuple[Strategy | None, float]:
        """Return the strategy, None for independent noise, and its error relative to that."""
        if not isinstance(sampling, FixedOrder | CyclicPoissonSampling):
            raise PrivacyError(
                "noise='correlated' needs epochs in a fixed order, sampling='epochs', or where "
                "rates are small a CyclicPoissonSampling. (With Poisson sampling and large batches "
                "it would bring nothing: see clipless.accounting.correlated.noise_candidates.)"
            )
        if steps is None:
            raise PrivacyError("noise='correlated' is planned for a number of steps: give epochs "
                               "or steps")  # fmt: skip
        rows = self._workload(optimizer, steps).matrix(most_rows=_ROWS)
        period = steps_paid_together(sampling)
        cyclic = isinstance(sampling, CyclicPoissonSampling)
        most = min(steps, period)
        if self.bands is not None and self.bands > most:
            raise PrivacyError(
                f"bands={self.bands}, but an example comes again after {period} steps, and "
                f"would meet its own noise: use at most {most}"
            )
        all_fit = most <= self.most_memory + 1
        most = min(most, self.most_memory + 1)
        given = [*_BANDS, most] if self.bands is None else [self.bands]
        apart = None if cyclic else period  # of a pass, columns may differ; of a round, not
        unit = _error(rows, BandedStrategy.independent(steps=steps), apart)
        found: list[tuple[Strategy | None, float]] = [(None, 1.0)]
        if self.buffers is not None:
            if cyclic:
                raise PrivacyError("cyclic sampling needs bands: buffers reach back to every "
                                   "earlier step")  # fmt: skip
            return self._buffered(rows, steps, period, unit, self.buffers)
        for bands in sorted({each if self.bands else min(each, most) for each in given}):
            if bands > 1:
                strategy = optimised_strategy(rows, bands=bands, steps_per_pass=apart)
                found.append((strategy, _error(rows, strategy, apart) / unit))
        if self.bands is not None:
            return found[-1]
        if not (all_fit or cyclic) and self.most_memory >= _BUFFERS:
            found.insert(1, self._buffered(rows, steps, period, unit, _BUFFERS))
        # Every band is memory: one that hardly lowers the error is not worth it.
        least = min(error for _, error in found)
        return next(each for each in found if each[1] <= _WORTH_IT * least)

    @staticmethod
    def _buffered(
        rows: NDArray[Any], steps: int, period: int, unit: float, buffers: int
    ) -> tuple[BufferedStrategy, float]:
        """Return a strategy of so many buffers, and its error relative to independent noise."""
        passes = -(-steps // period)
        found = optimised_buffers(rows, buffers=buffers, participations=passes, separation=period)
        squares = math.fsum(found.pass_costs(steps_per_pass=period))
        return found, mean_error(rows, found) * math.sqrt(squares) / unit

    def _workload(self, optimizer: torch.optim.Optimizer, steps: int) -> OptimizerWorkload:
        settings: dict[str, Any] = optimizer.param_groups[0]
        first = settings.get("betas", (0.0,))[0]  # Adam and its kin
        rates = self.learning_rates
        if rates is not None and len(rates) != steps:
            raise ValueError(f"{len(rates)} learning rates for {steps} steps: give one a step")
        rate = float(settings.get("lr", 1.0))
        coupled = isinstance(optimizer, torch.optim.SGD)
        decay = float(settings.get("weight_decay", 0.0)) if coupled else 0.0
        if rate > 0 and (rates is not None or decay):
            rates = tuple(rate * each for each in rates or (1.0,) * steps)
        return OptimizerWorkload(
            steps=steps,
            learning_rates=rates,
            momentum=float(settings.get("momentum", first)),
            dampening=float(settings.get("dampening", first)),
            nesterov=bool(settings.get("nesterov", False)),
            weight_decay=decay,
            average=self.average,
        )


def correlated_options(noise: object) -> Correlated | None:
    """Return the options of correlated noise, or None where noise is independent."""
    if noise == "correlated":
        return Correlated()
    return noise if isinstance(noise, Correlated) else None


def planned_for(
    noise: object, *, average: float | None, learning_rates: tuple[float, ...] | None
) -> Any:
    """Return the noise that was asked for, told what a trainer knows, unless it is told already."""
    found = correlated_options(noise)
    if found is None:
        return noise
    return replace(
        found,
        average=average if found.average is None else found.average,
        learning_rates=learning_rates if found.learning_rates is None else found.learning_rates,
    )


def describe_correlation(strategy: Strategy, error: float | None) -> str:
    """One line on how noise is correlated, and what is expected of it."""
    if isinstance(strategy, BufferedStrategy):
        expected = "" if error is None else f"; {error:.3g} times the error of independent noise"
        return f"{len(strategy.decays)} buffers, in which all steps are remembered{expected}"
    expected = "" if error is None else f"; {error:.3g} times the error of independent noise"
    return f"{strategy.bands} bands, the noise of {strategy.bands - 1} steps remembered{expected}"


def _error(rows: NDArray[Any], strategy: BandedStrategy, period: int | None) -> float:
    """Return the expected error, for noise of one amount and the same epsilon.

    `period`: the steps of a pass in a fixed order, or None for rounds that are sampled.
    """
    if period is None:
        return mean_error(rows, strategy) * math.sqrt(float(strategy.column_squares().max()))
    squares = math.fsum(strategy.pass_costs(steps_per_pass=period))
    return mean_error(rows, strategy) * math.sqrt(squares)
