"""The table of layers with thresholds: for a module's exact type, its forward pass in primitives.

A handler computes what the module's `forward` does, and uses each trainable parameter by
`LayerPass.use` alone. Adding a layer is one function under `@enforces(TheType)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipless.errors import UnsupportedOperationError
from clipless.kernels import (
    Threshold,
    enforced_convolution,
    enforced_embedding,
    enforced_linear,
    enforced_scale_shift,
)
from clipless.privacy.enforced._passes import LayerPass

Handler = Callable[..., Any]
"""`handler(module, layer_pass, exact, *inputs, **named)` returns what the module returns."""
Own = Sequence[Tensor | None]
Thresholds = Sequence[Threshold | None]

_HANDLERS: dict[type[nn.Module] | str, Handler] = {}


def enforces(*kinds: type[nn.Module] | str) -> Callable[[Handler], Handler]:
    """Register the handler of module types; of other libraries, by `"package.module.Name"`."""

    def decorate(handler: Handler) -> Handler:
        for kind in kinds:
            _HANDLERS[kind] = handler
        return handler

    return decorate


def handler_of(module: nn.Module) -> Handler | None:
    """Return the handler of a module's exact type; a subclass may compute anything."""
    kind = type(module)
    return _HANDLERS.get(kind) or _HANDLERS.get(f"{kind.__module__}.{kind.__qualname__}")


def handled_types() -> tuple[type[nn.Module], ...]:
    """The types in the table."""
    return tuple(kind for kind in _HANDLERS if isinstance(kind, type))


def use_linear(
    of: LayerPass, x: Tensor, weight: Tensor, bias: Tensor | None, exact: bool | None
) -> Tensor:
    """`x W^T + b`; a frozen weight passes gradients on to x, and gets none."""

    def bounded(x: Tensor, own: Own, limits: Thresholds) -> Tensor:
        matrix, shift = own
        if matrix is None:
            raise _absent("weight")
        return enforced_linear(x, matrix, shift, (limits[0], limits[1]), exact=exact)

    return of.use([weight, bias], x, F.linear, bounded)


def use_scale_shift(
    of: LayerPass, x: Tensor, scale: Tensor | None, shift: Tensor | None, *, axis: int | None
) -> Tensor:
    """`x * scale + shift` along the last axes, or from `axis` on."""
    some = shift if scale is None else scale
    if some is None:
        return x

    def plain(x: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
        behind = 0 if axis is None else x.ndim - axis - some.ndim
        shape = (*some.shape, *[1] * behind)
        x = x if scale is None else x * scale.view(shape)
        return x if shift is None else x + shift.view(shape)

    def bounded(x: Tensor, own: Own, limits: Thresholds) -> Tensor:
        begin = x.ndim - some.ndim if axis is None else axis
        return enforced_scale_shift(x, own[0], own[1], (limits[0], limits[1]), axis=begin)

    return of.use([scale, shift], x, plain, bounded, by_position=axis is None)


def _absent(name: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(f"the layer's {name} is not there")


@enforces(nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
def linear(module: nn.Linear, of: LayerPass, exact: bool | None, input: Tensor) -> Tensor:
    """`x W^T + b` on any number of positions."""
    return use_linear(of, input, module.weight, module.bias, exact)


@enforces("transformers.pytorch_utils.Conv1D")
def transposed_linear(module: Any, of: LayerPass, exact: bool | None, x: Tensor) -> Tensor:
    """`x W + b`, as in GPT-2: the norm of the weight's gradient is that of its transpose."""

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight.mT, bias)

    def bounded(x: Tensor, own: Own, limits: Thresholds) -> Tensor:
        weight, bias = own
        if weight is None:
            raise _absent("weight")
        return enforced_linear(x, weight.mT, bias, (limits[0], limits[1]), exact=exact)

    return of.use([module.weight, module.bias], x, plain, bounded)


@enforces(
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
)
def convolution(
    module: Any, of: LayerPass, exact: bool | None, input: Tensor,
    output_size: list[int] | None = None,
) -> Tensor:  # fmt: skip
    """Convolutions; padding that is no zeros is laid around the image before."""
    count = len(module.kernel_size)
    if input.ndim != count + 2:
        raise UnsupportedOperationError(
            f"{type(module).__name__} was called on one image of shape {tuple(input.shape)}: give "
            "it a batch, with the examples on the first axis."
        )
    padding = module.padding
    transposed: list[int] | None = None
    if module.transposed:
        transposed = list(
            module._output_padding(
                input, output_size, module.stride, padding, module.kernel_size, count,
                module.dilation,
            )
        )  # fmt: skip
    elif module.padding_mode != "zeros":
        input = padded(input, module._reversed_padding_repeated_twice, module.padding_mode)
        padding = [0] * count
    elif padding == "same":
        total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        if any(each % 2 for each in total):
            input = F.pad(input, module._reversed_padding_repeated_twice)
            padding = [0] * count
        else:
            padding = [each // 2 for each in total]
    elif padding == "valid":
        padding = [0] * count
    geometry = (list(module.stride), list(padding), list(module.dilation), module.groups)

    def plain(x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        stride, around, dilation, groups = geometry
        found: Tensor = torch.convolution(
            x, kernel, bias, stride, around, dilation, transposed is not None,
            transposed or [0] * count, groups,
        )  # fmt: skip
        return found

    def bounded(x: Tensor, own: Own, limits: Thresholds) -> Tensor:
        kernel, bias = own
        if kernel is None:
            raise _absent("weight")
        return enforced_convolution(
            x, kernel, bias, (limits[0], limits[1]), geometry, transposed=transposed, exact=exact
        )

    return of.use([module.weight, module.bias], input, plain, bounded, by_position=False)


def padded(x: Tensor, sizes: Sequence[int], mode: str) -> Tensor:
    """`F.pad`; around in a circle from parts laid side by side, which a trace can follow."""
    if mode != "circular":
        return F.pad(x, list(sizes), mode=mode)
    for place in range(len(sizes) // 2):
        before, after = sizes[2 * place : 2 * place + 2]
        axis = x.ndim - 1 - place
        size = x.shape[axis]
        parts = [x.narrow(axis, size - before, before), x, x.narrow(axis, 0, after)]
        x = torch.cat([each for each in parts if each.shape[axis]], dim=axis)
    return x


def use_embedding(of: LayerPass, module: Any, tokens: Tensor, exact: bool | None) -> Tensor:
    """Rows of a table."""
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise UnsupportedOperationError(
            f"{type(module).__name__} with max_norm, scale_grad_by_freq or sparse changes the "
            "table, or scales gradients by what the whole batch holds. Leave these options out."
        )
    padding = -1 if module.padding_idx is None else module.padding_idx

    def plain(tokens: Tensor, table: Tensor) -> Tensor:
        return F.embedding(tokens, table, module.padding_idx)

    def bounded(tokens: Tensor, own: Own, limits: Thresholds) -> Tensor:
        (table,) = own
        if table is None:
            raise _absent("weight")
        return enforced_embedding(
            tokens, table, limits[0], padding=padding, exact=exact, dtype=module.weight.dtype
        )

    return of.use([module.weight], tokens, plain, bounded)


@enforces(nn.Embedding)
def embedding(module: nn.Embedding, of: LayerPass, exact: bool | None, input: Tensor) -> Tensor:
    """Rows of a table, one for every token."""
    return use_embedding(of, module, input, exact)


@enforces(nn.EmbeddingBag)
def embedding_bag(
    module: nn.EmbeddingBag, of: LayerPass, exact: bool | None, input: Tensor,
    offsets: Tensor | None = None, per_sample_weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Sums or means of a table's rows, over (batch, tokens)."""
    if offsets is not None or input.ndim != 2 or module.mode == "max":
        raise UnsupportedOperationError(
            "EmbeddingBag is bounded for tokens of shape (batch, tokens), without offsets, with "
            "mode 'sum' or 'mean': offsets lay all examples on one axis."
        )
    rows = use_embedding(of, module, input, exact)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if module.padding_idx is None:
        return rows.sum(dim=1) if module.mode == "sum" else rows.mean(dim=1)
    kept = (input != module.padding_idx).unsqueeze(-1)
    total = torch.where(kept, rows, 0.0).sum(dim=1)
    return total if module.mode == "sum" else total / kept.sum(dim=1).clamp(min=1)


@enforces(nn.LayerNorm)
def layer_norm(module: nn.LayerNorm, of: LayerPass, exact: bool | None, input: Tensor) -> Tensor:
    """Normalised positions, then scale and shift."""
    plain = F.layer_norm(input, list(module.normalized_shape), None, None, module.eps)
    return use_scale_shift(of, plain, module.weight, module.bias, axis=None)


@enforces(nn.RMSNorm)
def rms_norm(module: nn.RMSNorm, of: LayerPass, exact: bool | None, x: Tensor) -> Tensor:
    """Positions divided by their root mean square, then scale."""
    plain = F.rms_norm(x, list(module.normalized_shape), None, module.eps)
    return use_scale_shift(of, plain, module.weight, None, axis=None)


@enforces(nn.GroupNorm)
def group_norm(module: nn.GroupNorm, of: LayerPass, exact: bool | None, input: Tensor) -> Tensor:
    """Normalised groups of channels, then scale and shift."""
    plain = F.group_norm(input, module.num_groups, None, None, module.eps)
    return use_scale_shift(of, plain, module.weight, module.bias, axis=1)


@enforces(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(module: Any, of: LayerPass, exact: bool | None, input: Tensor) -> Tensor:
    """Normalised channels, then scale and shift."""
    if module.track_running_stats:
        raise UnsupportedOperationError(
            f"{type(module).__name__} with track_running_stats=True keeps statistics of the batch. "
            "Leave the option out."
        )
    if input.ndim == module._get_no_batch_dim():
        raise UnsupportedOperationError(f"{type(module).__name__} was called on one example")
    plain = F.instance_norm(input, eps=module.eps)
    return use_scale_shift(of, plain, module.weight, module.bias, axis=1)


@enforces(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def frozen_batch_norm(module: Any, of: LayerPass, exact: bool | None, input: Tensor) -> Tensor:
    """Known statistics, then scale and shift: in evaluation mode alone."""
    if module.training or module.running_mean is None:
        raise UnsupportedOperationError(
            f"{type(module).__name__} normalises over the batch, which mixes examples. Replace it "
            "by torch.nn.GroupNorm, or call eval() on it after model.train()."
        )
    plain = F.batch_norm(input, module.running_mean, module.running_var, eps=module.eps)
    return use_scale_shift(of, plain, module.weight, module.bias, axis=1)
