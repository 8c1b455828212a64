"""The noise of a plan's releases: independent, or correlated by bands or by buffers."""

from __future__ import annotations

from clipless.accounting.correlated import BufferedStrategy
from clipless.kernels import GaussianNoise
from clipless.privacy._plan import Plan
from clipless.privacy.noise._buffered import BufferedNoise
from clipless.privacy.noise._correlated import CorrelatedNoise


def noise_of(plan: Plan, *, insecure_seed: int | None) -> GaussianNoise | CorrelatedNoise:
    """Return the noise of a plan's releases."""
    if plan.strategy is None:
        return GaussianNoise(insecure_seed=insecure_seed)
    if isinstance(plan.strategy, BufferedStrategy):
        return BufferedNoise(plan.strategy, insecure_seed=insecure_seed)
    return CorrelatedNoise(plan.strategy, insecure_seed=insecure_seed)
