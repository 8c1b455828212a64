"""Noise in shares: rounded Gaussians of several clients, whose sum hides what each of them adds.

A share is `round(N(0, a^2))` for every entry, a whole number, and an update is a vector of whole
numbers. What is opened is `V + Z_1 + ... + Z_m`, V the sum of updates and Z_i the shares. A sum of
rounded Gaussians is not a rounded Gaussian. Still nothing is lost:

**Theorem.** In every entry, `V + Z_1 + ... + Z_m` is, up to a total variation of

    (m a^2 + m/2 + 1) (2m + 1) 3 exp(-pi^2 a^2 / 2)  +  2 exp(-m a^2 / 2),

a function of `V + N(0, m a^2)` and of randomness that does not depend on V: it is accounted for as
the Gaussian mechanism whose variance is the sum of the shares' variances.

*Proof.* Let h(t) be the probability that N(0, a^2) lies within 1/2 of t: the convolution of its
density and the indicator of [-1/2, 1/2]. Let B be the m-fold convolution of that indicator with
itself, a B-spline of order m. Its values at all integers, from any real number c on, add up to 1:
`K(c)`, which returns k with probability B(k - c), is a rounding at random, and K(c + v) - v has the
law of K(c) for an integer v. So K(V + N(0, m a^2)) is V plus an integer T of probabilities
`h * ... * h (k)`, convolved m times over the real numbers. The sum S of shares has the same
convolved over the integers. Their Fourier series are, with H the transform of h, by Poisson's
formula, `sum_n H(x + n)^m` and `(sum_n H(x + n))^m`. As `|H(x)| <= exp(-2 pi^2 a^2 x^2)`, all but
n = 0 add up to at most `e = 3 exp(-pi^2 a^2 / 2)` for |x| <= 1/2, so that each probability differs
by at most (2m + 1) e, if m e <= 1. Both S and T are within m/2 of a Gaussian of variance m a^2;
with |k| up to `m a^2 + m/2` counted one by one, and the tails above it, that is the bound. QED

With a = 2^20, as below, the bound is below exp(-10^11), and is left out of delta. A public shift of
the Gaussians, here 2^-9 from dropping digits, changes nothing: K follows it.

What is needed is that the shares which count are honest, independent, and not chosen by what they
are: who drops out may depend on anything but the shares.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clipless.common import Query
from clipless.kernels import GRID_STEPS, KEY_BYTES, KeyStream, grid_noise, next_key

if TYPE_CHECKING:
    from torch import Tensor

_DROPPED_BITS = 8
SHARE_STEPS = GRID_STEPS >> _DROPPED_BITS
"""The standard deviation a of a share, in steps of the updates' grid: 2^20."""


class NoiseShare:
    """The noise that one client adds to its update: whole numbers of deviation 2^20.

    The key comes from the operating system and moves on with every release, as for all noise.
    """

    def __init__(self, *, insecure_seed: int | None = None) -> None:
        self.insecure = insecure_seed is not None
        self._key = secrets.token_bytes(KEY_BYTES)
        if insecure_seed is not None:
            self._key = insecure_seed.to_bytes(KEY_BYTES, "little")

    @torch.no_grad()
    def add_(self, values: Sequence[Tensor], queries: Sequence[Query]) -> None:
        """Add a share to updates that are whole numbers, in place."""
        key, self._key = self._key, next_key(self._key)
        stream = KeyStream(key)
        for index, (value, query) in enumerate(zip(values, queries, strict=True)):
            if query.deviation != SHARE_STEPS:
                raise ValueError(f"a share has deviation {SHARE_STEPS}, not {query.deviation}")
            fine = grid_noise(value.numel(), stream, index)
            share = (fine + (1 << (_DROPPED_BITS - 1))) >> _DROPPED_BITS
            value.add_(share.view(value.shape).to(value))


def largest_error(*, shares: int, deviation: float) -> float:
    """Return the theorem's bound of the total variation, for one entry.

    Example:
        >>> largest_error(shares=100, deviation=2.0**20)
        0.0
        >>> 1e-9 < largest_error(shares=2, deviation=3.0) < 1e-3
        True
    """
    variance = deviation**2
    places = shares * variance + shares / 2 + 1
    alike = places * (2 * shares + 1) * 3 * math.exp(-min(math.pi**2 * variance / 2, 745.2))
    tails = 2 * math.exp(-min(shares * variance / 2, 745.2))
    return (alike if alike > 1e-300 else 0.0) + (tails if tails > 1e-300 else 0.0)
