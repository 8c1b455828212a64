"""Rules of fixed front ends: scattering, and normalisation of features.

X is the bound of the input's norm.
"""

from __future__ import annotations

import math

from clipless import nn as lip
from clipless.bounds._rule import Bound, CallSite, Product, Signal, register
from clipless.bounds.rules.activation import saturated


@register(lip.Scattering2d)
def scattering(site: CallSite, x: Signal) -> Bound:
    """A tree of steps of norm at most one: l <= 1 as certified for the filters, output l X."""
    layer = site.module
    if not layer.is_intact():
        site.refuse(
            "its filters are not the ones that were certified (they were edited, or converted to "
            "a precision below float32). Construct the layer anew."
        )
    constant = layer.design().lipschitz
    # Its Fourier transforms are products, and nobody has counted their roundings.
    return Bound(lipschitz=constant, output=constant * x.norm, rows_apart=True)


@register(lip.GroupNormalize)
def group_normalize(site: CallSite, x: Signal) -> Bound:
    """Centred groups onto balls, over the floor: l = 1 / floor, output min(X / floor, sqrt(n))."""
    layer = site.module
    scaled = Signal(layer.lipschitz * x.norm, x.shape)
    output = saturated(scaled, math.sqrt(x.size))
    return Bound(lipschitz=layer.lipschitz, output=output, roundings=math.inf, rows_apart=True)


@register(lip.ChannelStandardize)
def channel_standardize(site: CallSite, x: Signal) -> Bound:
    """(x - m) / d at S positions: l = max 1 / d, output l X + sqrt(S) ||m / d||."""
    lipschitz, shift = site.module.constants()
    if not math.isfinite(lipschitz):
        site.refuse("its mean is not finite, or its deviation not finite and greater than 0.")
    positions = math.prod(x.shape[1:])
    output = lipschitz * x.norm + math.sqrt(positions) * shift
    return Bound(lipschitz=lipschitz, output=output, roundings=math.inf, rows_apart=True)


@register(lip.ChannelMix)
def channel_mix(site: CallSite, x: Signal) -> Bound:
    """A x at every position: l = ||A||, output l X."""
    lipschitz = site.module.constant()
    if not math.isfinite(lipschitz):
        site.refuse("its matrix is not finite.")
    out, into = site.module.matrix.shape
    product = Product(rank=min(out, into), terms=max(out, into))
    return Bound(lipschitz=lipschitz, output=lipschitz * x.norm, roundings=product, rows_apart=True)
