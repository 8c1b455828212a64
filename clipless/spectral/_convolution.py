"""Certified upper bounds of convolutions, as operators on whole images or sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from clipless.spectral._bounds import gram_bound

# Complex entries held at once while frequencies are bounded: 64 MiB of complex128.
_CHUNK_ENTRIES = 1 << 22


def patch_multiplicity(
    kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> int:
    """Return in how many patches of a sliding window one pixel can lie, at most.

    Along one axis a pixel p is tap j of window i if `p = s i + d j`. With g = gcd(s, d), j is
    fixed modulo s/g, so at most `ceil(k g / s)` taps qualify, each for one window.

    Example:
        >>> patch_multiplicity((3, 3), (1, 1), (1, 1)), patch_multiplicity((3,), (2,), (1,))
        (9, 2)
    """
    counts = [
        -(-k * math.gcd(s, d) // s) for k, s, d in zip(kernel_size, stride, dilation, strict=True)
    ]
    return math.prod(counts)


def fourier_bound(
    kernel: Tensor,
    *,
    input_size: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    circular: bool = False,
    iterations: int = 6,
) -> Tensor:
    """Bound the operator norm of the convolution with `kernel` on images of at most `input_size`.

    A circular convolution is block-diagonal in the Fourier basis, one (out, in) block a frequency,
    so its norm is the largest norm of a block. A zero-padded convolution on n pixels is a part of
    the circular one on n + d (k - 1) pixels; any stride takes a part of the outputs. Both only
    lower the norm.

    Args:
        kernel: (out, in / groups, *window).
        input_size: the largest spatial size the operator meets (the exact one if circular).
        iterations: squarings of the Gram iteration in every block.

    Returns:
        Scalar float64, never below the true norm.
    """
    taps = kernel.to(torch.float64).flatten(2).mT  # (out, window, in / groups), taps in the middle
    window = kernel.shape[2:]
    period = [
        n if circular else n + d * (k - 1)
        for n, k, d in zip(input_size, window, dilation, strict=True)
    ]
    phases = _phases(window, period, dilation, kernel.device)
    out_channels, count, in_channels = taps.shape
    grouped = taps.reshape(groups, out_channels // groups, count, in_channels)
    block = max(1, _CHUNK_ENTRIES // max(1, out_channels * in_channels))
    largest = torch.zeros((), dtype=torch.float64, device=kernel.device)
    for chunk in phases.split(block):
        spectrum = torch.einsum("ft,gotc->fgoc", chunk, grouped.to(torch.complex128))
        largest = torch.maximum(largest, gram_bound(spectrum, iterations=iterations).amax())
    # Rounding of phases and of the sum over taps, entry by entry, in Frobenius norm.
    rounding = (count + 16) * 2.0**-51 * torch.linalg.vector_norm(taps) * math.sqrt(count)
    return largest + rounding


def _phases(
    window: Sequence[int], period: Sequence[int], dilation: Sequence[int], device: torch.device
) -> Tensor:
    """Return exp(-2 pi i <f, t>) for half of all frequencies f and every tap t: (f, taps).

    A real kernel's blocks at f and -f are complex conjugates, so half of the last axis is enough.
    """
    angle = torch.zeros(1, 1, dtype=torch.float64, device=device)
    for axis, (k, n, d) in enumerate(zip(window, period, dilation, strict=True)):
        last = axis == len(window) - 1
        frequencies = torch.arange(n // 2 + 1 if last else n, device=device)
        # Reduced modulo the period in integers, so that large products lose no digits.
        turns = (frequencies[:, None] * (d * torch.arange(k, device=device))[None, :]) % n
        step = turns.to(torch.float64) / n
        rows, columns = angle.shape
        angle = (angle[:, None, :, None] + step[None, :, None, :]).reshape(
            rows * step.shape[0], columns * step.shape[1]
        )
    return torch.polar(torch.ones_like(angle), -2 * math.pi * angle)
