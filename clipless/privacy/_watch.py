"""Is the model still what its bounds were proved for? Asked twice in every step, so asked cheaply.

Python has no version counters for attributes, so all of them are looked at; but as long as each
still is the very object that it was, nothing needs to be described and compared anew.
"""

from __future__ import annotations

from itertools import chain
from operator import is_, methodcaller
from typing import Any

from torch import Tensor, nn

from clipless.bounds._rule import _RULES
from clipless.bounds._structure import _PRIMITIVES, _class_attributes, _frozen, structure_of
from clipless.bounds._trace import is_leaf

_INTERNALS = frozenset(vars(nn.Module()))
_TABLES = (
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_KNOWN = ("torch.", "builtins", "clipless.")
_values = methodcaller("values")


class ModelWatch:
    """Follows the structure of a model.

    `structure()` equals `structure_of(model, numbers=True)` at any time, and is the very same
    object for as long as nothing has changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._structure: tuple[Any, ...] = ()
        self._look_closely()

    def structure(self) -> tuple[Any, ...]:
        """What the model's bounds depend on, to be compared."""
        if self._seen.changed():
            self._look_closely()
        return self._structure

    def parts(self) -> list[object]:
        """One object, and another one whenever anything about the model has changed."""
        return [self._seen]

    def tensors(self) -> list[Tensor]:
        """The model's parameters and buffers, as of the last look at its structure."""
        return self._seen.tensors

    def _look_closely(self) -> None:
        structure = structure_of(self._model, numbers=True)
        if structure != self._structure:
            self._structure = structure
        self._seen = _Snapshot(self._model)


class _Snapshot:
    """All that a model consisted of at one time. It keeps what it saw, so that no `id` returns."""

    def __init__(self, model: nn.Module) -> None:
        self._rules = len(_RULES)
        self._modules = list(model.modules())
        self._kinds: list[Any] = list(map(type, self._modules))
        self._forwards = [(kind, kind.forward) for kind in set(self._kinds)]
        self._attributes = list(map(vars, self._modules))
        tables = [own[name] for own in self._attributes for name in _TABLES]
        self._tables, self._entries = tables, sum(map(len, tables))
        self._filled = [*self._attributes, *(table for table in tables if table)]
        self._names = list(map(list, self._filled))
        self._values = [value for table in self._filled for value in table.values()]
        parameters = (p for m in self._modules for p in m._parameters.values() if p is not None)
        self._parameters = list(parameters)
        self._facts = list(map(_facts, self._parameters))
        # Rules read afresh what a buffer of a leaf holds.
        self._leaves = list(map(is_leaf, self._modules))
        self._buffers = [
            (buffer, leaf)
            for module, leaf in zip(self._modules, self._leaves, strict=True)
            for buffer in module._buffers.values()
            if buffer is not None
        ]
        self._contents = [_contents(*each) for each in self._buffers]
        self.tensors = [*self._parameters, *(buffer for buffer, _ in self._buffers)]
        # Lists, tensors and other things that can change and stay the object they are.
        self._inner = [
            (value, _frozen(value))
            for own in self._attributes
            for name, value in own.items()
            if name not in _INTERNALS and not _is_fixed(value)
        ]
        self._classes = [
            (kind, _class_attributes(kind))
            for kind, leaf in set(zip(self._kinds, self._leaves, strict=True))
            if not leaf and not all(base.__module__.startswith(_KNOWN) for base in kind.__mro__)
        ]

    def changed(self) -> bool:
        """Whether anything is no longer what it was."""
        if self._rules != len(_RULES) or list(map(type, self._modules)) != self._kinds:
            return True
        if not all(map(is_, map(vars, self._modules), self._attributes)):
            return True
        if any(kind.forward is not forward for kind, forward in self._forwards):
            return True
        if sum(map(len, self._tables)) != self._entries:
            return True
        if list(map(list, self._filled)) != self._names:
            return True
        return (
            not all(map(is_, chain.from_iterable(map(_values, self._filled)), self._values))
            or list(map(_facts, self._parameters)) != self._facts
            or [_contents(*each) for each in self._buffers] != self._contents
            or any(_frozen(value) != seen for value, seen in self._inner)
            or any(_class_attributes(kind) != seen for kind, seen in self._classes)
        )


def _facts(parameter: Tensor) -> tuple[Any, ...]:
    lazy = nn.parameter.is_lazy(parameter)
    return (None if lazy else parameter.shape, parameter.requires_grad)


def _contents(buffer: Tensor, leaf: bool) -> tuple[Any, ...]:
    return (buffer.shape, leaf or buffer._version)


def _is_fixed(value: Any) -> bool:
    """Whether a value cannot change, or nobody looks into it."""
    if isinstance(value, Tensor):
        return False
    if isinstance(value, (*_PRIMITIVES, nn.Module, type)) or callable(value):
        return True
    return type(value) is tuple and all(map(_is_fixed, value))
