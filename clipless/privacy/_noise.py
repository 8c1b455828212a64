"""Gaussian noise: how much each parameter gets, and where it comes from.

All parameters of a step are released together, as one Gaussian mechanism. With `D_d` the largest
norm that one example can contribute to parameter d and `std_d` the noise on it, the mechanism has
the multiplier `sigma = (sum_d (D_d / std_d)^2)^(-1/2)`. Strategies share out the same sigma.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from clipless.common import Query
from clipless.kernels import (
    KEY_BYTES,
    KeyStream,
    add_grid_noise_,
    joint_grid_factor,
    next_key,
)

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


def joint_multiplier(sensitivities: Sequence[float], deviations: Sequence[float]) -> float:
    """Return the noise multiplier of the joint release: `(sum (D_d / std_d)^2)^(-1/2)`."""
    pairs = [(d, s) for d, s in zip(sensitivities, deviations, strict=True) if d > 0]
    if any(s == 0 for _, s in pairs):
        return 0.0
    return 1 / math.sqrt(sum((d / s) ** 2 for d, s in pairs)) if pairs else math.inf


class GaussianNoise:
    """Gaussian noise on a grid, from a ChaCha20 key that moves on with every release.

    What is released is rounded to a grid and gets noise that lies on it, added as integers: the
    rounding of what the ideal mechanism releases, so that no digit tells more than its result does.
    The key comes from the operating system. After a release it is replaced by one that does not
    lead back to it: who steals a state learns the noise to come, and none that was.
    `insecure_seed` is for tests: the noise can be recomputed by whoever knows the seed, and what it
    is added to is not private.
    """

    def __init__(self, *, insecure_seed: int | None = None) -> None:
        self.insecure = insecure_seed is not None
        if insecure_seed is None:
            self.renew()
        else:
            text = f"clipless/insecure noise/{insecure_seed}"
            self._key = hashlib.sha256(text.encode()).digest()

    @torch.no_grad()
    def add_(self, values: Sequence[Tensor], queries: Sequence[Query]) -> None:
        """Round the values of one release to their grids and add their noise, in place.

        Nothing is read back from an accelerator. The deviations are a little larger than asked
        for, by what rounding to grids moves two neighbours apart (`joint_grid_factor`).
        """
        noisy = [query for query in queries if query.deviation > 0]
        multiplier = joint_multiplier(
            [query.sensitivity for query in noisy], [query.deviation for query in noisy]
        )
        entries = sum(
            value.numel() for value, query in zip(values, queries, strict=True) if query.deviation
        )
        factor = 1.0 if math.isinf(multiplier) else joint_grid_factor(multiplier, entries)
        key, self._key = self._key, next_key(self._key)
        add_grid_noise_(values, [factor * query.deviation for query in queries], KeyStream(key))

    def renew(self) -> None:
        """Take a new key from the operating system."""
        self._key = secrets.token_bytes(KEY_BYTES)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the key of the releases to come: keep it secret. Earlier noise is not in it."""
        return {STATE_NAME: torch.frombuffer(bytearray(self._key), dtype=torch.uint8)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue the noise where `state` was saved."""
        self._key = bytes(state[STATE_NAME].tolist())


STATE_NAME = "chacha20"
"""What a saved state calls the key of the noise."""


def key_names(names: Iterable[str]) -> set[str]:
    """Return which names of a saved state stand for keys, and not for noise that is remembered."""
    return {name for name in names if name.rpartition("/")[2] == STATE_NAME}


def noise_names(prefixes: Iterable[str]) -> set[str]:
    """Return what a saved state calls the noise of processes with these prefixes."""
    return {prefix + STATE_NAME for prefix in prefixes}
