"""Random numbers of repetitions, for private selection among runs.

Papernot and Steinke (2022): if the number of runs K is drawn from one of these distributions and
only the best run is shown, the privacy loss barely grows with the mean of K. With a fixed K it may
grow by far more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from clipless.common import fresh_bits
from clipless.runs import check_setting, read_section

Distribution = Literal["geometric", "logarithmic", "negative_binomial", "poisson"]

_LARGEST_POISSON_MEAN = 500.0
"""Beyond it the probability of zero runs is too small for float64."""
_LARGEST_MEAN = 1e6
_SHAPES = {"geometric": 1.0, "logarithmic": 0.0, "poisson": math.inf}


@dataclass(frozen=True, kw_only=True)
class Repetitions:
    """How the number of runs is drawn.

    `geometric`, `logarithmic` and `negative_binomial` (with a `shape`, of which 1 is geometric and
    0 logarithmic) give at least one run; `poisson` may give none. The heavier the tail, the less a
    selection costs and the less certain the number of runs is.

    Example:
        >>> Repetitions(distribution="geometric", mean=10.0).gamma
        0.1
    """

    distribution: Distribution = "geometric"
    mean: float = 10.0
    shape: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        largest = _LARGEST_POISSON_MEAN if self.distribution == "poisson" else _LARGEST_MEAN
        check_setting(
            1 < self.mean <= largest,
            f"repetitions.mean must be above 1 and at most {largest:g}, got {self.mean}",
        )
        if self.distribution == "negative_binomial":
            check_setting(
                self.shape is not None and 0 <= self.shape <= 100,
                f"repetitions.shape must lie in [0, 100], got {self.shape}",
            )
        else:
            check_setting(
                self.shape is None,
                f"repetitions.shape is for negative_binomial, not for {self.distribution}",
            )

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Read plain data; unknown keys are refused."""
        return read_section(cls, data, where="repetitions")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @property
    def eta(self) -> float:
        """The shape of the truncated negative binomial; infinite for Poisson."""
        return float(self.shape) if self.shape is not None else _SHAPES[self.distribution]

    @property
    def gamma(self) -> float:
        """The parameter gamma in (0, 1) of the truncated negative binomial with this mean.

        Rounded so that its mean is at most `mean`, which the cost is computed with.
        """
        if self.distribution == "poisson":
            raise ValueError("a Poisson number of runs has no gamma")
        if self.eta == 1:
            return 1.0 / self.mean
        low, high = 1e-300, 1.0 - 1e-12  # the mean falls from infinity to 1 in between
        for _ in range(2000):
            middle = math.sqrt(low * high)
            if not low < middle < high:
                break
            if negative_binomial_mean(self.eta, middle) > self.mean:
                low = middle
            else:
                high = middle
        return high

    def probabilities(self) -> Iterator[tuple[int, float]]:
        """Yield numbers of runs and their probabilities, from the smallest number on.

        Truncated negative binomial: `P(k) = (1-g)^k / (g^-eta - 1) prod_{l<k} (l+eta)/(l+1)`.
        """
        if self.distribution == "poisson":
            number, chance = 0, math.exp(-self.mean)
            while chance > 0:
                yield number, chance
                number += 1
                chance *= self.mean / number
            return
        eta, gamma = self.eta, self.gamma
        logarithm = math.log(1 / gamma)
        number = 1
        chance = (1 - gamma) * (1 / logarithm if eta == 0 else eta / math.expm1(eta * logarithm))
        while chance > 0:
            yield number, chance
            chance *= (1 - gamma) * (number + eta) / (number + 1)
            number += 1

    def draw(self, *, uniform: Callable[[], float] | None = None) -> int:
        """Draw a number of runs by a source that nobody can repeat. Keep it secret.

        The distribution is met up to the rounding of float64.
        """
        left = fresh_bits(53) / 2**53 if uniform is None else uniform()
        largest = 0
        for number, chance in self.probabilities():
            largest, left = number, left - chance
            if left < 0:
                break
        return largest

    def describe(self) -> str:
        """Return the distribution in words."""
        name = self.distribution.replace("_", " ")
        shape = "" if self.shape is None else f" of shape {self.shape:g}"
        return f"{name} distribution{shape} with mean {self.mean:g}"


def negative_binomial_mean(eta: float, gamma: float) -> float:
    """Return the mean of the truncated negative binomial: `eta (1-g) / (g (1 - g^eta))`."""
    logarithm = math.log(1 / gamma)
    if eta == 0:
        return (1 - gamma) / (gamma * logarithm)
    return eta * (1 - gamma) / (gamma * -math.expm1(-eta * logarithm))


def optional_repetitions(data: Mapping[str, Any] | None) -> Repetitions | None:
    """Return repetitions from plain data, or None where there are none."""
    return None if data is None else Repetitions.from_dict(data)
