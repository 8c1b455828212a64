"""Rules of elementwise activation functions.

Signatures follow torch's own, so that positional and keyword arguments land where they should.
X bounds the norm of the input.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor
from torch.nn import functional as F

from clipless.bounds._rule import LARGEST, Bound, CallSite, Signal, register, scaling

_SOFTPLUS_THRESHOLDS = (20.0, 80.0)


def refuse_inplace(site: CallSite, inplace: bool) -> None:
    """Refuse operations that overwrite their input: another consumer would see the new values."""
    if inplace:
        site.refuse("it overwrites its input, which the trace cannot follow. Use inplace=False.")


def saturated(x: Signal, ceiling: float) -> float:
    """Return min(X, ceiling), unless X is unbounded: a bounded function is no input guard.

    It would hand on a NaN. Only the guard, which removes them, makes unbounded inputs bounded.
    """
    return min(x.norm, ceiling) if x.is_bounded else x.norm


def finite(site: CallSite, number: float) -> float:
    """Return a number that is finite and leaves room for products in float32, or refuse."""
    if not abs(number) <= LARGEST:
        site.refuse(f"{number} is not finite, or so large that float32 overflows.")
    return number


@register(torch.relu, F.relu, Tensor.relu)
def relu(site: CallSite, x: Signal, inplace: bool = False) -> Bound:
    """max(0, x): l = 1, output X."""
    refuse_inplace(site, inplace)
    return scaling(site, x, 1.0, roundings=0)


@register(torch.abs, torch.absolute, operator.abs, abs, Tensor.abs, Tensor.absolute)
def absolute(site: CallSite, x: Signal) -> Bound:
    """|x|: l = 1, output X."""
    return scaling(site, x, 1.0, roundings=0)


@register(F.leaky_relu)
def leaky_relu(
    site: CallSite, x: Signal, negative_slope: float = 0.01, inplace: bool = False
) -> Bound:
    """Slope a below zero: l = max(1, |a|), output l X."""
    refuse_inplace(site, inplace)
    return scaling(site, x, max(1.0, finite(site, abs(negative_slope))), roundings=1)


@register(torch.tanh, F.tanh, Tensor.tanh)
def tanh(site: CallSite, x: Signal) -> Bound:
    """l = 1, output min(X, sqrt(n))."""
    output = saturated(x, math.sqrt(x.size))
    return Bound(lipschitz=1.0, output=output, roundings=1, rows_apart=True)


@register(torch.sigmoid, F.sigmoid, Tensor.sigmoid)
def sigmoid(site: CallSite, x: Signal) -> Bound:
    """l = 1/4; it maps 0 to 1/2, so the output is at most min(sqrt(n), sqrt(n)/2 + X/4)."""
    root = math.sqrt(x.size)
    from_zero = root / 2 + x.norm / 4
    output = min(root, from_zero) if x.is_bounded else from_zero
    return Bound(lipschitz=0.25, output=output, roundings=1, rows_apart=True)


@register(F.softplus)
def softplus(site: CallSite, x: Signal, beta: float = 1.0, threshold: float = 20.0) -> Bound:
    """log(1 + exp(beta x)) / beta: l = 1, output X + sqrt(n) log(2)/beta, its value at zero."""
    if not finite(site, beta) > 0:
        site.refuse(f"softplus needs beta > 0, got {beta}.")
    # Beyond the threshold torch returns x itself. At 20 that is a jump of 2e-9 / beta, within
    # rounding; for smaller thresholds the jump has no Lipschitz constant. Below it torch computes
    # exp(beta x), which is infinite in float32 from 88.8 on: the derivative would be NaN.
    least, most = _SOFTPLUS_THRESHOLDS
    if not threshold >= least:
        site.refuse(f"softplus jumps at its threshold of {threshold}. Use at least {least:g}.")
    if threshold > most:
        site.refuse(
            f"softplus overflows below its threshold of {threshold}: exp(x) is infinite in float32 "
            f"for x > 88. Use at most {most:g}."
        )
    output = x.norm + math.sqrt(x.size) * math.log(2.0) / beta
    return Bound(lipschitz=1.0, output=output, roundings=1, rows_apart=True)


@register(F.elu)
def elu(site: CallSite, x: Signal, alpha: float = 1.0, inplace: bool = False) -> Bound:
    """alpha (exp(x) - 1) below zero: l = max(1, |alpha|), output l X."""
    refuse_inplace(site, inplace)
    return scaling(site, x, max(1.0, finite(site, abs(alpha))), roundings=1)


@register(F.gelu)
def gelu(site: CallSite, x: Signal, approximate: str = "none") -> Bound:
    """x Phi(x), or its tanh approximation: l = 1.1291 (largest derivative), output X."""
    return Bound(lipschitz=1.1291, output=x.norm, roundings=1, rows_apart=True)


@register(F.silu)
def silu(site: CallSite, x: Signal, inplace: bool = False) -> Bound:
    """x sigmoid(x): l = 1.0999 (largest derivative), output X."""
    refuse_inplace(site, inplace)
    return Bound(lipschitz=1.0999, output=x.norm, roundings=1, rows_apart=True)


@register(F.dropout, torch.dropout)
def dropout(
    site: CallSite, x: Signal, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Bound:
    """Zeroes entries and scales the rest by 1 / (1 - p): l = 1 / (1 - p), output X / (1 - p).

    The same bound is used in evaluation mode, where dropout is the identity.
    """
    refuse_inplace(site, inplace)
    if not 0 <= p < 1:
        site.refuse(f"dropout needs 0 <= p < 1, got {p}.")
    return scaling(site, x, 1 / (1 - p), roundings=1, forward_roundings=2)
