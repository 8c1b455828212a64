"""Detection of changes to a model's modules, parameters, hooks and weights; no part of a proof.

What changes inside of an object (a list, a global) goes unnoticed here. In private training it
costs accuracy at most, since gradients are held to their planned bounds where they are made.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from clipless.bounds._refusal import GLOBAL_HOOKS
from clipless.bounds._rule import _RULES
from clipless.bounds._trace import is_leaf
from clipless.kernels import may_look_at

_TABLES = (
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_values = methodcaller("values")


class ModelSnapshot:
    """The objects that a model consisted of at one time, kept alive so that no `id` is reused."""

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
        layers = {id(vars(module)) for module in self._modules if is_leaf(module)}
        self._is_number = [
            id(table) in layers and isinstance(value, float)
            for table in self._filled
            for value in table.values()
        ]
        self._parameters = _held(self._attributes, "_parameters")
        self._facts = list(map(_facts, self._parameters))
        self.tensors = [*self._parameters, *_held(self._attributes, "_buffers")]
        """The model's parameters and buffers."""

    def changed(self, *, numbers: bool = True) -> bool:
        """Return whether any object of the model has been replaced, added or removed.

        A hook on all modules at once is one that was added.
        Without `numbers`, those with a fraction that a layer holds may have moved: a graph does not
        depend on them, and rules read them afresh.
        """
        if any(GLOBAL_HOOKS) or self._rules != len(_RULES):
            return True
        if list(map(type, self._modules)) != self._kinds:
            return True
        if not all(map(is_, map(vars, self._modules), self._attributes)):
            return True
        if any(kind.forward is not forward for kind, forward in self._forwards):
            return True
        if sum(map(len, self._tables)) != self._entries:
            return True
        if list(map(list, self._filled)) != self._names:
            return True
        if list(map(_facts, self._parameters)) != self._facts:
            return True
        now = chain.from_iterable(map(_values, self._filled))
        if numbers:
            return not all(map(is_, now, self._values))
        each = zip(now, self._values, self._is_number, strict=True)
        return any(a is not b and not (free and isinstance(a, float)) for a, b, free in each)


def _held(attributes: list[dict[str, Any]], table: str) -> list[Tensor]:
    return [each for own in attributes for each in own[table].values() if each is not None]


def _facts(parameter: Tensor) -> tuple[Any, ...]:
    lazy = nn.parameter.is_lazy(parameter)
    return (None if lazy else parameter.shape, parameter.requires_grad)


class WeightSeal:
    """Notices edits of parameters, cheaply enough for every step.

    Parameters are recognised by their version counters, addresses and norms. An edit through
    `.data` that changes neither the address nor the norm goes unnoticed; so does, where reading a
    value would stall the device, any edit through `.data` that keeps the address.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self.renew()

    def renew(self) -> None:
        """Accept the parameters as they are now."""
        self._readable = all(map(may_look_at, self._parameters))
        self._versions, self._norms = self._counters(), self._norms_now()

    def touched(self) -> bool:
        """Whether the counters have moved since the last `renew`: a look at no value."""
        return self._counters() != self._versions

    def broken(self) -> bool:
        """Whether parameters have changed since the last `renew`."""
        if self.touched():
            return True
        norms = self._norms_now()
        return norms is not None and self._norms is not None and not torch.equal(norms, self._norms)

    def _counters(self) -> list[tuple[int, int]]:
        return [(p._version, p.data_ptr()) for p in self._parameters]

    @torch.no_grad()
    def _norms_now(self) -> Tensor | None:
        if not self._readable or not self._parameters:
            return None
        return torch.stack(torch._foreach_norm(self._parameters))
