"""Rules of ordinary torch modules, by way of the rules of the functions they call."""

from __future__ import annotations

import math

from torch import nn

from clipless.bounds._rule import Bound, CallSite, Signal, register
from clipless.bounds.rules import activation as activations
from clipless.bounds.rules import reductions as reductions
from clipless.bounds.rules import shapes as shapes


@register(nn.Identity)
def identity(site: CallSite, x: Signal) -> Bound:
    """Nothing happens: l = 1, output X."""
    return shapes.rearrange(site, x)


@register(nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.ELU, nn.GELU, nn.SiLU)
def activation(site: CallSite, x: Signal) -> Bound:
    """Elementwise activations, with the parameters of the module."""
    layer = site.module
    inplace = getattr(layer, "inplace", False)
    match layer:
        case nn.ReLU():
            return activations.relu(site, x, inplace)
        case nn.LeakyReLU():
            return activations.leaky_relu(site, x, layer.negative_slope, inplace)
        case nn.Tanh():
            return activations.tanh(site, x)
        case nn.Sigmoid():
            return activations.sigmoid(site, x)
        case nn.Softplus():
            return activations.softplus(site, x, layer.beta, layer.threshold)
        case nn.ELU():
            return activations.elu(site, x, layer.alpha, inplace)
        case nn.GELU():
            return activations.gelu(site, x, layer.approximate)
        case _:
            return activations.silu(site, x, inplace)


@register(nn.Flatten)
def flatten(site: CallSite, x: Signal) -> Bound:
    """Reorders entries: l = 1, output X."""
    return shapes.flatten(site, x, site.module.start_dim, site.module.end_dim)


@register(nn.Unflatten)
def unflatten(site: CallSite, x: Signal) -> Bound:
    """Reorders entries: l = 1, output X."""
    return shapes.unflatten(site, x, site.module.dim)


@register(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
def dropout(site: CallSite, x: Signal) -> Bound:
    """Zeroes entries or channels and scales the rest by 1 / (1 - p): l = 1 / (1 - p)."""
    return activations.dropout(site, x, site.module.p, inplace=site.module.inplace)


@register(nn.MaxPool1d, nn.MaxPool2d)
def max_pooling(site: CallSite, x: Signal) -> Bound:
    """A pixel lies in at most m windows: l = sqrt(m), output sqrt(m) X."""
    layer = site.module
    return reductions.max_pool(
        site,
        x,
        layer.kernel_size,
        layer.stride,
        layer.padding,
        layer.dilation,
        return_indices=layer.return_indices,
    )


@register(nn.AvgPool1d, nn.AvgPool2d)
def average_pooling(site: CallSite, x: Signal) -> Bound:
    """l = sqrt(m / w), output l X; windows must all divide by the same number."""
    layer = site.module
    return reductions.avg_pool(
        site,
        x,
        layer.kernel_size,
        layer.stride,
        layer.padding,
        ceil_mode=layer.ceil_mode,
        count_include_pad=layer.count_include_pad,
        divisor_override=getattr(layer, "divisor_override", None),
    )


@register(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
def adaptive_average_pooling(site: CallSite, x: Signal) -> Bound:
    """Disjoint windows of w cells: l = 1 / sqrt(w)."""
    return reductions.adaptive_avg_pool(site, x, site.module.output_size)


@register(nn.ZeroPad1d, nn.ZeroPad2d)
def zero_padding(site: CallSite, x: Signal) -> Bound:
    """Adds zeros (or cuts, if negative): l = 1, output X. The axes must be the example's own."""
    if len(x.shape) < len(site.module.padding) // 2:
        site.refuse("it would pad the batch axis. Give examples as many axes as are padded.")
    return shapes.rearrange(site, x)


@register(nn.Hardtanh, nn.ReLU6)
def hard_clip(site: CallSite, x: Signal) -> Bound:
    """Clamping to [low, high] around zero: l = 1, output min(X, sqrt(n) max(|low|, high))."""
    layer = site.module
    activations.refuse_inplace(site, layer.inplace)
    if not layer.min_val <= 0 <= layer.max_val:
        site.refuse("its range does not contain 0, so it does not map 0 to 0.")
    ceiling = max(-layer.min_val, layer.max_val) * math.sqrt(x.size)
    output = activations.saturated(x, ceiling)
    return Bound(lipschitz=1.0, output=output, roundings=0, rows_apart=True)
