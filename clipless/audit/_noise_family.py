"""The runs that an audit compares a run with: the same releases, with less or more noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from clipless.accounting import Accountant, Mechanism, TradeOff, epsilon, trade_off


@dataclass(frozen=True, kw_only=True)
class NoiseFamily:
    """The releases that a run claims, and the same with noise that is `factor` times as large.

    An audit looks for the smallest factor that can be ruled out: the run leaks more than one with
    so much noise, and the epsilon of that factor is what an attacker could prove. A factor of 1 or
    less contradicts the claim itself.

    Example:
        >>> from clipless.accounting import FullBatch
        >>> step = Mechanism(noise_multiplier=2.0, sampling=FullBatch(dataset_size=1000))
        >>> family = NoiseFamily(releases=((step, 4),), delta=1e-5)
        >>> family.epsilon(1.0) < family.epsilon(0.8)
        True
    """

    releases: tuple[tuple[Mechanism, int], ...]
    delta: float
    accountant: Accountant = "pld"

    @classmethod
    def of(
        cls, releases: Sequence[tuple[Mechanism, int]], *, delta: float, accountant: Accountant
    ) -> NoiseFamily:
        """Return the family of a history; a declared filter is measured as what it is made of."""
        plain = accountant if accountant in ("pld", "rdp") else "pld"
        return cls(releases=tuple(releases), delta=delta, accountant=plain)

    def curve(self, factor: float = 1.0) -> TradeOff:
        """Return the trade-off function at so many times the noise."""
        return _curve(self, factor)

    def epsilon(self, factor: float = 1.0) -> float:
        """Return epsilon at so many times the noise."""
        return epsilon(self.scaled(factor), self.delta, accountant=self.accountant)

    def scaled(self, factor: float) -> tuple[tuple[Mechanism, int], ...]:
        """Return the releases at so many times the noise."""
        return tuple(
            (replace(mechanism, noise_multiplier=factor * mechanism.noise_multiplier), count)
            for mechanism, count in self.releases
        )


@lru_cache(maxsize=64)
def _curve(family: NoiseFamily, factor: float) -> TradeOff:
    return trade_off(family.scaled(factor), accountant=family.accountant)
