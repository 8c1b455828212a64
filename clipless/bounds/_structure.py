"""What a model's graph depends on, as something that can be compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from clipless.bounds._trace import is_leaf

_MODULE_INTERNALS = frozenset(vars(nn.Module()))
_PRIMITIVES = (bool, int, float, complex, str, bytes, type(None))
_DEPTH = 4


def structure_of(model: nn.Module, *, numbers: bool = False) -> tuple[Any, ...]:
    """Return what the graph depends on, to be compared: a change means that it is traced anew.

    Numbers with a fraction never change a leaf's shapes, and rules read them afresh each time; so
    a layer whose threshold moves is not traced again. With `numbers=True` they are included:
    what is returned then determines the bounds too.
    """
    return tuple(
        _module_structure(path, module, numbers)
        for path, module in model.named_modules(remove_duplicate=False)
    )


def _module_structure(path: str, module: nn.Module, numbers: bool) -> tuple[Any, ...]:
    leaf = is_leaf(module)
    return (
        path,
        id(module),
        type(module),
        type(module).forward,
        module.training and not leaf,
        tuple(
            (name, id(p), _shape(p), p.requires_grad)
            for name, p in module._parameters.items()
            if p is not None
        ),
        tuple(
            (name, _shape(b), leaf or b._version)  # rules read what they need of a leaf afresh
            for name, b in module._buffers.items()
            if b is not None
        ),
        sum(1 for _ in hooks_of(module)),
        tuple(
            (name, _frozen(value))
            for name, value in vars(module).items()
            if name not in _MODULE_INTERNALS
            and (numbers or not (leaf and isinstance(value, float)))
        ),
        () if leaf else _class_attributes(type(module)),
    )


def _shape(parameter: Tensor) -> Any:
    return None if nn.parameter.is_lazy(parameter) else parameter.shape


def _class_attributes(kind: type) -> tuple[Any, ...]:
    """Plain values on the user's own classes: a forward may branch on them."""
    return tuple(
        (base.__qualname__, name, _frozen(value))
        for base in kind.__mro__
        if not base.__module__.startswith(("torch.", "builtins", "clipless."))
        for name, value in vars(base).items()
        if not name.startswith("__") and isinstance(value, (*_PRIMITIVES, list, tuple, dict, set))
    )


def _frozen(value: Any, depth: int = 0) -> Any:
    """A value that changes whenever a forward could see `value` change; the rest by identity."""
    if isinstance(value, _PRIMITIVES):
        return (type(value), value)
    if isinstance(value, Tensor):
        return (id(value), value.shape, value.dtype, value._version)
    if depth == _DEPTH or isinstance(value, nn.Module | type) or callable(value):
        return id(value)
    if isinstance(value, list | tuple):
        return tuple(_frozen(part, depth + 1) for part in value)
    if isinstance(value, set | frozenset):
        return frozenset(_frozen(part, depth + 1) for part in value)
    if isinstance(value, Mapping):
        return tuple((_frozen(k, depth + 1), _frozen(v, depth + 1)) for k, v in value.items())
    if dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        return (id(value), *((n, _frozen(v, depth + 1)) for n, v in vars(value).items()))
    return id(value)


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks of a module that can change what it computes, except this library's own."""
    for table in (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    ):
        for hook in table.values():
            if not str(getattr(hook, "__module__", "")).startswith("clipless."):
                yield hook
