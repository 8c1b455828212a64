"""Rules of sums, products with constants, and elementwise extremes.

Signatures follow torch's own, so that positional and keyword arguments land where they should.
X bounds the norm of the input.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor

from clipless.bounds._rule import Bound, CallSite, Signal, register, scaling


@register(operator.add, torch.add, Tensor.add)
def add(site: CallSite, a: Any, b: Any, *, alpha: float = 1) -> Bound:
    """x + alpha y: the Jacobians are 1 and |alpha|, the output at most X + |alpha| Y.

    A constant adds its own norm over the whole example.
    """
    weights = (1.0, abs(_number(site, alpha)))
    norms = [_addend_norm(site, term) for term in (a, b)]
    signals = [w for w, term in zip(weights, (a, b), strict=True) if isinstance(term, Signal)]
    return Bound(
        lipschitz=tuple(signals),
        output=sum(w * n for w, n in zip(weights, norms, strict=True)),
        forward_roundings=2,
        roundings=1,  # so has the sum of cotangents where the branches part
        rows_apart=True,
    )


@register(operator.sub, torch.sub, torch.subtract, Tensor.sub, Tensor.subtract)
def subtract(site: CallSite, a: Any, b: Any, *, alpha: float = 1) -> Bound:
    """x - alpha y: as for a sum."""
    return add(site, a, b, alpha=alpha)


@register(operator.neg, torch.neg, torch.negative, Tensor.neg, Tensor.negative)
def negate(site: CallSite, x: Signal) -> Bound:
    """-x: l = 1, output X."""
    return scaling(site, x, 1.0, roundings=0)


@register(operator.mul, torch.mul, torch.multiply, Tensor.mul, Tensor.multiply)
def multiply(site: CallSite, a: Any, b: Any) -> Bound:
    """Multiplication by a constant a: l = |a| (the largest entry), output |a| X."""
    if isinstance(a, Signal) and isinstance(b, Signal):
        site.refuse(
            "it multiplies two tensors that both depend on the example, which has no Lipschitz "
            "constant. Only multiplication by a constant is covered."
        )
    signal, constant = (a, b) if isinstance(a, Signal) else (b, a)
    factor = _largest(site, constant, signal)
    return scaling(site, signal, factor, roundings=1, forward_roundings=2)


@register(operator.truediv, torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.divide)
def divide(site: CallSite, a: Any, b: Any) -> Bound:
    """Division by a constant a: l = 1 / |a| (the smallest entry), output X / |a|."""
    if isinstance(b, Signal):
        site.refuse("it divides by a tensor that depends on the example: no Lipschitz constant.")
    if isinstance(b, Tensor):
        _check_keeps_shape(site, a)
        smallest = _extreme(b.detach(), largest=False)
    else:
        smallest = abs(_number(site, b))
    if not smallest > 0:
        site.refuse("it divides by zero.")
    return scaling(site, a, 1 / smallest, roundings=1, forward_roundings=2)


def _addend_norm(site: CallSite, term: Any) -> float:
    """The norm over the example of one term of a sum: a signal, a number or a constant tensor."""
    if isinstance(term, Signal):
        _check_keeps_shape(site, term)
        return term.norm
    if isinstance(term, Tensor):
        rank = len(site.output_shape) + 1
        if term.ndim == rank and term.shape[0] != 1:
            site.refuse("it adds a constant with a batch axis, whose entries differ by example.")
        own = term.detach().to(torch.float64)[(0,) if term.ndim == rank else ()]
        return float(torch.linalg.vector_norm(own.broadcast_to(site.output_shape)))
    return abs(_number(site, term)) * math.sqrt(site.output_size)


def _largest(site: CallSite, constant: Any, x: Signal) -> float:
    if isinstance(constant, Tensor):
        _check_keeps_shape(site, x)
        return _extreme(constant.detach(), largest=True)
    return abs(_number(site, constant))


def _extreme(constant: Tensor, *, largest: bool) -> float:
    """The largest or smallest absolute entry of a constant tensor; of none, zero or infinity."""
    sizes = constant.to(torch.float64).abs()
    if sizes.numel() == 0:
        return 0.0 if largest else math.inf
    return float(sizes.max() if largest else sizes.min())


def _number(site: CallSite, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        site.refuse(f"it needs a constant number here, got {value!r}.")
    return float(value)


def _check_keeps_shape(site: CallSite, x: Signal) -> None:
    """Broadcasting repeats entries, which multiplies norms."""
    if math.prod(x.shape) != site.output_size:
        site.refuse(
            f"it broadcasts an input of shape {x.shape} to {site.output_shape}, repeating its "
            "entries. Give both sides the same shape."
        )


@register(torch.maximum, torch.minimum, Tensor.maximum, Tensor.minimum)
def elementwise_extreme(site: CallSite, a: Signal, b: Signal) -> Bound:
    """max(x, y) or min(x, y), entry by entry: l = 1 in each, output sqrt(X^2 + Y^2)."""
    if not (isinstance(a, Signal) and isinstance(b, Signal)):
        site.refuse("one side is a constant: use a registered module for it.")
    _check_keeps_shape(site, a)
    _check_keeps_shape(site, b)
    output = math.hypot(a.norm, b.norm)
    return Bound(lipschitz=1.0, output=output, roundings=1, rows_apart=True)
