"""Rules of reductions and pooling over axes of the example.

Signatures follow torch's own, so that positional and keyword arguments land where they should.
X bounds the norm of the input.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipless.bounds._rule import Bound, CallSite, Signal, register, scaling
from clipless.spectral import patch_multiplicity


@register(torch.mean, Tensor.mean)
def mean(site: CallSite, x: Signal, dim: Any = None, keepdim: bool = False) -> Bound:
    """Average over S positions of the example: l = 1 / sqrt(S), output l X."""
    return scaling(site, x, 1 / math.sqrt(_reduced(site, x, dim)), roundings=1)


@register(torch.sum, Tensor.sum)
def total(site: CallSite, x: Signal, dim: Any = None, keepdim: bool = False) -> Bound:
    """Sum over S positions of the example: l = sqrt(S), output l X."""
    return scaling(site, x, math.sqrt(_reduced(site, x, dim)), roundings=1)


@register(torch.amax, torch.amin, Tensor.amax, Tensor.amin)
def extreme(site: CallSite, x: Signal, dim: Any = (), keepdim: bool = False) -> Bound:
    """Largest or smallest entry along axes of the example: l = 1, output X.

    At ties torch shares a cotangent evenly, a Jacobian of norm below one.
    """
    _reduced(site, x, dim)
    return scaling(site, x, 1.0, roundings=1, forward_roundings=0)


def _reduced(site: CallSite, x: Signal, dim: Any) -> int:
    """Number of positions a reduction runs over."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        site.refuse("it reduces over all axes, the batch included. Name the example's own axes.")
    axes = site.own_axes(dim if isinstance(dim, int) else tuple(dim), x)
    return math.prod(x.shape[axis] for axis in axes)


@register(F.max_pool1d, F.max_pool2d, torch.max_pool1d, torch.max_pool2d)
def max_pool(
    site: CallSite,
    x: Signal,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Bound:
    """A pixel lies in at most m windows: l = sqrt(m), output sqrt(m) X.

    A window that holds nothing but padding yields -inf, and its derivative is written to a place
    in memory that does not exist. Only padding together with dilation makes one.
    """
    if return_indices:
        site.refuse("indices of a maximum are not a Lipschitz function. Use return_indices=False.")
    axes = _image_axes(site, x)
    window = _per_axis(kernel_size, axes)
    strides = _per_axis(stride, axes) if stride else window
    spacings = _per_axis(dilation, axes)
    geometry = zip(window, strides, _per_axis(padding, axes), spacings, strict=True)
    sizes = zip(x.shape[1:], site.output_shape[1:], strict=True)
    for axis, ((size, count), (k, s, p, d)) in enumerate(zip(sizes, geometry, strict=True)):
        if not all(has_cell(size, s * index - p, k, d) for index in range(count)):
            site.refuse(
                f"along axis {axis} of the image, {size} cells long, a window of {k} cells with "
                f"dilation {d} and padding {p} lies in the padding alone, and its maximum is -inf. "
                "Use no padding, or a smaller dilation."
            )
    windows = patch_multiplicity(window, strides, spacings)
    # Backward, a pixel adds up the cotangents of all its windows.
    return scaling(site, x, math.sqrt(windows), roundings=windows, forward_roundings=0)


def has_cell(size: int, start: int, window: int, dilation: int) -> bool:
    """Whether one of the cells `start + j dilation`, j < `window`, lies within [0, size).

    Example:
        >>> has_cell(2, -1, 2, 3), has_cell(2, -1, 2, 2)
        (False, True)
    """
    return any(0 <= start + j * dilation < size for j in range(window))


@register(F.avg_pool1d, F.avg_pool2d, torch.avg_pool1d)
def avg_pool(
    site: CallSite,
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
    factor = math.sqrt(multiplicity * cells) / (divisor_override or cells)
    # A sum and its product with a constant; backward, the cotangents of all windows of a pixel.
    return scaling(site, x, factor, roundings=2 + multiplicity)


@register(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, torch.adaptive_avg_pool1d)
def adaptive_avg_pool(site: CallSite, x: Signal, output_size: Any) -> Bound:
    """Disjoint windows of w cells: l = 1 / sqrt(w), output l X."""
    _image_axes(site, x)
    size, reduced = x.shape[1:], site.output_shape[1:]
    if any(n % o for n, o in zip(size, reduced, strict=True)):
        site.refuse(
            f"an output of {reduced} does not divide the input of {size}: its windows overlap "
            "unevenly. Use an output size that divides it."
        )
    return scaling(site, x, math.sqrt(math.prod(reduced) / math.prod(size)), roundings=2)


_ALONG_ONE_AXIS: frozenset[Any] = frozenset(
    {
        F.max_pool1d, torch.max_pool1d, nn.MaxPool1d, F.avg_pool1d, torch.avg_pool1d, nn.AvgPool1d,
        F.adaptive_avg_pool1d, torch.adaptive_avg_pool1d, nn.AdaptiveAvgPool1d,
    }
)  # fmt: skip


def _image_axes(site: CallSite, x: Signal) -> int:
    """Number of axes that a pooling operation slides over; the channels must be there as well.

    Without them torch would take the batch for the channels.
    """
    axes = 1 if site.target in _ALONG_ONE_AXIS else 2
    if len(x.shape) != axes + 1:
        site.refuse(
            f"it needs inputs (batch, channels, {'length' if axes == 1 else 'height, width'}), and "
            f"got examples of shape {x.shape}."
        )
    return axes


def _per_axis(value: Any, axes: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * axes if len(values) == 1 else values
