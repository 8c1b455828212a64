"""The trade-off function of a run (f-differential privacy), and what attacks can reach under it.

An attack that tells a run on one data set from a run on its neighbour has a rate of false alarms
alpha and one of misses beta. The trade-off function f bounds beta from below, for every alpha and
every attack (Dong, Roth and Su 2022). It says everything that (epsilon, delta) at one delta says,
and all other deltas besides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from clipless.accounting import _epsilon
from clipless.accounting._history import Accountant, History, merge_releases

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

_POINTS = 256
_SMALLEST_DELTA = 1e-9
_LARGEST_EPSILON = 500.0


@dataclass(frozen=True, kw_only=True)
class TradeOff:
    """A bound of what any attack can reach, from `(epsilon, delta)` guarantees that all hold.

    Every number here is on the safe side: misses from below, successes of attacks from above. It
    is of attackers who know everything but whether the record is there, as the relation says:
    an example, or an empty record in its place.

    Example:
        >>> from clipless.accounting import FullBatch, Mechanism
        >>> step = Mechanism(noise_multiplier=2.0, sampling=FullBatch(dataset_size=1000))
        >>> curve = trade_off([(step, 1)])
        >>> round(curve.advantage, 3), round(curve.attack_accuracy(), 3)
        (0.197, 0.599)
        >>> round(curve.gaussian_fit(tail=1e-6), 3)
        0.5
    """

    epsilons: tuple[float, ...]
    """In ascending order, the first one 0."""
    deltas: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse pairs that are no guarantee."""
        if not self.epsilons or self.epsilons[0] != 0 or len(self.epsilons) != len(self.deltas):
            raise ValueError("give one delta for each epsilon, the first of which is 0")
        if list(self.epsilons) != sorted(set(self.epsilons)):
            raise ValueError("epsilons must ascend")
        if not all(0 <= delta <= 1 for delta in self.deltas):
            raise ValueError("deltas must lie in [0, 1]")

    @classmethod
    def of_pair(cls, epsilon: float, delta: float) -> TradeOff:
        """Return what one pair (epsilon, delta) says."""
        at_zero = min(1.0, math.tanh(epsilon / 2) + delta * (1.0 - math.tanh(epsilon / 2)))
        if epsilon == 0:
            return cls(epsilons=(0.0,), deltas=(delta,))
        return cls(epsilons=(0.0, epsilon), deltas=(at_zero, delta))

    @property
    def advantage(self) -> float:
        """The largest difference of true and false positive rate of any attack: delta at 0."""
        return self.deltas[0]

    def misses(self, false_alarms: float) -> float:
        """Return f: at least so many members are missed by an attack with such false alarms."""
        if not 0 <= false_alarms <= 1:
            raise ValueError(f"false_alarms must lie in [0, 1], got {false_alarms!r}")
        return max(
            0.0,
            *(
                max(
                    1.0 - delta - math.exp(min(epsilon, _LARGEST_EPSILON)) * false_alarms,
                    math.exp(-epsilon) * (1.0 - delta - false_alarms),
                )
                for epsilon, delta in zip(self.epsilons, self.deltas, strict=True)
            ),
        )

    def vertices(self) -> tuple[tuple[float, float], ...]:
        """Return where f bends, (alpha, beta) by ascending alpha from 0 to 1; straight between."""
        half = sorted({(0.0, self.misses(0.0)), *self._corners()})
        mirrored = [(beta, alpha) for alpha, beta in reversed(half) if alpha != beta]
        return (*half, *mirrored, (1.0, 0.0))

    def detection(self, false_alarms: float) -> float:
        """Return the most members that an attack with such false alarms can find: 1 - f."""
        return 1.0 - self.misses(false_alarms)

    def attack_accuracy(self, base_rate: float = 0.5) -> float:
        """Return how often the best attack is right about membership, at such a share of members.

        Without looking, guessing is right with probability `max(base_rate, 1 - base_rate)`.
        """
        rarer = min(base_rate, 1.0 - base_rate)
        if not 0 < rarer <= 0.5:
            raise ValueError(f"base_rate must lie strictly between 0 and 1, got {base_rate!r}")
        # max over alpha of (1 - r) (1 - alpha) + r (1 - beta), where f is a maximum of lines. Both
        # orders of the data sets obey f, so that it does not matter which of the two is rarer.
        corners = [*self._corners(), (0.0, self.misses(0.0)), (self.misses(0.0), 0.0)]
        errors = [
            min((1.0 - rarer) * alpha + rarer * beta, rarer * alpha + (1.0 - rarer) * beta)
            for alpha, beta in corners
        ]
        return 1.0 - min(rarer, *errors)

    def attack_success(self, baseline: float) -> float:
        """Return how often an attribute or a record is guessed that is guessed blindly so often.

        `1 - f(baseline)` bounds re-identification, attribute inference and reconstruction alike
        (Hayes et al. 2023; Kulynych et al. 2025): the blind guess is one that sees a run in which
        the record was empty.
        """
        return self.detection(baseline)

    def gaussian_fit(self, *, tail: float) -> float:
        """Return the smallest mu with which a Gaussian is an upper bound, but for `tail`.

        Every attack misses at least `G_mu(alpha) - tail`, where G_mu is the trade-off between
        normal variables of variance 1 at distance mu. Infinite if no mu does.
        """
        import numpy as np
        from scipy.special import ndtr, ndtri

        alphas, betas = np.array([*self._corners(), (0.0, self.misses(0.0))]).T
        heights = -ndtri(alphas)

        def kept(mu: float) -> bool:
            # G_mu is convex and f linear between its corners, so that these decide.
            return bool((ndtr(heights - mu) - tail <= betas + 1e-12).all())

        low, high = 0.0, 1.0
        while not kept(high):
            low, high = high, 2.0 * high
            if high > 1e3:
                return math.inf
        for _ in range(30):
            middle = 0.5 * (low + high)
            low, high = (low, middle) if kept(middle) else (middle, high)
        return high

    def to_dict(self, *, tail: float, points: int = 41) -> dict[str, Any]:
        """Return the curve and its figures as plain data; what is infinite becomes None."""
        mu = self.gaussian_fit(tail=tail)
        alphas = [0.0, *(10 ** (-4 + 4 * k / (points - 2)) for k in range(points - 1))]
        return {
            "advantage": self.advantage,
            "attack_accuracy": {f"{r:g}": self.attack_accuracy(r) for r in (0.5, 0.1, 0.01)},
            "attack_success": {f"{b:g}": self.attack_success(b) for b in (0.5, 0.1, 0.01)},
            "gaussian_mu": mu if math.isfinite(mu) else None,
            "gaussian_tail": tail,
            "false_alarms": alphas,
            "misses": [self.misses(alpha) for alpha in alphas],
        }

    def _corners(self) -> list[tuple[float, float]]:
        """Return where f bends, (alpha, beta), on the side on which its slope is below -1."""
        # As a function of e^epsilon, delta is convex: points above their lower hull are no corners.
        hull: list[tuple[float, float]] = []
        for epsilon, delta in zip(self.epsilons, self.deltas, strict=True):
            point = (math.exp(min(epsilon, _LARGEST_EPSILON)), delta)
            while len(hull) > 1 and _turns_right(hull[-2], hull[-1], point):
                hull.pop()
            if not hull or delta < hull[-1][1]:
                hull.append(point)
        found = []
        for (x, delta), (further, smaller) in pairwise(hull):
            alpha = (delta - smaller) / (further - x)
            found.append((alpha, max(0.0, 1.0 - delta - x * alpha)))
        alpha = (1.0 - hull[0][1]) / 2.0  # where the line of slope -1 meets the diagonal
        return [*found, (alpha, alpha)]


def trade_off(history: History, *, accountant: Accountant = "pld") -> TradeOff:
    """Return the trade-off function of a history of releases, from its deltas at many epsilons.

    An empty history tells nothing; one without noise tells everything.
    """
    runs = merge_releases(history)
    largest = _epsilon.epsilon(runs, _SMALLEST_DELTA, accountant=accountant)
    if not math.isfinite(largest):
        largest = _LARGEST_EPSILON
    if largest == 0:
        return TradeOff(epsilons=(0.0,), deltas=(_epsilon.delta(runs, 0.0, accountant=accountant),))
    epsilons = [largest * point / (_POINTS - 1) for point in range(_POINTS)]
    return trade_off_at(epsilons, runs, accountant=accountant)


def trade_off_at(
    epsilons: Sequence[float], history: History, *, accountant: Accountant = "pld"
) -> TradeOff:
    """Return the bound that the deltas at some epsilons give; 0 must be the first."""
    deltas = (_epsilon.delta(history, each, accountant=accountant) for each in epsilons)
    return TradeOff(epsilons=tuple(epsilons), deltas=tuple(deltas))


def _turns_right(
    first: tuple[float, float], middle: tuple[float, float], last: tuple[float, float]
) -> bool:
    """Return whether `middle` lies on or above the chord from `first` to `last`."""
    rise = (middle[1] - first[1]) * (last[0] - first[0])
    return rise >= (last[1] - first[1]) * (middle[0] - first[0])
