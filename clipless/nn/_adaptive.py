"""Thresholds that follow a quantile of what they clip, by way of a count."""

from __future__ import annotations

import math
from dataclasses import dataclass

from clipless.common import require_positive


@dataclass(frozen=True, kw_only=True)
class FollowQuantile:
    """Move a clipping threshold so that a fraction `quantile` of examples stays below it.

    After every step, `C <- C exp(rate (fraction_above - (1 - quantile)))`, kept below the bound
    that is proved anyway and above `smallest` times it. The fraction is a noisy count, released by
    the step itself: in private training it is one more query of the same mechanism.

    A quantile clips the rare class of an imbalanced data set first, because its examples are the
    ones with large gradients. A fixed threshold does not.
    """

    quantile: float = 0.9
    rate: float = 0.2
    smallest: float = 1e-3

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        if not 0 < self.quantile < 1:
            raise ValueError(f"quantile must lie between 0 and 1, got {self.quantile!r}")
        require_positive("rate", self.rate)
        if not 0 < self.smallest < 1:
            raise ValueError(f"smallest must lie between 0 and 1, got {self.smallest!r}")

    def moved(self, threshold: float, *, fraction_above: float, largest: float) -> float:
        """Return the next threshold."""
        change = self.rate * (fraction_above - (1 - self.quantile))
        # Noise on the count can be large; one step may not do more than double or halve.
        moved = threshold * math.exp(max(-0.7, min(0.7, change)))
        return min(largest, max(self.smallest * largest, moved))
