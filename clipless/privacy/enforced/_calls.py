"""Stand-ins for a model's layers during a forward pass with thresholds."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from clipless.bounds import without_shortcuts
from clipless.privacy.enforced._passes import LayerPass
from clipless.privacy.enforced.layers import _attention, _ours, _recurrent
from clipless.privacy.enforced.layers._table import Handler, handler_of

TABLE_FILES = (_attention, _ours, _recurrent)
"""The files beside `_table` whose layers are in the table."""


class _LayerCall:
    """The forward method of one layer, as long as a pass with thresholds runs."""

    def __init__(
        self, module: nn.Module, handler: Handler, of: LayerPass, exact: bool | None
    ) -> None:
        self._module, self._handler, self._of, self._exact = module, handler, of, exact

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self._handler(self._module, self._of, self._exact, *inputs, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The forward method of a copy of the layer, which is ordinary."""
        return types.MethodType(type(self._module).forward, memo[id(self._module)])


def layers_with_thresholds(
    model: nn.Module,
) -> tuple[list[tuple[nn.Module, Handler]], list[nn.Module]]:
    """Return the layers of the table that train, and the modules with parameters of their own."""
    handled: list[tuple[nn.Module, Handler]] = []
    alone: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside:
            continue
        handler = handler_of(module)
        trains = any(p.requires_grad for p in module.parameters(recurse=handler is not None))
        if not trains:
            continue
        if handler is None:
            alone.append(module)
        else:
            handled.append((module, handler))
            inside |= {id(each) for each in module.modules()}
    return handled, alone


class StandIns:
    """What stands in for a model's layers, and for parameters that stand alone, during a pass."""

    def __init__(self, model: nn.Module, exact: bool | None) -> None:
        self._exact = exact
        self._handled, self._alone = layers_with_thresholds(model)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let the layers work for passes, one after the other: each is begun by `begin`."""
        try:
            with without_shortcuts():
                yield
        finally:
            for module, _ in self._handled:
                vars(module).pop("forward", None)
            for module in self._alone:
                for name in module._parameters:
                    vars(module).pop(name, None)

    def begin(self, of: LayerPass) -> None:
        """Let the layers work for a pass from here on."""
        for module, handler in self._handled:
            vars(module)["forward"] = _LayerCall(module, handler, of, self._exact)
        for module in self._alone:
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in of.names:
                    vars(module)[name] = of.copies(parameter)
