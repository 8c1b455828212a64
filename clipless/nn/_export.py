"""Export to plain torch, so that trained models run where this library is not installed."""

from __future__ import annotations

import copy

from torch import fx, nn

_PACKAGE = __name__.split(".")[0]


def to_torch(model: nn.Module) -> nn.Module:
    """Return a copy of `model` made of torch alone, with identical outputs.

    Linear, convolution and embedding layers become `nn.Linear`, `nn.Conv1d`, `nn.Conv2d` and
    `nn.Embedding`; layers that torch does not know become small `torch.fx.GraphModule`s of torch
    functions, which can be saved, scripted or exported without this library. Your own modules are
    copied with their children exported. Shared layers stay shared. The original is untouched.

    Example:
        >>> to_torch(clipless.nn.SpectralLinear(3, 2))
        Linear(in_features=3, out_features=2, bias=False)
    """
    return _export(copy.deepcopy(model), {})


def _export(module: nn.Module, done: dict[nn.Module, nn.Module]) -> nn.Module:
    if module in done:
        return done[module]
    for name, child in list(module._modules.items()):
        if child is not None:
            module._modules[name] = _export(child, done)
    exported = module
    if type(module).__module__.split(".")[0] == _PACKAGE:
        exported = _plain(module)
    done[module] = exported
    return exported


def _plain(module: nn.Module) -> nn.Module:
    """Return what replaces one layer of this library, whose children are exported already."""
    if hasattr(module, "to_torch"):
        plain: nn.Module = module.to_torch()  # type: ignore[operator]
        return plain.train(module.training)
    graph = _OneLevelTracer().trace(module)
    for node in graph.nodes:
        node.type = None  # an annotation kept as text would not survive saving
    graph._tracer_cls = None  # else the saved module would ask for this library's tracer
    traced = fx.GraphModule(module, graph, class_name=type(module).__name__)
    traced.training = module.training
    return traced


class _OneLevelTracer(fx.Tracer):
    """Trace a module's own code and keep its children as they are."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True
