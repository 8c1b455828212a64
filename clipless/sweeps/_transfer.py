"""The total-amount-of-noise heuristic: search small, transfer at constant noise.

The mean gradient of a batch carries noise of deviation `sigma D / b` per step. Two trainings with
the same steps and the same `sigma / b` therefore make updates with the same noise, whatever their
batch size b; the smaller batch only adds sampling noise, which is small against the rest. So the
hyper-parameters of an expensive training (b, sigma) are searched with `(b/k, sigma/k)`, k times
cheaper, and transferred back (Sander, Stock and Sablayrolles 2023).

The total amount of noise, `sqrt(2/S) sigma / q` for S steps at sampling rate q, is then the same
as well. It would determine epsilon if sampling amplified as it does at large sigma. At small sigma
it does not: *the small runs are far less private than the large one*. Their ledgers say so, and
they belong on public data, or their cost on the bill.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clipless.common import require_positive

if TYPE_CHECKING:
    from clipless.privacy import Mechanism


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The public numbers that decide what a Poisson-sampled training costs."""

    dataset_size: int
    batch_size: int
    noise_multiplier: float
    steps: int

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name in ("dataset_size", "batch_size", "noise_multiplier", "steps"):
            require_positive(name, getattr(self, name))
        if self.batch_size > self.dataset_size:
            raise ValueError(
                f"batch_size={self.batch_size} exceeds the {self.dataset_size} examples"
            )

    @property
    def rate(self) -> float:
        """The probability of an example to take part in a step."""
        return self.batch_size / self.dataset_size

    @property
    def mechanism(self) -> Mechanism:
        """One step, for the accountant."""
        from clipless.privacy import FullBatch, Mechanism, PoissonSampling

        if self.batch_size == self.dataset_size:
            whole = FullBatch(dataset_size=self.dataset_size)
            return Mechanism(noise_multiplier=self.noise_multiplier, sampling=whole)
        sampling = PoissonSampling(dataset_size=self.dataset_size, rate=self.rate)
        return Mechanism(noise_multiplier=self.noise_multiplier, sampling=sampling)

    def epsilon(self, delta: float) -> float:
        """Return what the training costs, by the accountant: an upper bound."""
        from clipless.privacy import epsilon

        return epsilon([(self.mechanism, self.steps)], delta)

    def epsilon_estimate(self, delta: float) -> float:
        """Return what it would cost by the total noise alone: `e^2 + 2 e sqrt(log(1/delta))`.

        `e` is the inverse total noise. An estimate, close to the truth only where sigma is above 2
        or so and rates are small; nothing may rest on it.
        """
        inverse = 1 / total_noise(self)
        return inverse**2 + 2 * inverse * math.sqrt(math.log(1 / delta))


def total_noise(scale: Scale) -> float:
    """Return the total amount of noise, `sqrt(2/S) sigma / q`.

    Example:
        >>> small = Scale(dataset_size=60_000, batch_size=600, noise_multiplier=0.5, steps=800)
        >>> total_noise(small)
        2.5
    """
    return math.sqrt(2 / scale.steps) * scale.noise_multiplier / scale.rate


def transfer(
    scale: Scale, *, batch_size: int | None = None, dataset_size: int | None = None
) -> Scale:
    """Return the training with another batch or data set whose updates have the same noise.

    Steps and `noise_multiplier / batch_size` are kept, and with them learning rate, schedule and
    everything else that was found for `scale`. Works in both directions. On the same data the total
    noise is kept; on more data with the same batch it grows with their number, which is why more
    data give a better epsilon for nothing.

    Example:
        >>> small = Scale(dataset_size=60_000, batch_size=512, noise_multiplier=0.5, steps=800)
        >>> large = transfer(small, batch_size=4096)
        >>> large.noise_multiplier, total_noise(large) == total_noise(small)
        (4.0, True)
        >>> large.epsilon(1e-5) < small.epsilon(1e-5)
        True
    """
    if batch_size is None and dataset_size is None:
        raise ValueError("say what to transfer to: a batch_size, a dataset_size, or both")
    new = scale.batch_size if batch_size is None else batch_size
    require_positive("batch_size", new)
    return replace(
        scale,
        batch_size=new,
        noise_multiplier=scale.noise_multiplier * new / scale.batch_size,
        dataset_size=scale.dataset_size if dataset_size is None else dataset_size,
    )
