"""Morlet wavelets and the filter banks of a scattering transform, with their certified norms.

Everything here is computed once, in double precision, on the finite grid that is used: images are
periodic of `grid` pixels, so every step of the transform is a finite block-diagonal matrix in the
Fourier basis and its norm is that of its largest block.

A signal of resolution r has a sample every 2^r pixels, at `2^r n + (2^r - 1) / 2`: all grids have
the same centre, so mirrored images have mirrored coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clipless.spectral import gram_bound

# Squarings of the Gram iteration: the norm of blocks of size n is overestimated by at most the
# factor n^(2^-15), 0.01% for n = 16.
_GRAM_ITERATIONS = 13
# Room for rounding: of the filters to single precision, and of the blocks in double precision.
_MARGIN = 1.0 + 2.0**-20
# Gaussians are summed up to this many deviations, where they are below 1e-21.
_REACH = 10.0


@dataclass(frozen=True)
class WaveletStep:
    """One step of the transform: a lowpass and the wavelets of some scales, of joint norm <= 1.

    On real images u of (rows, columns) pixels, periodic, the step is the linear map
    `u -> (low_rows u low_columns^T, wavelets of scale j applied to u, for every j)`.
    """

    low_rows: Tensor
    """(rows / s, rows): smoothing and subsampling along the first axis."""
    low_columns: Tensor
    """(columns / s, columns): the same along the second."""
    wavelets: tuple[Tensor, ...]
    """For every scale, transfer functions (angles, rows, columns), complex. Subsampling by t adds
    up t x t aliases without a further factor."""
    subsampling: tuple[int, ...]
    """For every scale, the distance of samples that are kept: t."""
    norm: float
    """Certified upper bound of the operator norm on real images, at most 1."""


def build_step(
    grid: tuple[int, int],
    *,
    resolution: int,
    scales: Sequence[int],
    last_scale: int,
    angles: int,
) -> WaveletStep:
    """Build the step that takes signals of `resolution` to coefficients and to wavelet `scales`.

    `last_scale` is J: coefficients have a sample every 2^J pixels. `grid` is in pixels.
    """
    lows = [_lowpass(size, resolution, last_scale) for size in grid]
    shape = (grid[0] >> resolution, grid[1] >> resolution)
    factors = [2 ** (scale - resolution) for scale in scales]
    banks = [_morlets(shape, resolution, scale, angles) for scale in scales]
    coarsest = 2 ** (last_scale - resolution)
    low = torch.outer(_transfer(lows[0]), _transfer(lows[1])) / coarsest
    bands = [(coarsest, low[None])]
    bands += [(factor, _on_real(bank)) for factor, bank in zip(factors, banks, strict=True)]
    bound = operator_norm_bound(bands, coarsest)
    excess = _MARGIN * bound
    return WaveletStep(
        low_rows=lows[0] / excess,
        low_columns=lows[1],
        # Keeping one sample of t x t takes the mean of t x t aliases; multiplying by t preserves
        # the energy of a signal without high frequencies. What is left is a factor 1 / t.
        wavelets=tuple(bank / (t * excess) for bank, t in zip(banks, factors, strict=True)),
        subsampling=tuple(factors),
        norm=bound / excess * (1 + 1e-12),
    )


def _lowpass(size: int, resolution: int, last_scale: int) -> Tensor:
    """Smooth by a Gaussian of width 0.8 * 2^(J-1) pixels and keep a sample every 2^J.

    Returns (size / 2^J, size / 2^r), times the root of the subsampling (its square, over both axes,
    preserves the energy of smooth images).
    """
    width = 0.8 * 2.0 ** (last_scale - 1)
    distance = _positions(size, last_scale)[:, None] - _positions(size, resolution)[None, :]
    periods = size * torch.arange(-4, 5, dtype=torch.float64)
    bumps = torch.exp(-0.5 * ((distance[..., None] + periods) / width) ** 2).sum(dim=-1)
    weight = 2.0**resolution / (math.sqrt(2 * math.pi) * width)
    return bumps * (weight * 2.0 ** ((last_scale - resolution) / 2))


def _positions(size: int, resolution: int) -> Tensor:
    """Where the samples of a signal of this resolution lie, in pixels."""
    step = 2.0**resolution
    return step * torch.arange(size >> resolution, dtype=torch.float64) + (step - 1) / 2


def _transfer(low: Tensor) -> Tensor:
    """The transfer function of a lowpass, from its first row h(-n); times its gain."""
    return torch.fft.fft(low[0].flip(0).roll(1))


def _morlets(shape: tuple[int, int], resolution: int, scale: int, angles: int) -> Tensor:
    """Transfer functions (angles, *shape) of the Morlet wavelets of one scale, complex128.

    psi(u) = exp(-(u_1^2 + s^2 u_2^2) / (2 sigma^2)) (exp(i xi u_1) - kappa), turned by multiples of
    pi / L, with sigma = 0.8 * 2^j, xi = 3 pi / 4 / 2^j, slant s = 4 / L (Bruna and Mallat, 2013),
    scaled so that its spectrum has a peak of one; kappa makes the mean over the grid vanish.
    """
    width, centre, slant = 0.8 * 2.0**scale, 0.75 * math.pi * 2.0**-scale, 4.0 / angles
    turns = torch.arange(angles, dtype=torch.float64) * (math.pi / angles)
    cosine, sine = torch.cos(turns)[:, None, None], torch.sin(turns)[:, None, None]
    rows, columns = (_frequencies(size, resolution) for size in shape)
    period = 2 * math.pi / 2**resolution
    wave = torch.zeros(angles, *shape, dtype=torch.float64)
    envelope = torch.zeros_like(wave)
    reach = _REACH * max(1.0, slant) / width + centre + period / 2
    periods = range(-math.ceil(reach / period), math.ceil(reach / period) + 1)
    for k in periods:
        for m in periods:
            first, second = (rows + k * period)[:, None], (columns + m * period)[None, :]
            along, across = cosine * first + sine * second, cosine * second - sine * first
            sideways = (across / slant) ** 2
            wave += torch.exp(-0.5 * width**2 * ((along - centre) ** 2 + sideways))
            envelope += torch.exp(-0.5 * width**2 * (along**2 + sideways))
    kappa = wave[:, :1, :1] / envelope[:, :1, :1]
    spectrum = (wave - kappa * envelope).to(torch.complex128)
    if scale == resolution:
        return spectrum
    # Samples move to the centres of the coarser grid. Halfway between two samples, the highest
    # frequency of an even grid has no phase; it is left out, and hardly present anyway.
    shift = (2.0**scale - 2.0**resolution) / 2
    for axis, (size, frequencies) in enumerate(zip(shape, (rows, columns), strict=True), start=1):
        phase = torch.polar(torch.ones_like(frequencies), frequencies * shift)
        phase[size // 2] = 0
        spectrum = spectrum * phase.reshape([-1 if a == axis else 1 for a in range(3)])
    return spectrum


def _frequencies(size: int, resolution: int) -> Tensor:
    """The frequencies of a grid, in radians per pixel."""
    return torch.fft.fftfreq(size, dtype=torch.float64) * (2 * math.pi / 2**resolution)


def _on_real(bank: Tensor) -> Tensor:
    """Filters that have, on complex images, the norm that `bank` has on real ones.

    A complex filter is a pair of real ones, its real and imaginary parts, and a real operator has
    the same norm on real and on complex images. With h* the conjugate of h, they are (h + h*) / 2
    and (h - h*) / 2i: a unitary mixture of h / sqrt 2 and h* / sqrt 2.
    """
    conjugate = bank.flip(-2, -1).roll((1, 1), (-2, -1)).conj()
    return torch.cat([bank, conjugate]) / math.sqrt(2)


def operator_norm_bound(bands: Sequence[tuple[int, Tensor]], coarsest: int) -> float:
    """Bound the norm of a bank of filters with subsampling, on complex periodic images.

    Filtering by h, keeping one sample of t x t and multiplying by t maps the spectrum of u, in an
    orthonormal basis, to `sum_k h(w + k) u(w + k)` over the t x t frequencies that become one on
    the coarser grid. All frequencies that become one on the coarsest grid of the bank form one
    block; the norm of the bank is the largest norm of its blocks. For t = 1 this is the
    Littlewood-Paley sum.

    Args:
        bands: pairs of a subsampling t, a divisor of `coarsest`, and transfer functions
            (filters, rows, columns).
        coarsest: s; blocks have s x s frequencies.
    """
    rows, columns = (size // coarsest for size in bands[0][1].shape[-2:])
    blocks = [  # (rows, columns, filters, s * s)
        band.unflatten(2, (coarsest, columns))
        .unflatten(1, (coarsest, rows))
        .permute(2, 4, 0, 1, 3)
        .flatten(3)
        for _, band in bands
    ]
    masks = [_aliases(t, coarsest) for t, _ in bands]
    largest = 0.0
    # Filters of real images: opposite frequencies have conjugate blocks, so half are enough.
    for row in range(rows // 2 + 1):
        parts = [part[row].mH @ part[row] for part in blocks]
        gram = torch.zeros_like(parts[0])
        for part, mask in zip(parts, masks, strict=True):
            gram = gram + part * mask
        bound = gram_bound(gram, iterations=_GRAM_ITERATIONS).max().item()
        largest = max(largest, bound)
    return math.sqrt(largest) * (1 + 1e-12)


def _aliases(t: int, coarsest: int) -> Tensor:
    """Which pairs of a block's s x s frequencies become one when subsampled by t: (s * s, s * s).

    Frequencies a and b, counted in rows of the coarsest grid, do if they agree modulo s / t.
    """
    group = torch.arange(coarsest) % (coarsest // t)
    same = (group[:, None] == group[None, :]).to(torch.float64)
    return torch.kron(same, same)
