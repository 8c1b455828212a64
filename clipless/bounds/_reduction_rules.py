"""Rules of reductions and pooling over axes of the example.

Signatures follow torch's own, so that positional and keyword arguments land where they should.
X bounds the norm of the input.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from clipless.bounds._arithmetic_rules import scaling
from clipless.bounds._rule import Bound, Signal, Site, register
from clipless.bounds._shape_rules import rearrange
from clipless.spectral import patch_multiplicity


@register(torch.mean, "mean")
def mean(site: Site, x: Signal, dim: Any = None, keepdim: bool = False) -> Bound:
    """Average over S positions of the example: l = 1 / sqrt(S), output l X."""
    return scaling(site, x, 1 / math.sqrt(_reduced(site, x, dim)))


@register(torch.sum, "sum")
def total(site: Site, x: Signal, dim: Any = None, keepdim: bool = False) -> Bound:
    """Sum over S positions of the example: l = sqrt(S), output l X."""
    return scaling(site, x, math.sqrt(_reduced(site, x, dim)))


@register(torch.amax, torch.amin, "amax", "amin")
def extreme(site: Site, x: Signal, dim: Any = (), keepdim: bool = False) -> Bound:
    """Largest or smallest entry along axes of the example: l = 1, output X.

    At ties torch shares a cotangent evenly, a Jacobian of norm below one.
    """
    _reduced(site, x, dim)
    return rearrange(site, x)


def _reduced(site: Site, x: Signal, dim: Any) -> int:
    """Number of positions a reduction runs over."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        site.refuse("it reduces over all axes, the batch included. Name the example's own axes.")
    axes = site.own_axes(dim if isinstance(dim, int) else tuple(dim), x)
    return math.prod(x.shape[axis] for axis in axes)


@register(F.max_pool1d, F.max_pool2d, torch.max_pool1d, torch.max_pool2d)
def max_pool(
    site: Site,
    x: Signal,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Bound:
    """A pixel lies in at most m windows: l = sqrt(m), output sqrt(m) X."""
    if return_indices:
        site.refuse("indices of a maximum are not a Lipschitz function. Use return_indices=False.")
    axes = _image_axes(site, x)
    window = _per_axis(kernel_size, axes)
    strides = _per_axis(stride, axes) if stride else window
    lipschitz = math.sqrt(patch_multiplicity(window, strides, _per_axis(dilation, axes)))
    return scaling(site, x, lipschitz)


@register(F.avg_pool1d, F.avg_pool2d, torch.avg_pool1d)
def avg_pool(
    site: Site,
    x: Signal,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Bound:
    """Sum over w cells divided by w, padding counted: l = sqrt(m / w), output l X.

    With another divisor v it is sqrt(m w) / v.
    """
    axes = _image_axes(site, x)
    if ceil_mode:
        site.refuse("ceil_mode divides windows at the border by fewer cells. Use ceil_mode=False.")
    padded = any(_per_axis(padding, axes))
    if padded and not count_include_pad and divisor_override is None:
        site.refuse(
            "padding that is not counted raises the weight of the border up to twice. Use "
            "count_include_pad=True."
        )
    window = _per_axis(kernel_size, axes)
    strides = _per_axis(stride, axes) if stride else window
    multiplicity = patch_multiplicity(window, strides, (1,) * axes)
    cells = math.prod(window)
    return scaling(site, x, math.sqrt(multiplicity * cells) / (divisor_override or cells))


@register(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, torch.adaptive_avg_pool1d)
def adaptive_avg_pool(site: Site, x: Signal, output_size: Any) -> Bound:
    """Disjoint windows of w cells: l = 1 / sqrt(w), output l X."""
    _image_axes(site, x)
    size, reduced = x.shape[1:], site.output_shape[1:]
    if any(n % o for n, o in zip(size, reduced, strict=True)):
        site.refuse(
            f"an output of {reduced} does not divide the input of {size}: its windows overlap "
            "unevenly. Use an output size that divides it."
        )
    return scaling(site, x, math.sqrt(math.prod(reduced) / math.prod(size)))


def _image_axes(site: Site, x: Signal) -> int:
    """Number of axes that a pooling operation slides over; the channels must be there as well.

    Without them torch would take the batch for the channels.
    """
    axes = 1 if "1d" in site.operation else 2
    if len(x.shape) != axes + 1:
        site.refuse(
            f"it needs inputs (batch, channels, {'length' if axes == 1 else 'height, width'}), and "
            f"got examples of shape {x.shape}."
        )
    return axes


def _per_axis(value: Any, axes: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * axes if len(values) == 1 else values
