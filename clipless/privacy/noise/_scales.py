"""How much noise each parameter gets: strategies, which share out one noise multiplier.

All parameters of a step are released together, as one Gaussian mechanism. With `D_d` the largest
norm that one example can contribute to parameter d and `std_d` the noise on it, the mechanism has
the multiplier `sigma = (sum_d (D_d / std_d)^2)^(-1/2)`. Strategies share out the same sigma.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from clipless.kernels import STATE_NAME

NoiseStrategy = Literal["global", "per_layer", "optimal"]
STRATEGIES: tuple[NoiseStrategy, ...] = ("global", "per_layer", "optimal")


def noise_scales(
    strategy: NoiseStrategy,
    *,
    sensitivities: Sequence[float],
    sizes: Sequence[int],
    coefficients: Sequence[float] | None = None,
) -> list[float]:
    """Return the standard deviation of each parameter's noise for a noise multiplier of one.

    - `global`: the same everywhere, `sqrt(sum D^2)`.
    - `per_layer`: proportional to each parameter's sensitivity, or to coefficient times
      sensitivity where coefficients are given.
    - `optimal`: the least expected noise energy `sum_d p_d std_d^2` over p_d entries,
      `std_d^2 = (D_d / sqrt(p_d)) sum_j D_j sqrt(p_j)`.

    A parameter of sensitivity zero gets no noise: no example can influence it.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"noise must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if coefficients is not None and strategy != "per_layer":
        raise ValueError("coefficients belong to the strategy 'per_layer'")
    if strategy == "global":
        norm = math.sqrt(sum(d * d for d in sensitivities))
        return [norm if d > 0 else 0.0 for d in sensitivities]
    if strategy == "optimal":
        total = sum(d * math.sqrt(p) for d, p in zip(sensitivities, sizes, strict=True))
        return [
            math.sqrt(d / math.sqrt(p) * total) if d > 0 else 0.0
            for d, p in zip(sensitivities, sizes, strict=True)
        ]
    weights = [1.0] * len(sensitivities) if coefficients is None else list(coefficients)
    if len(weights) != len(sensitivities) or not all(0 < w < math.inf for w in weights):
        raise ValueError("coefficients must be positive numbers, one for each parameter")
    shared = math.sqrt(sum(w**-2 for w, d in zip(weights, sensitivities, strict=True) if d > 0))
    return [shared * w * d for w, d in zip(weights, sensitivities, strict=True)]


def key_names(names: Iterable[str]) -> set[str]:
    """Return which names of a saved state stand for keys, and not for noise that is remembered."""
    return {name for name in names if name.rpartition("/")[2] == STATE_NAME}


def noise_names(prefixes: Iterable[str]) -> set[str]:
    """Return what a saved state calls the noise of processes with these prefixes."""
    return {prefix + STATE_NAME for prefix in prefixes}
