"""How much rounding can add to one example's gradient, in every precision a step may use.

The bounds are proved for exact arithmetic. What a step computes is the gradient of a slightly
different network, in which every operation rounds; here its bounds are related to the proved ones.

Rounding of operands is bounded without exception. With u the unit of the format (half the spacing
of numbers just above one), the entries of a vector x move by u |x_i| each, so its norm grows by the
factor 1 + u at most. The entries of a weight W move by u |W_ij| each, hence

    ||rounded W|| <= ||W|| + u ||W||_F <= (1 + u sqrt(rank)) c

for a spectral norm of c; in bfloat16 this is too much, and the rounded weights are certified
themselves instead (`RoundedWeights`). Forward and backward pass are chains of such operations.
An operation lies before a weight, where its forward pass matters, or behind it, where its backward
pass does, so that each counts once, with the worse of the two; so does each branch of a sum.

Sums are accumulated in float32. Their error could reach n units in theory and grows like the root
of n in practice, since roundings go either way: that part is an estimate with a margin, and the
only one (see docs/speed.md).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import nn

from clipless import nn as lip
from clipless.bounds import SensitivityReport
from clipless.bounds._report import NodeBound
from clipless.errors import PrivacyError
from clipless.nn._base import AffineModule
from clipless.spectral import patch_multiplicity

Precision = Literal["float32", "tf32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bfloat16")

UNITS: dict[str, float] = {"tf32": 2.0**-11, "bfloat16": 2.0**-8}
"""The units of the formats. (Where hardware cuts numbers off for TF32 instead of rounding them,
norms only shrink, and of the error of a weight one half is a multiple of the weight.)"""

WEIGHT_ROOM = 2.0**-8
"""By how much a weight rounded to bfloat16 may exceed its constraint: see `RoundedWeights`."""

# The slack of float32: roundings of the forward and backward pass and of the sum over the batch.
_SLACK = {torch.float64: 1e-9, torch.float32: 1e-3}
# Two root mean squares of the error of a sum of n terms, u sqrt(n) of their Euclidean norm.
_ACCUMULATION = 2 * 2.0**-24


def arithmetic_slack(
    dtype: torch.dtype,
    *,
    precision: Precision = "float32",
    model: nn.Module | None = None,
    report: SensitivityReport | None = None,
) -> float:
    """Return what rounding may add to a gradient bound, relative to it.

    Args:
        dtype: that of the parameters.
        precision: what products of activations and weights are rounded to.
        model, report: the model and its bounds; without them, float32 and a model of moderate size
            are taken for granted.
    """
    if dtype not in _SLACK:
        raise ValueError(
            f"parameters of {dtype} are not supported: rounding in {dtype} is too coarse to be "
            "covered by the default slack. Keep parameters in float32."
        )
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if precision != "float32" and dtype != torch.float32:
        raise ValueError(f"precision={precision!r} is for parameters in float32, not {dtype}")
    slack = _SLACK[dtype]
    if model is None or report is None:
        return slack
    layers = [_module_of(model, node) for node in report.nodes]
    if dtype == torch.float32:
        products = [layer for layer in layers if isinstance(layer, AffineModule)]
        slack = max(slack, sum(map(_accumulation, products)))
    if precision == "float32":
        return slack
    unit = UNITS[precision]
    # The input of the network and the cotangent of its output are rounded too.
    growth = (1 + unit) ** 2
    for node, layer in zip(report.nodes, layers, strict=True):
        growth *= _growth(node, layer, precision)
    return (1 + slack) * growth - 1


def _growth(node: NodeBound, layer: nn.Module | None, precision: Precision) -> float:
    """The factor by which rounding in one operation can enlarge what flows through it."""
    unit = UNITS[precision]
    if isinstance(layer, AffineModule):
        if precision == "bfloat16":
            return (1 + WEIGHT_ROOM) / (1 - unit)
        return (1 + unit * math.sqrt(largest_rank(layer))) / (1 - unit)
    known: Any = node.operation if layer is None else type(layer)
    if known in _ROUNDINGS and (precision == "tf32" or math.inf in node.input_bounds):
        return 1.0  # only products round to TF32; raw inputs arrive in float32
    roundings = _ROUNDINGS.get(known)
    if roundings is None:
        raise PrivacyError(
            f"{node.name} ({node.operation}): how much rounding adds to its result in {precision} "
            "is not known. Train in float32 (precision='float32', and TF32 off on a GPU), or "
            "compute this part beforehand."
        )
    if isinstance(layer, _WINDOWS):
        roundings += _multiplicity(layer)
    if node.operation in _JOINS:
        roundings += len(node.input_bounds) - 1
    return (1 - unit) ** -roundings


def largest_rank(layer: AffineModule) -> float:
    """Return r such that the rounding error of a weight has norm at most `u sqrt(r) c`."""
    if isinstance(layer, lip.FrobeniusLinear):
        return 1.0
    rows, columns = layer.weight.shape[0], layer.weight[0].numel()
    if isinstance(layer, lip.SpectralConv1d | lip.SpectralConv2d):
        if layer.certificate_size is not None:
            # The response to one pixel has norm c at most, so ||kernel||_F <= c sqrt(channels).
            return layer.multiplicity * min(rows, layer.weight.shape[1])
        rows //= layer.groups
    return min(rows, columns)


def _accumulation(layer: AffineModule) -> float:
    """The error of a product's sums, relative to c ||x||: `2 u sqrt(n r)` for n terms each."""
    terms = max(layer.weight[0].numel(), layer.weight[:, 0].numel())
    return _ACCUMULATION * math.sqrt(terms * largest_rank(layer))


def _module_of(model: nn.Module, node: NodeBound) -> nn.Module | None:
    """The module that a node of the report calls, or None for a function."""
    try:
        module = model.get_submodule(node.name)
    except AttributeError:
        return None
    return module if type(module).__name__ == node.operation else None


def _multiplicity(layer: Any) -> int:
    """In how many windows a cell can lie: so many cotangents are added up."""
    sizes = [layer.kernel_size, layer.stride, getattr(layer, "dilation", 1)]
    axes = 1 if type(layer).__name__.endswith("1d") else 2
    window, stride, dilation = (s if isinstance(s, tuple) else (s,) * axes for s in sizes)
    return patch_multiplicity(window, stride, dilation)


_WINDOWS = (
    lip.ScaledAvgPool1d, lip.ScaledAvgPool2d, nn.AvgPool1d, nn.AvgPool2d,
    nn.MaxPool1d, nn.MaxPool2d,
)  # fmt: skip
_JOINS = ("cat", "concat", "concatenate", "stack")

# How many units an operation between products can add in bfloat16, forward or backward, whichever
# is more; None if nobody has counted. What happens inside one kernel is computed in float32, and
# rounded once, at its end.
_EXACT: tuple[Any, ...] = (
    lip.GroupSort, lip.MaxMin, lip.FullSort, lip.Absolute, nn.Identity, nn.Flatten, nn.Unflatten,
    nn.ReLU, nn.ZeroPad1d, nn.ZeroPad2d, nn.Hardtanh, nn.ReLU6,
    "relu", "abs", "absolute", "neg", "negative", "clone", "contiguous", "float", "double",
    "reshape", "view", "view_as", "reshape_as", "flatten", "unflatten", "transpose", "swapaxes",
    "swapdims", "permute", "movedim", "moveaxis", "squeeze", "unsqueeze", "getitem", "chunk",
    "split", "unbind", *_JOINS, nn.MaxPool1d, nn.MaxPool2d,
)  # fmt: skip
_ONCE: tuple[Any, ...] = (
    nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.ELU, nn.GELU, nn.SiLU, nn.Dropout,
    nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, lip.Embedding,
    "leaky_relu", "tanh", "sigmoid", "softplus", "elu", "gelu", "silu", "dropout",
    "mul", "multiply", "div", "divide", "true_divide", "truediv", "mean", "sum", "amax", "amin",
    # Where an activation was used twice, its cotangents are added up and rounded. There are as
    # many such sums as there are branches that meet again, here and in the joins.
    "add", "sub", "subtract", "maximum", "minimum",
)  # fmt: skip
_ROUNDINGS: dict[Any, int | None] = {
    **dict.fromkeys(_EXACT, 0),
    **dict.fromkeys(_ONCE, 1),
    # Backward: the norm that was rounded is divided by, and the product with x is rounded.
    lip.ScaledL2NormPool1d: 2, lip.ScaledL2NormPool2d: 2,
    lip.ScaledGlobalL2NormPool1d: 2, lip.ScaledGlobalL2NormPool2d: 2,
    # A sum, and its product with a constant.
    lip.ScaledAvgPool1d: 2, lip.ScaledAvgPool2d: 2, nn.AvgPool1d: 2, nn.AvgPool2d: 2,
    lip.ScaledGlobalAvgPool1d: 2, lip.ScaledGlobalAvgPool2d: 2,
    nn.AdaptiveAvgPool1d: 2, nn.AdaptiveAvgPool2d: 2,
    # A mean is rounded, then the difference; backward there is one more sum.
    lip.LayerCentering: 3,
    # Several operations, one after the other, each of which rounds.
    lip.BoundedInput: 8, lip.BallProjection: 8, lip.ClipGradient: 8, lip.Householder: 8,
    **dict.fromkeys(("max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d"), None),
    **dict.fromkeys(("adaptive_avg_pool1d", "adaptive_avg_pool2d"), None),
    lip.ChannelStandardize: None, lip.ChannelMix: None, lip.GroupNormalize: None,
}  # fmt: skip
