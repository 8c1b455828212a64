"""Gaussian noise: how much each parameter gets, and the one pass that adds it.

All parameters of a step are released together, as one Gaussian mechanism. With `D_d` the largest
norm that one example can contribute to parameter d and `std_d` the noise on it, the mechanism has
the multiplier `sigma = (sum_d (D_d / std_d)^2)^(-1/2)`. Strategies share out the same sigma.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

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
    """Adds independent Gaussian noise to all gradients of a step in one pass.

    Seeded by the operating system. `insecure_seed` is for tests: the noise can be recomputed by
    whoever knows the seed, and what it is added to is not private.
    """

    def __init__(self, *, insecure_seed: int | None = None) -> None:
        self.insecure = insecure_seed is not None
        self._seed = insecure_seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._drawings: dict[tuple[torch.device, torch.dtype], _Drawing] = {}

    @torch.no_grad()
    def add_(self, gradients: Sequence[Tensor], deviations: Sequence[float]) -> None:
        """Add noise of the given standard deviations in place, without reading any value back."""
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, (gradient, deviation) in enumerate(zip(gradients, deviations, strict=True)):
            if deviation > 0:
                groups.setdefault((gradient.device, gradient.dtype), []).append(index)
        for place, members in groups.items():
            chosen = [gradients[index] for index in members]
            noise = self._draw(place, chosen)
            torch._foreach_mul_(noise, [deviations[index] for index in members])
            torch._foreach_add_(chosen, noise)

    def _draw(self, place: tuple[torch.device, torch.dtype], like: list[Tensor]) -> list[Tensor]:
        """Fill one flat buffer with standard normals and return it cut into shapes."""
        drawing = self._drawings.get(place)
        if drawing is None or not drawing.fits(like):
            drawing = self._drawings[place] = _Drawing(like)
        drawing.buffer.normal_(generator=self._generator(place[0]))
        return drawing.parts

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            generator = torch.Generator(device=device)
            if self._seed is not None:
                generator.manual_seed(self._seed)
            else:
                seed_from_system(generator)
            self._generators[device] = generator
        return self._generators[device]

    def renew(self) -> None:
        """Draw from the operating system's randomness from here on."""
        self._seed = None
        self._generators.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the generators' states. They tell all noise, past and future: keep them secret."""
        return {str(device): g.get_state() for device, g in self._generators.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue the noise where `state` was saved."""
        for name, value in state.items():
            self._generator(torch.device(name)).set_state(value)


class _Drawing:
    """A buffer for the noise of some tensors, and the parts of it that are theirs."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        dtype = like[0].dtype
        # Noise is drawn in at least single precision; half precisions have too few levels.
        wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
        sizes = [tensor.numel() for tensor in like]
        self.buffer = torch.empty(sum(sizes), device=like[0].device, dtype=wide)
        self.parts = list(map(_laid_out, self.buffer.split(sizes), like))
        self._layout = list(map(_layout, like))

    def fits(self, like: Sequence[Tensor]) -> bool:
        return list(map(_layout, like)) == self._layout


def _layout(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    return tensor.shape, tensor.stride()


def _laid_out(part: Tensor, like: Tensor) -> Tensor:
    """A flat part of the buffer in the shape of `like`, and in its order if that has no gaps.

    Tensors in one order are added to each other all at once; others, one by one.
    """
    if torch.empty_like(like, device="meta").stride() == like.stride():
        return part.as_strided(like.shape, like.stride())
    return part.view(like.shape)


# torch keeps the state of its CPU generator as a header of 24 bytes and 624 words of 32 bits, each
# stored in 8 bytes. Seeding it with a number sets 32 bits of the 19,968 only.
_HEADER_BYTES, _STATE_WORDS = 24, 624


def seed_from_system(generator: torch.Generator) -> None:
    """Seed a generator with as much of the operating system's randomness as it can hold."""
    generator.manual_seed(secrets.randbits(63))
    state = generator.get_state()
    if generator.device.type == "cpu" and state.numel() >= _HEADER_BYTES + 8 * _STATE_WORDS:
        words = torch.frombuffer(
            bytearray(secrets.token_bytes(4 * _STATE_WORDS)), dtype=torch.uint8
        )
        end = _HEADER_BYTES + 8 * _STATE_WORDS
        body = state[_HEADER_BYTES:end].view(_STATE_WORDS, 8)
        body[:, :4] = words.view(_STATE_WORDS, 4)
        generator.set_state(state)
