"""Symbolic tracing of models with torch.fx, and checks of what tracing cannot see.

The graph is traced symbolically with the library's layers and torch's modules as leaves; modules
written by the user are traced through, so residuals, concatenations and shared layers need no
special containers.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from clipless.bounds._refusal import (
    explain_trace_failure,
    innermost_own_line,
    refuse_altered_module,
    refuse_augmented_assignment,
    refuse_checkpointing,
    refuse_global_hooks,
    refuse_randomness,
    refuse_target,
)
from clipless.bounds._rule import find_rule, registered_types
from clipless.errors import UnsupportedOperationError
from clipless.kernels import TRACING_LOCK
from clipless.nn import ConstrainedModule

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_TRIES = 5
# Questions about a tensor whose answer does not depend on its entries.
_QUERIES: frozenset[Any] = frozenset(
    {Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.shape, Tensor.ndim, Tensor.dtype}
    | {Tensor.device}
)


def check_rules(model: nn.Module) -> tuple[fx.Graph, dict[str, Tensor]]:
    """Trace `model` and make sure that all its operations have rules; shapes are not looked at.

    Returns the graph, and the tensors that the model's code creates on the fly.
    """
    refuse_global_hooks()
    for path, module in model.named_modules():
        refuse_altered_module(path, module)
    drawn: list[str] = []
    for _ in range(_TRIES):  # another thread may have moved a generator meanwhile
        graph, constants, drawn = _traced(model)
        if not drawn:
            break
    refuse_randomness(drawn)
    for node in graph.nodes:
        _check_node(node, model)
    return graph, constants


def unsupported_operations(model: nn.Module) -> list[UnsupportedOperationError]:
    """Return a refusal for every module and operation of `model` that has no rule, in order.

    `check_rules` stops at the first. A model that cannot be traced at all has that one problem.
    """
    problems: list[UnsupportedOperationError] = []
    for path, module in model.named_modules():
        try:
            refuse_altered_module(path, module)
        except UnsupportedOperationError as error:
            problems.append(error)
    try:
        graph, _, drawn = _traced(model)
        refuse_randomness(drawn)
    except UnsupportedOperationError as error:
        return [*problems, error]
    for node in graph.nodes:
        try:
            _check_node(node, model)
        except UnsupportedOperationError as error:
            problems.append(error)
    return problems


def _traced(model: nn.Module) -> tuple[fx.Graph, dict[str, Tensor], list[str]]:
    """Return the graph, the tensors created on the fly, and what random numbers came from."""
    with TRACING_LOCK:
        before, generators = set(vars(model)), _generator_states()
        try:
            with _Draws() as draws:
                graph = _Tracer().trace(model)
        except Exception as error:
            raise explain_trace_failure(error) from error
        finally:
            # Tracing hangs constants on the model: take them off again, it is the user's.
            constants = {name: vars(model).pop(name) for name in set(vars(model)) - before}
    moved = (name for name, state in _generator_states().items() if state != generators[name])
    return graph, constants, sorted({*moved, *draws.operators})


def _generator_states() -> dict[str, Any]:
    """The states of Python's and numpy's generators that all code shares; torch's draws are noted.

    Tracing runs the user's code and no layer: what moves one of them is an own draw of a forward.
    """
    of_numpy = numpy.random.get_state(legacy=False)
    return {
        "random": random.getstate(),
        "numpy.random": json.dumps(of_numpy, default=lambda array: array.tolist()),
    }


class _Draws(TorchDispatchMode):
    """Notes torch's operators that draw numbers, from whatever generator and on any device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.operators.add(f"torch.{func.overloadpacket.__name__}")
        return func(*args, **(kwargs or {}))


class _Tracer(fx.Tracer):
    """Traces in one thread: what others call meanwhile, through torch's patches, is passed on."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        # Errors name the user's line. (torch's own record of it would load the compiler.)
        node = super().create_node(*args, **kwargs)
        refuse_checkpointing(sys._getframe(1))
        node.meta["line"] = innermost_own_line(sys._getframe(1))
        return node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_leaf(m)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


class _Proxy(fx.Proxy):
    """Refuses `x += y` and its kind, which Python would otherwise trace as `x = x + y`.

    On tensors they work in place, and every other name of the tensor changes as well.
    """

    def _refuse(self, other: Any) -> NoReturn:
        refuse_augmented_assignment(self.node)

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = _refuse
    __ipow__ = __imatmul__ = __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = _refuse

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        refuse_augmented_assignment(self.node)


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is judged by its rule (or refused) rather than traced through.

    Subclasses of layers are leaves too, so that their missing rule is noticed.
    """
    if isinstance(module, (ConstrainedModule, *registered_types())):
        return True
    layers = (
        base
        for base in type(module).__mro__
        if base.__module__.startswith("torch.nn") and base is not nn.Module
    )
    return any(base not in _CONTAINERS for base in layers)


def _check_node(node: fx.Node, model: nn.Module) -> None:
    """Refuse operations without a rule before anything is run."""
    if not node.op.startswith("call_"):
        return
    module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
    if find_rule(target_of(node, module)) is not None or is_query(node):
        return
    sizes = not any(_may_be_tensor(source) for source in node.all_input_nodes)
    if not (node.op == "call_function" and sizes):  # arithmetic of sizes needs no rule
        refuse_target(node, module)


def target_of(node: fx.Node, module: nn.Module | None) -> Any:
    """Return what a node calls: the type of its module, the function, or the tensor's method."""
    if module is not None:
        return type(module)
    return getattr(Tensor, str(node.target), None) if node.op == "call_method" else node.target


def _may_be_tensor(node: fx.Node) -> bool:
    """Whether a node could carry entries of an example (as opposed to sizes)."""
    if is_query(node):
        return False
    if node.op == "call_function" and node.all_input_nodes:
        return any(_may_be_tensor(source) for source in node.all_input_nodes)
    return True


def is_query(node: fx.Node) -> bool:
    """Whether a node asks a tensor for its shape, dtype or device."""
    if node.op == "call_function" and node.target is getattr:
        return getattr(Tensor, str(node.args[1]), None) in _QUERIES
    return node.op == "call_method" and target_of(node, None) in _QUERIES
