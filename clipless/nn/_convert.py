"""`convert`: the Lipschitz twin of an ordinary network, where one exists."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from clipless.nn._activation import GroupSort
from clipless.nn._conv import SpectralConv1d, SpectralConv2d
from clipless.nn._input import BoundedInput
from clipless.nn._linear import SpectralLinear
from clipless.nn._pooling import (
    ScaledAvgPool1d,
    ScaledAvgPool2d,
    ScaledGlobalAvgPool1d,
    ScaledGlobalAvgPool2d,
)
from clipless.nn._standardize import GroupNormalize


@dataclass(frozen=True)
class Conversion:
    """The Lipschitz twin of a network, and what was done for it."""

    model: nn.Module
    """A copy; the network itself is unchanged."""
    changes: tuple[str, ...]
    """What replaced what, by path."""
    obstacles: tuple[str, ...]
    """Layers that have no twin, with what to do; bounds are proved only if there are none."""


class _NoTwinError(Exception):
    """A layer has no Lipschitz twin."""


def convert(model: nn.Module, *, input_norm: float, norm_floor: float = 1.0) -> Conversion:
    """Return a network's Lipschitz twin, for those who want certificates and proved bounds.

    Linear layers and convolutions keep their shape, with weights projected to spectral norm one;
    biases are left out, since they cost sensitivity. ReLU and its kind become GroupSort, which
    needs an even number of features; average pools are scaled to Lipschitz constant one;
    GroupNorm divides by its deviation or `norm_floor`, whichever is larger, and loses its scale
    and shift. An input guard of norm `input_norm` comes first. Modules with a `forward` of their
    own keep it: what it does between layers is left to `clipless.sensitivity` to judge.

    Example:
        >>> plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> twin = convert(plain, input_norm=1.0)
        >>> twin.obstacles, type(twin.model[1][0]).__name__
        ((), 'SpectralLinear')
    """
    twin = copy.deepcopy(model)
    changes: list[str] = []
    obstacles: list[str] = []
    known: dict[int, nn.Module] = {}

    def twin_of(module: nn.Module, path: str) -> nn.Module:
        if id(module) not in known:
            try:
                known[id(module)] = _twin(module, norm_floor)
            except _NoTwinError as error:
                obstacles.append(f"{path or 'the model'} ({type(module).__name__}): {error}")
                known[id(module)] = module
            made = known[id(module)]
            if made is not module:
                changes.append(f"{path or 'the model'}: {type(module).__name__} -> {made}")
        return known[id(module)]

    def visit(parent: nn.Module, prefix: str) -> None:
        for name, child in parent._modules.items():  # a layer that is there twice, twice
            if child is None:
                continue
            path = f"{prefix}{name}"
            if _is_leaf(child):
                parent._modules[name] = twin_of(child, path)
            else:
                visit(child, f"{path}.")
                own = [key for key, each in child._parameters.items() if each is not None]
                if own:
                    obstacles.append(
                        f"{path} ({type(child).__name__}): parameters of its own "
                        f"({', '.join(own)}) have no constraint. Put them into layers."
                    )

    if _is_leaf(twin):
        twin = twin_of(twin, "")
    else:
        visit(twin, "")
    guard = BoundedInput(input_norm)
    changes.insert(0, f"before the model: {guard}")
    return Conversion(nn.Sequential(guard, twin), tuple(changes), tuple(obstacles))


def _is_leaf(module: nn.Module) -> bool:
    own = type(module).__module__.startswith(("torch.nn.modules", "clipless.nn"))
    return own and not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)


_AS_THEY_ARE = (
    nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.MaxPool1d,
    nn.MaxPool2d, nn.Tanh, nn.Sigmoid,
)  # fmt: skip
_SORTED = (nn.ReLU, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.ELU, nn.ReLU6, nn.Mish, nn.Hardswish)
_REASONS: dict[type[nn.Module], str] = {
    nn.modules.batchnorm._NormBase: "statistics of the batch mix examples. Use GroupNorm.",
    nn.LayerNorm: "dividing by a deviation has no Lipschitz constant. Use GroupNorm.",
    nn.MultiheadAttention: "attention has no Lipschitz constant. Train it with bounds='enforced'.",
    nn.Embedding: "use clipless.nn.Embedding, whose rows are bounded.",
}


def _twin(module: nn.Module, floor: float) -> nn.Module:
    """The Lipschitz counterpart of one layer."""
    if isinstance(module, _AS_THEY_ARE) or type(module).__module__.startswith("clipless.nn"):
        return module
    if isinstance(module, _SORTED):
        return GroupSort(2)
    if type(module) is nn.Linear:
        like: dict[str, Any] = {"device": module.weight.device, "dtype": module.weight.dtype}
        return _with_weight(
            SpectralLinear(module.in_features, module.out_features, **like), module.weight
        )
    if type(module) in (nn.Conv1d, nn.Conv2d):
        return _convolution(module)
    if type(module) is nn.GroupNorm:
        return GroupNormalize(module.num_groups, floor=floor)
    if type(module) in (nn.AvgPool1d, nn.AvgPool2d):
        return _average(module)
    if type(module) in (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d):
        return _global_average(module)
    for kind, reason in _REASONS.items():
        if isinstance(module, kind):
            raise _NoTwinError(reason)
    raise _NoTwinError("it has no Lipschitz twin. Train it with bounds='enforced', or replace it.")


def _with_weight(twin: Any, weight: nn.Parameter) -> nn.Module:
    with torch.no_grad():
        twin.weight.copy_(weight)
    twin.weight.requires_grad_(weight.requires_grad)
    twin.project()
    module: nn.Module = twin
    return module


def _convolution(module: Any) -> nn.Module:
    if module.padding_mode not in ("zeros", "circular"):
        raise _NoTwinError("padding that repeats pixels breaks its bound. Pad with zeros.")
    kind = SpectralConv1d if isinstance(module, nn.Conv1d) else SpectralConv2d
    try:
        twin = kind(
            module.in_channels, module.out_channels, module.kernel_size, module.stride,
            module.padding, module.dilation, module.groups, padding_mode=module.padding_mode,
            device=module.weight.device, dtype=module.weight.dtype,
        )  # fmt: skip
    except ValueError as error:
        raise _NoTwinError(str(error)) from error
    return _with_weight(twin, module.weight)


def _average(module: Any) -> nn.Module:
    if module.ceil_mode or not module.count_include_pad:
        raise _NoTwinError("use it with count_include_pad=True and ceil_mode=False.")
    kind = ScaledAvgPool1d if isinstance(module, nn.AvgPool1d) else ScaledAvgPool2d
    return kind(module.kernel_size, module.stride, module.padding)


def _global_average(module: Any) -> nn.Module:
    size = module.output_size
    if set(size if isinstance(size, tuple) else (size,)) != {1}:
        raise _NoTwinError("it averages to more than one position. Use AvgPool with fixed windows.")
    one = isinstance(module, nn.AdaptiveAvgPool1d)
    pool = ScaledGlobalAvgPool1d() if one else ScaledGlobalAvgPool2d()
    return nn.Sequential(pool, nn.Unflatten(1, (-1, *[1] * (1 if one else 2))))
