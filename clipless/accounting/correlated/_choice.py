"""The rule that chooses between independent and correlated noise, by the error to be expected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from clipless.accounting._calibration import noise_multiplier_for
from clipless.accounting._history import Accountant
from clipless.accounting._mechanism import (
    CyclicPoissonSampling,
    FixedOrder,
    PoissonSampling,
    Sampling,
)
from clipless.accounting.correlated._banded import BandedStrategy
from clipless.accounting.correlated._buffered import optimised_buffers
from clipless.accounting.correlated._cost import CyclicPoisson, FixedOrderEpochs, Strategy
from clipless.accounting.correlated._error import mean_error
from clipless.accounting.correlated._optimise import optimised_strategy
from clipless.accounting.correlated._workload import OptimizerWorkload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

NoiseMode = Literal["poisson", "cyclic", "epochs"]
"""Poisson sampling with independent noise; cyclic Poisson sampling; epochs in a fixed order."""
_ROWS = 256
_BUFFERS = 3
_WORTH_A_SEARCH = 1.15
"""Strategies that are not optimised may come so close to the best of them to be looked at."""


@dataclass(frozen=True, kw_only=True)
class NoiseCandidate:
    """One way to sample and to add noise within a budget, and the error that it leaves."""

    mode: NoiseMode
    sampling: Sampling
    """What the engine is to be told: `PrivacyOptions(sampling=...)`."""
    strategy: Strategy
    noise_multiplier: float
    """Standard deviation of z over the largest norm of one example's contribution to a step."""
    relative_error: float
    """Root mean squared error of what the optimizer computes, over that of Poisson sampling."""

    @property
    def memory(self) -> int:
        """How many earlier noises, or sums of them, a step needs."""
        if isinstance(self.strategy, BandedStrategy):
            return self.strategy.bands - 1
        return len(self.strategy.decays)

    def __str__(self) -> str:
        if isinstance(self.strategy, BandedStrategy):
            kept = "1 band" if self.strategy.bands == 1 else f"{self.strategy.bands} bands"
        else:
            kept = f"{len(self.strategy.decays)} buffers"
        return f"{self.mode}, {kept}: {self.relative_error:.3g} times the error of Poisson sampling"


def noise_candidates(
    workload: OptimizerWorkload, *, dataset_size: int, batch_size: int, target_epsilon: float,
    target_delta: float, modes: tuple[NoiseMode, ...] = ("poisson", "cyclic", "epochs"),
    most_memory: int = 128, accountant: Accountant = "pld",
) -> tuple[NoiseCandidate, ...]:  # fmt: skip
    """Return ways to train within a budget, the one with the smallest expected error first.

    Strategies are optimised for the workload. What is compared is noise alone: the error of
    sampling itself, which fixed orders do not have, is left out.

    Args:
        workload: the optimizer that will be used, and its number of steps.
        modes: which ways of reading data are possible.
        most_memory: how many vectors of the size of the model may be kept.

    Example:
        >>> workload = OptimizerWorkload(steps=100)
        >>> best, *others = noise_candidates(workload, dataset_size=50_000, batch_size=500,
        ...                                  target_epsilon=8.0, target_delta=1e-6)
        >>> best.mode, best.relative_error < 0.5
        ('epochs', True)
    """
    rows = workload.matrix(most_rows=_ROWS)
    budget = _Budget(
        target_epsilon=target_epsilon, target_delta=target_delta, accountant=accountant
    )
    rate = batch_size / dataset_size
    independent = BandedStrategy.independent(steps=workload.steps)
    plain = noise_multiplier_for(
        steps=workload.steps, sampling=PoissonSampling(dataset_size=dataset_size, rate=rate),
        **budget,
    )  # fmt: skip
    unit = plain * mean_error(rows, independent)
    found = []
    if "poisson" in modes:
        found.append(
            NoiseCandidate(
                mode="poisson",
                strategy=independent,
                noise_multiplier=plain,
                relative_error=1.0,
                sampling=PoissonSampling(dataset_size=dataset_size, rate=rate),
            )
        )
    ways: list[_Way] = []
    if "cyclic" in modes:
        ways += _cyclic(dataset_size, rate, workload.steps, most_memory)
    if "epochs" in modes:
        ways += _epochs(dataset_size, batch_size, workload.steps, most_memory)
    # Buffers keep less than bands do: worth a look where many bands are.
    ways += [
        replace(way, bands=0) for way in ways if way.mode == "epochs" and way.bands > _BUFFERS + 1
    ]
    errors = [mean_error(rows, way.quick()) * way.noise(budget) for way in ways]
    for way, quick in zip(ways, errors, strict=True):
        if quick > _WORTH_A_SEARCH * min(errors):
            continue
        strategy = way.best(rows)
        sigma = way.sampling.noise_for(strategy, **budget)
        found.append(
            NoiseCandidate(
                mode=way.mode,
                sampling=way.drawn(batch_size),
                strategy=strategy,
                noise_multiplier=sigma,
                relative_error=sigma * mean_error(rows, strategy) / unit,
            )
        )
    return tuple(sorted(found, key=lambda each: each.relative_error))


class _Budget(TypedDict):
    """What the whole run may cost, and by whose count."""

    target_epsilon: float
    target_delta: float
    accountant: Accountant


@dataclass(frozen=True, kw_only=True)
class _Way:
    """A mode with so many bands, or with buffers where `bands` is 0, before it is optimised."""

    mode: NoiseMode
    sampling: CyclicPoisson | FixedOrderEpochs
    steps: int
    bands: int

    def quick(self) -> BandedStrategy:
        """Return a strategy whose error is near that of the best one."""
        bands = self.bands
        if isinstance(self.sampling, FixedOrderEpochs) and not bands:
            bands = min(self.sampling.steps_per_pass, self.steps)
        return BandedStrategy.square_root(steps=self.steps, bands=bands)

    def drawn(self, batch_size: int) -> Sampling:
        """Return the sampling as the engine knows it."""
        size = self.sampling.dataset_size
        if isinstance(self.sampling, FixedOrderEpochs):
            return FixedOrder(dataset_size=size, batch_size=batch_size)
        return CyclicPoissonSampling(
            dataset_size=size, rate=self.sampling.rate, groups=self.sampling.groups
        )

    def noise(self, budget: _Budget) -> float:
        return self.sampling.noise_for(self.quick(), **budget)

    def best(self, rows: Array) -> Strategy:
        """Return a strategy that is optimised for rows of a workload."""
        if isinstance(self.sampling, CyclicPoisson):
            return optimised_strategy(rows, bands=self.bands)
        length = self.sampling.steps_per_pass
        if self.bands:
            return optimised_strategy(rows, bands=self.bands, steps_per_pass=length)
        return optimised_buffers(
            rows, buffers=_BUFFERS, participations=self.sampling.passes(self.steps),
            separation=length,
        )  # fmt: skip


def _cyclic(dataset_size: int, rate: float, steps: int, most_memory: int) -> Iterator[_Way]:
    """Yield powers of two of bands that a rate and a memory leave room for."""
    bands = 2
    while bands * rate <= 1.0 and bands - 1 <= most_memory and bands <= steps:
        groups = CyclicPoisson(dataset_size=dataset_size, rate=rate, groups=bands)
        yield _Way(mode="cyclic", sampling=groups, steps=steps, bands=bands)
        bands *= 2


def _epochs(dataset_size: int, batch_size: int, steps: int, most_memory: int) -> Iterator[_Way]:
    """Yield as many bands as a pass has steps, or as memory has room for."""
    length = -(-dataset_size // batch_size)
    order = FixedOrderEpochs(dataset_size=dataset_size, steps_per_pass=length)
    bands = min(length, steps, most_memory + 1)
    yield _Way(mode="epochs", sampling=order, steps=steps, bands=bands)
