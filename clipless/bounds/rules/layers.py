"""Rules of this library's own layers. X is the bound of the input's norm."""

from __future__ import annotations

import math
from typing import Any

from clipless import nn as lip
from clipless.bounds._rule import Bound, CallSite, Product, Signal, register, scaling
from clipless.bounds.rules.activation import saturated

_SEVERAL = 8
"""Roundings of layers that are several operations, one after the other, each of which rounds."""


@register(lip.SpectralLinear, lip.FrobeniusLinear)
def linear(site: CallSite, x: Signal) -> Bound:
    """W x_t + b at T positions: l = c, output c X + sqrt(T) ||b||, J_W = X, J_b = sqrt(T).

    The weight's gradient is the sum of g_t x_t^T, of norm at most ||g|| ||x|| over all positions;
    the bias' gradient is the sum of T cotangents.
    """
    return _affine(site.module, x, positions=math.prod(x.shape[:-1]))


@register(lip.SpectralConv1d, lip.SpectralConv2d)
def convolution(site: CallSite, x: Signal) -> Bound:
    """N (Psi conv x) + b: l = c, output c X + sqrt(S) ||b||, J_Psi = N sqrt(m) X, J_b = sqrt(S).

    c is the constraint's radius, proved through the reshaped kernel or Fourier blocks; the patches
    that Psi meets have energy at most m ||x||^2; S is the number of output positions.
    """
    layer = site.module
    size = x.shape[1:]
    if layer.padding_mode == "circular":
        _check_circular(site, size)
    if layer.certificate_size is not None:
        _check_certificate_size(site, size)
    gain = layer.scale * math.sqrt(layer.multiplicity)
    return _affine(layer, x, positions=math.prod(site.output_shape[1:]), gain=gain)


def _affine(layer: Any, x: Signal, *, positions: int, gain: float = 1.0) -> Bound:
    """The common part of affine layers: J_weight = gain X, and a bias repeated over positions.

    Product clipping caps the weight's gradient at its limit, whatever G and X are.
    """
    parameters = {"weight": gain * x.norm}
    output = layer.norm * x.norm
    if layer.bias is not None:
        parameters["bias"] = math.sqrt(positions)
        output += math.sqrt(positions) * layer.bias_norm
    caps = {} if layer.weight_clip is None else {"weight": layer.weight_clip}
    return Bound(
        lipschitz=layer.norm,
        output=output,
        parameters=parameters,
        parameter_caps=caps,
        roundings=weight_product(layer),
        rows_apart=True,
    )


def weight_product(layer: Any) -> Product:
    """Return what an affine layer's weight W, of constraint c, says of rounding.

    Its rank is one with ||W||_F <= sqrt(rank) c. Weights with a spectral constraint are certified
    anew as bfloat16 rounds them; a Frobenius norm grows by one unit at most.
    """
    rows, columns = layer.weight.shape[0], layer.weight[0].numel()
    terms = max(columns, layer.weight[:, 0].numel())
    if isinstance(layer, lip.FrobeniusLinear):
        return Product(rank=1, terms=terms)
    rank = min(rows, columns)
    if isinstance(layer, lip.SpectralConv1d | lip.SpectralConv2d):
        rank = min(rows // layer.groups, columns)
        if layer.certificate_size is not None:
            # The response to one pixel has norm c at most, so ||kernel||_F <= c sqrt(channels).
            rank = layer.multiplicity * min(rows, layer.weight.shape[1])
    return Product(rank=rank, terms=terms, certified=True)


def _check_circular(site: CallSite, size: tuple[int, ...]) -> None:
    """Circular padding keeps the patch count only if windows wrap around whole images."""
    layer = site.module
    if any(
        sum(pair) != d * (k - 1)
        for pair, k, d in zip(layer.padding, layer.kernel_size, layer.dilation, strict=True)
    ):
        site.refuse('circular padding must add dilation * (kernel_size - 1) pixels: use "same".')
    for n, k, d, s in zip(size, layer.kernel_size, layer.dilation, layer.stride, strict=True):
        if d * (k - 1) + 1 > n or n % s:
            site.refuse(
                f"circular padding on an axis of {n} pixels with a window spanning "
                f"{d * (k - 1) + 1} and stride {s} repeats pixels unevenly and breaks the bound. "
                "The window must fit the image and the stride divide it; or use zero padding."
            )


def _check_certificate_size(site: CallSite, size: tuple[int, ...]) -> None:
    """The Fourier certificate speaks of images up to its size (of exactly it, if circular)."""
    layer = site.module
    circular = layer.padding_mode == "circular"
    fits = all(
        n == limit if circular else n <= limit
        for n, limit in zip(size, layer.certificate_size, strict=True)
    )
    if not fits:
        site.refuse(
            f"the input has size {size} but the kernel is certified for "
            f"certificate_size={layer.certificate_size}. Construct the layer for the size it meets."
        )


@register(lip.Embedding)
def embedding(site: CallSite, tokens: Signal) -> Bound:
    """T rows of norm at most c: output sqrt(T) c, J = sqrt(T), reached when all tokens agree."""
    root_tokens = math.sqrt(math.prod(tokens.shape))
    return Bound(
        lipschitz=math.inf,  # a token has no neighbourhood
        output=root_tokens * site.module.norm,
        parameters={"weight": root_tokens},
        # Looked up in float32: what products round is then the input of the network.
        roundings=1 if tokens.is_bounded else 0,
        rows_apart=True,
    )


@register(lip.GroupSort, lip.MaxMin, lip.FullSort)
def sort(site: CallSite, x: Signal) -> Bound:
    """A permutation of the example's entries: l = 1, output X."""
    site.own_axes(site.module.dim, x)
    return scaling(site, x, 1.0, roundings=0)


@register(lip.Absolute)
def absolute(site: CallSite, x: Signal) -> Bound:
    """Changes signs: l = 1, output X."""
    return scaling(site, x, 1.0, roundings=0)


@register(lip.Householder)
def householder(site: CallSite, x: Signal) -> Bound:
    """Reflects pairs: l = 1, output X, J = X since turning an angle moves a pair by its norm."""
    site.own_axes(site.module.dim, x)
    return Bound(
        lipschitz=1.0,
        output=x.norm,
        parameters={"angles": x.norm},
        roundings=_SEVERAL,
        rows_apart=True,
    )


@register(
    lip.ScaledAvgPool1d,
    lip.ScaledAvgPool2d,
    lip.ScaledL2NormPool1d,
    lip.ScaledL2NormPool2d,
    lip.ScaledGlobalAvgPool1d,
    lip.ScaledGlobalAvgPool2d,
    lip.ScaledGlobalL2NormPool1d,
    lip.ScaledGlobalL2NormPool2d,
)
def scaled_pooling(site: CallSite, x: Signal) -> Bound:
    """Pooling divided by its own Lipschitz constant: l = 1, output X."""
    # A sum and its product with a constant; backward, the cotangents of all windows of a pixel.
    # Of norms: the one that was rounded is divided by, and the product with x is rounded.
    layer = site.module
    averages = isinstance(layer, lip.ScaledAvgPool1d | lip.ScaledAvgPool2d)
    cells = layer.window if isinstance(layer, lip.WindowPoolBase) else math.prod(x.shape[1:])
    roundings = 2 + (layer.multiplicity if averages else 0)
    return scaling(site, x, 1.0, roundings=roundings, forward_roundings=cells + _SEVERAL)


@register(lip.LayerCentering)
def centering(site: CallSite, x: Signal) -> Bound:
    """An orthogonal projection: l = 1, output X."""
    if site.module.dim is not None:
        site.own_axes(site.module.dim, x)
    # A mean is rounded, then the difference; backward there is one more sum.
    return scaling(site, x, 1.0, roundings=3)


@register(lip.BallProjection)
def ball_projection(site: CallSite, x: Signal) -> Bound:
    """x min(1, c / ||x||): l = 1, output min(X, c)."""
    output = saturated(x, site.module.radius)
    return Bound(lipschitz=1.0, output=output, roundings=_SEVERAL, rows_apart=True)


@register(lip.BoundedInput)
def bounded_input(site: CallSite, x: Signal) -> Bound:
    """The input guard: output min(X, c), l = 1 when clipping; on the sphere c and no constant."""
    guard = site.module
    sphere = guard.mode == "sphere"
    return Bound(
        lipschitz=math.inf if sphere else 1.0,
        output=guard.norm if sphere else min(x.norm, guard.norm),
        # What comes out of the first guard keeps its norm when it is rounded.
        roundings=_SEVERAL if x.is_bounded else 0,
        forward_roundings=x.size + _SEVERAL,
        rows_apart=True,
    )


@register(lip.ClipGradient)
def clip_gradient(site: CallSite, x: Signal) -> Bound:
    """Identity whose backward pass hands on at most C: G = min(G, C), l = 1, output X."""
    return Bound(
        lipschitz=1.0,
        output=x.norm,
        cotangent_cap=site.module.norm,
        roundings=_SEVERAL,
        forward_roundings=0,
        rows_apart=True,
    )
