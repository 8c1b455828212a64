"""Cryptographic random bits, and Gaussian noise on a grid made of them, alike on every device."""

from clipless.kernels.randomness._gaussian import (
    GRID_STEPS,
    KEY_BYTES,
    STATE_NAME,
    GaussianNoise,
    KeyStream,
    add_grid_noise_,
    grid_noise,
    joint_grid_factor,
    joint_multiplier,
    next_key,
)
from clipless.kernels.randomness._uniform import WordSource, random_subset, standard_exponential

__all__ = [
    "GRID_STEPS",
    "KEY_BYTES",
    "STATE_NAME",
    "GaussianNoise",
    "KeyStream",
    "WordSource",
    "add_grid_noise_",
    "grid_noise",
    "joint_grid_factor",
    "joint_multiplier",
    "next_key",
    "random_subset",
    "standard_exponential",
]
