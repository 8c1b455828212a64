"""Layers whose backward pass bounds what one example can add to a parameter's gradient.

For one example with input x and cotangent g, the gradient of a linear or convolution weight has
norm at most `||g|| ||x||` (times a known gain); that of a bias is a small vector. Each example's
contribution is scaled by `min(1, limit / that)`, inside the sum over the batch, and left out where
it is not finite. So the limit holds whatever surrounds the layer, at the price of two norms. The
cotangent that flows to earlier layers is untouched.

Limits serve two purposes. A limit that is proved never acts in a network that is what its proof is
about; in any other it keeps the sensitivity true. A smaller one is product clipping.

Products may be taken in bfloat16. Under autocast, torch rounds the gradient of a weight to bfloat16
after it was summed over the batch. That is a rounding of everybody's sum: where it jumps, one
example moves it by a whole spacing of bfloat16, however small its own gradient is, and no bound of
one example's gradient says anything about it. Here nothing is rounded but an example's own
activations and cotangents: gradients of weights are summed in float32 parts, and those in float64.

Parameters may come as float64 copies of themselves: gradients then keep the digits of their sums.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clipless.kernels._dispatch import kernels_for
from clipless.kernels._exceedance import ExceedanceCount
from clipless.kernels._weight_sums import (
    ConvolutionGeometry,
    convolution_weight,
    has_shares,
    lies_row_by_row,
    linear_weight,
    may_look_at,
    row_sum,
    rows_scaled,
    times_shares,
    transformed,
)
from clipless.kernels.exact import _weights
from clipless.kernels.exact._weights import (
    integer_convolution_weight,
    integer_linear_weight,
)

GradientLimits = Mapping[str, float]
"""How large one example's gradient may be, by the parameter's name; others have no limit."""

_LONGEST_SUM = 4096
"""How many squares one norm on the CPU adds up: its rounding grows with their number."""


@dataclass(frozen=True)
class LimitKind:
    """How a weight's limit is meant: one that acts by design, or a proved one that never should."""

    by_design: bool = False
    count: ExceedanceCount | None = None
    """Counts the examples above the limit, for one that follows a quantile."""


def autocasts_to_bfloat16(x: Tensor) -> bool:
    """Whether products with `x` are to be taken in bfloat16, by autocast."""
    device = x.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16


def to_bfloat16(x: Tensor) -> Tensor:
    """Return `x` in bfloat16, for products in bfloat16."""
    return x.to(torch.bfloat16)


def bounded_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    limits: GradientLimits,
    clip: LimitKind | None = None,
) -> Tensor:
    """`F.linear`, rounded if x is; every example's gradients keep to their limits."""
    norms = precomputed_norm(x) if "weight" in limits else None
    output: Tensor = _applied(
        _Linear, x, weight, bias, norms, limits.get("weight"), limits.get("bias"),
        clip or LimitKind(),
    )  # fmt: skip
    return output


def bounded_linear_layer(
    x: Tensor, parameters: Mapping[str, Tensor], *, limits: GradientLimits, clip: LimitKind
) -> Tensor:
    """`bounded_linear` of a layer's parameters, in bfloat16 where autocast asks for it."""
    if autocasts_to_bfloat16(x):
        x = to_bfloat16(x)
    return bounded_linear(x, parameters["weight"], parameters["bias"], limits, clip)


def bounded_convolution(
    x: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    geometry: ConvolutionGeometry,
    *,
    gain: float,
    input_norm: Tensor | None,
    limits: GradientLimits,
    clip: LimitKind | None = None,
) -> Tensor:
    """A convolution, rounded if x is; every example's gradients keep to their limits.

    The kernel's gradient is at most `gain ||g|| ||x||`. `input_norm` holds ||x||, (batch,), if it
    is to be that before padding; otherwise, and with a limit for the weight, it is taken from x.
    """
    output: Tensor = _applied(
        _Convolution, x, kernel, bias, input_norm, limits.get("weight"), limits.get("bias"),
        clip or LimitKind(), gain, geometry,
    )  # fmt: skip
    return output


def bounded_embedding(
    tokens: Tensor, table: Tensor, limits: GradientLimits, dtype: torch.dtype
) -> Tensor:
    """`F.embedding`; the gradient of one example with T tokens is at most `sqrt(T) ||g||`."""
    if "weight" not in limits:
        return F.embedding(tokens, table)
    rows: Tensor = _Embedding.apply(tokens, table, limits["weight"], dtype)  # type: ignore[no-untyped-call]
    return rows


def per_example_parameter(
    parameter: Tensor, rows: int, limit: float | None, dtype: torch.dtype
) -> Tensor:
    """Return a copy of a small parameter for every example, (rows, *shape).

    Autograd then finds every example's own gradient; those are scaled to the limit and added up.
    """
    if limit is None:
        return parameter.to(dtype).expand(rows, *parameter.shape)
    copies: Tensor = _RowParameter.apply(parameter, rows, limit, dtype)  # type: ignore[no-untyped-call]
    return copies


def _applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Return `function.apply(*arguments)`, which builds a signature anew in every call."""
    if torch.compiler.is_compiling() or transformed():
        return function.apply(*arguments)
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


def precomputed_norm(x: Tensor) -> Tensor | None:
    """The norms of a layer's inputs, where a compiler makes them a part of what computes x.

    Elsewhere they are taken in the backward pass, of what the gradient is computed from: x is not
    ours, and may have been overwritten (`x.data.mul_(2)`) since the forward pass. Sums of integers
    have norms of their own.
    """
    wanted = torch.compiler.is_compiling() and not _adds_integers(x, 1.0)
    return example_norm(x.detach()) if wanted else None


def example_norm(x: Tensor) -> Tensor:
    """An upper bound of the Euclidean norm of every example, (batch,).

    Up to rounding, which makes it less than 1e-4 too small: no more than a few thousand squares are
    added up one after the other in float32, and compiled code on the CPU takes float64.
    """
    size = x.shape[1:].numel()
    kernels = _kernels_for(x)
    if kernels is not None:
        kernels.norms(x, norms := x.new_empty(x.shape[0], dtype=torch.float32))
        return norms
    energy = _energy(x)
    # Squares that vanish are below the smallest normal number each.
    return (energy + size * torch.finfo(energy.dtype).tiny).sqrt()


def _energy(x: Tensor) -> Tensor:
    """The sum of squares of every example, in float32 at least."""
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    if (
        x.device.type != "cpu"
        or torch.compiler.is_compiling()
        or transformed()
        or x.shape[1:].numel() <= 1
    ):
        squares = x.to(wide).square()
        if torch.compiler.is_compiling() and x.device.type == "cpu":
            # Compiled code adds up long rows one by one there.
            added = squares.sum(dim=tuple(range(1, x.ndim)), dtype=torch.float64)
            return added.to(wide) if x.ndim > 1 else squares
        if x.ndim == 4:  # line by line: what compilers can make a part of the kernel that wrote x
            squares = squares.sum(dim=(1, 3))
        return squares.sum(dim=tuple(range(1, squares.ndim))) if squares.ndim > 1 else squares
    rows = x.to(wide).flatten(1)
    # Norms read every entry once, and write nothing; over long rows they lose digits on the CPU.
    size = rows.shape[1]
    if size <= _LONGEST_SUM:
        return torch.linalg.vector_norm(rows, dim=1).square()
    even = size - size % _LONGEST_SUM
    parts = [torch.linalg.vector_norm(rows[:, :even].unflatten(1, (-1, _LONGEST_SUM)), dim=2)]
    if even < size:
        parts.append(torch.linalg.vector_norm(rows[:, even:], dim=1, keepdim=True))
    return torch.cat(parts, dim=1).square().sum(dim=1)


def _kernels_for(*tensors: Tensor) -> ModuleType | None:
    """The kernels of the GPU, if they can work on these tensors and nobody looks on."""
    if torch.compiler.is_compiling() or not tensors[0].is_cuda or transformed():
        return None
    kernels = [kernels_for(x) if lies_row_by_row(x) else None for x in tensors]
    return None if None in kernels else kernels[0]


def _factors(bounds: Tensor, limit: float | Tensor) -> Tensor:
    """`min(1, limit / bound)` for every example, and 0 where it is not a normal number."""
    outside = bounds > limit
    factors = torch.where(outside, limit / torch.where(outside, bounds, 1.0), 1.0)
    # Numbers that are not normal have few digits: a factor among them could be too large by half.
    usable = bounds.isfinite() & (factors >= torch.finfo(factors.dtype).tiny)
    return torch.where(usable, factors, 0.0)


def _bounded_sum(rows: Tensor, limit: float | None) -> Tensor:
    """Add up the examples' own gradients, (batch, *shape), each scaled to the limit."""
    factors = None if limit is None else _factors(example_norm(rows), limit)
    factors = times_shares(factors, rows)
    return row_sum(rows if factors is None else rows_scaled(rows, factors))


def _weight_factors(
    cotangent: Tensor,
    x: Tensor,
    input_norm: Tensor | None,
    limit: float | None,
    gain: float,
    clip: LimitKind,
) -> Tensor | None:
    """The factors of the examples in the weight's gradient; None if all are 1.

    A proved limit never acts on what keeps to its proof. Rows that break it may be overwritten,
    in `cotangent` and in `x`: nothing has to be kept of them but the bound.
    """
    if limit is None:
        return times_shares(None, cotangent)
    if input_norm is None:
        input_norm = example_norm(x)
    kernels = None if _keeps_rows(clip) else _kernels_for(cotangent, x)
    if kernels is not None:
        kernels.bound_rows(cotangent, x, input_norm, gain, limit)
        return None
    bounds = gain * example_norm(cotangent) * input_norm
    _counted(clip, bounds > limit)
    looks = may_look_at(bounds) and not (torch.compiler.is_compiling() or transformed())
    if looks and bool((bounds <= limit).all()):
        return times_shares(None, cotangent)
    return times_shares(_factors(bounds, limit), cotangent)


def _adds_integers(cotangent: Tensor, limit: float | None) -> bool:
    """Whether a weight's gradient is a sum of integers; a CPU, which adds floats, need not ask."""
    known = _weights._KINDS.get(cotangent.device.type, "not tried")
    return known is not None and _weights.adds_integers(cotangent, limit)


def _counted(clip: LimitKind, outside: Tensor) -> None:
    """Count the rows above a limit that follows a quantile."""
    if clip.count is not None:
        clip.count.add(outside)


def _keeps_rows(clip: LimitKind) -> bool:
    """Whether honest rows have factors other than 1, and must not be overwritten for that."""
    return clip.by_design or has_shares()


def _summable(tensor: Tensor) -> Tensor:
    """What is added up over a batch, in float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _without_casts(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A compiler traces backward passes under the autocast of the forward pass."""
    if x.dtype != torch.bfloat16:
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


class _Linear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        input_norm: Tensor | None,
        weight_limit: float | None,
        bias_limit: float | None,
        clip: LimitKind,
    ) -> Tensor:
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, weight, bias, input_norm, ctx.weight_limit, ctx.bias_limit, ctx.clip = inputs
        # Detached: a gradient that is differentiated again must not lead to the weight.
        ctx.save_for_backward(x, weight.detach(), input_norm)
        ctx.has_bias = bias is not None

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        (cotangent,) = cotangents
        x, weight, input_norm = ctx.saved_tensors
        with _without_casts(x):
            to_input, to_weight, to_bias = None, None, None
            if ctx.needs_input_grad[0]:
                to_input = cotangent @ weight.to(x.dtype)
            limit = ctx.weight_limit
            integers = ctx.needs_input_grad[1] and _adds_integers(cotangent, limit)
            if integers:
                to_weight, outside = integer_linear_weight(
                    cotangent, x, limit=limit, shares=times_shares(None, cotangent)
                )
                _counted(ctx.clip, outside)
            rows, columns = _summable(cotangent), x if integers else _summable(x)
            if ctx.has_bias and ctx.needs_input_grad[2]:
                own = rows.flatten(1, -2).sum(dim=1) if rows.ndim > 2 else rows
                to_bias = _bounded_sum(own, ctx.bias_limit)
            if ctx.needs_input_grad[1] and not integers:
                factors = _weight_factors(
                    rows, columns, input_norm, ctx.weight_limit, 1.0, ctx.clip
                )
                to_weight = linear_weight(
                    rows, columns, factors, in_place=not _keeps_rows(ctx.clip)
                )
        return to_input, to_weight, to_bias, None, None, None, None


class _Convolution(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        kernel: Tensor,
        bias: Tensor | None,
        input_norm: Tensor | None,
        weight_limit: float | None,
        bias_limit: float | None,
        clip: LimitKind,
        gain: float,
        geometry: ConvolutionGeometry,
    ) -> Tensor:
        function = F.conv1d if x.ndim == 3 else F.conv2d
        shift = None if bias is None else bias.to(x.dtype)
        return function(x, kernel.to(x.dtype), shift, *geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, kernel, bias, input_norm, ctx.weight_limit, ctx.bias_limit = inputs[:6]
        ctx.clip, ctx.gain, ctx.geometry = inputs[6:]
        ctx.save_for_backward(x, kernel.detach(), input_norm)  # as for linear layers
        ctx.has_bias = bias is not None

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        (cotangent,) = cotangents
        x, kernel, input_norm = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        with _without_casts(x):
            to_input, to_kernel, to_bias = None, None, None
            if ctx.needs_input_grad[0]:
                to_input, _, _ = torch.ops.aten.convolution_backward(
                    cotangent, x, kernel.to(x.dtype), None, stride, padding, dilation, False,
                    [0] * len(stride), groups, [True, False, False],
                )  # fmt: skip
            limit = ctx.weight_limit
            integers = ctx.needs_input_grad[1] and _adds_integers(cotangent, limit)
            if integers:
                to_kernel, outside = integer_convolution_weight(
                    cotangent, x, kernel.shape[2:], ctx.geometry, limit=limit,
                    shares=times_shares(None, cotangent),
                )  # fmt: skip
                _counted(ctx.clip, outside)
            rows, inputs = _summable(cotangent), x if integers else _summable(x)
            if ctx.has_bias and ctx.needs_input_grad[2]:
                to_bias = _bounded_sum(rows.sum(dim=tuple(range(2, rows.ndim))), ctx.bias_limit)
            if ctx.needs_input_grad[1] and not integers:
                factors = _weight_factors(
                    rows, inputs, input_norm, ctx.weight_limit, ctx.gain, ctx.clip
                )
                to_kernel = convolution_weight(
                    rows, inputs, factors, kernel, ctx.geometry, in_place=not _keeps_rows(ctx.clip)
                )  # fmt: skip
        return to_input, to_kernel, to_bias, None, None, None, None, None, None


class _Embedding(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(tokens: Tensor, table: Tensor, limit: float, dtype: torch.dtype) -> Tensor:
        return F.embedding(tokens, table.to(dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        tokens, table, ctx.limit, _ = inputs
        ctx.save_for_backward(tokens)
        ctx.entries = table.shape[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        (cotangent,) = cotangents
        (tokens,) = ctx.saved_tensors
        root = math.sqrt(tokens.shape[1:].numel())
        rows = _summable(cotangent)
        factors = times_shares(_factors(root * example_norm(rows), ctx.limit), rows)
        rows = rows if factors is None else rows_scaled(rows, factors)
        wide = rows.to(torch.float64)
        gradient = torch.ops.aten.embedding_dense_backward(wide, tokens, ctx.entries, -1, False)
        return None, gradient, None, None


class _RowParameter(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(parameter: Tensor, rows: int, limit: float, dtype: torch.dtype) -> Tensor:
        return parameter.to(dtype).expand(rows, *parameter.shape).clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        _, _, ctx.limit, _ = inputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        return _bounded_sum(_summable(cotangents[0]), ctx.limit), None, None, None
