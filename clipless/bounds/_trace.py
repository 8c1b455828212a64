"""From a model to its graph: tracing, checks of what tracing cannot see, and shapes.

The graph is traced symbolically with the library's layers and torch's modules as leaves; modules
written by the user are traced through, so residuals, concatenations and shared layers need no
special containers. Shapes come from running the graph on weightless tensors with two batch sizes:
every tensor must have the batch as its first axis, whole, in both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from clipless.bounds._refusal import (
    explain_shapes,
    explain_trace_failure,
    refuse_altered_module,
    refuse_batch_axis,
    refuse_target,
)
from clipless.bounds._rule import find_rule, registered_types
from clipless.nn import ConstrainedModule, Embedding

# Two sizes, so that an axis that merely happens to have the size of the batch is found out.
_BATCH_SIZES = (2, 3)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_MODULE_INTERNALS = frozenset(vars(nn.Module()))
# Questions about a tensor whose answer does not depend on its entries.
_QUERIES = frozenset({"size", "dim", "shape", "ndim", "dtype", "device", "ndimension"})


@dataclasses.dataclass(frozen=True)
class BatchDependent:
    """A number that depends on the size of the batch: good for a shape, for nothing else."""

    def __repr__(self) -> str:
        return "a number that depends on the size of the batch"


@dataclasses.dataclass(frozen=True)
class TracedModel:
    """A model's graph with the shapes, without the batch axis, of every tensor in it."""

    graph: fx.Graph
    shapes: Mapping[fx.Node, tuple[tuple[int, ...], ...]]
    """For every node that yields tensors, the shape of each."""
    is_tuple: frozenset[fx.Node]
    """Nodes that yield several tensors."""
    values: Mapping[fx.Node, Any]
    """For every other node, its value: a constant, or `BatchDependent`."""
    constants: Mapping[str, Tensor]
    """Tensors that the model's code creates on the fly."""


def trace(model: nn.Module, input_shapes: Sequence[tuple[int, ...]]) -> TracedModel:
    """Trace `model` on examples of the given shapes, or refuse with the reason."""
    graph, constants = check_rules(model)
    wanted = sum(node.op == "placeholder" for node in graph.nodes)
    if wanted != len(input_shapes):
        raise ValueError(
            f"the model's forward takes {wanted} input(s), but input_shape names "
            f"{len(input_shapes)}: give one shape for each, such as ((3, 32, 32), (10,))"
        )
    shapes, is_tuple, values = _propagate(graph, model, constants, input_shapes)
    return TracedModel(graph, shapes, is_tuple, values, constants)


def check_rules(model: nn.Module) -> tuple[fx.Graph, dict[str, Tensor]]:
    """Trace `model` and make sure that all its operations have rules; shapes are not looked at."""
    for path, module in model.named_modules():
        refuse_altered_module(path, module)
    before = set(vars(model))
    tracer = _Tracer()
    try:
        graph = tracer.trace(model)
    except Exception as error:
        raise explain_trace_failure(error) from error
    finally:
        # Tracing hangs constants on the model: take them off again, it is the user's.
        constants = {name: vars(model).pop(name) for name in set(vars(model)) - before}
    for node in graph.nodes:
        _check_node(node, model)
    return graph, constants


class _Tracer(fx.Tracer):
    def __init__(self) -> None:
        super().__init__()
        self.record_stack_traces = True  # so that errors can name the user's line

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_leaf(m)


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
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        if find_rule(type(module)) is None:
            refuse_target(node, module)
    elif node.op == "call_method" and find_rule(node.target) is None:
        if node.target not in _QUERIES:
            refuse_target(node, None)
    elif node.op == "call_function" and find_rule(node.target) is None:
        query = node.target is getattr and node.args[1] in _QUERIES
        arithmetic = not any(_may_be_tensor(source) for source in node.all_input_nodes)
        if not query and not arithmetic:
            refuse_target(node, None)


def _may_be_tensor(node: fx.Node) -> bool:
    """Whether a node could carry entries of an example (as opposed to sizes)."""
    if node.op == "call_method" and node.target in _QUERIES:
        return False
    if node.op == "call_function" and node.target is getattr and node.args[1] in _QUERIES:
        return False
    if node.op == "call_function" and node.all_input_nodes:
        return any(_may_be_tensor(source) for source in node.all_input_nodes)
    return True


def _propagate(
    graph: fx.Graph,
    model: nn.Module,
    constants: Mapping[str, Tensor],
    input_shapes: Sequence[tuple[int, ...]],
) -> tuple[dict[fx.Node, tuple[tuple[int, ...], ...]], frozenset[fx.Node], dict[fx.Node, Any]]:
    runs = [_run(graph, model, constants, input_shapes, size) for size in _BATCH_SIZES]
    shapes: dict[fx.Node, tuple[tuple[int, ...], ...]] = {}
    values: dict[fx.Node, Any] = {}
    several = set()
    for node in graph.nodes:
        if node.op in ("get_attr", "output"):
            continue
        results = [run[node] for run in runs]
        if isinstance(results[0], (tuple, list)) and any(
            isinstance(part, Tensor) for part in results[0]
        ):
            several.add(node)
        elif not isinstance(results[0], Tensor):
            values[node] = results[0] if results[0] == results[1] else BatchDependent()
            continue
        parts = [tuple(r) if node in several else (r,) for r in results]
        shapes[node] = tuple(tuple(part.shape[1:]) for part in parts[0])
        for run_parts, size in zip(parts, _BATCH_SIZES, strict=True):
            for part, expected in zip(run_parts, shapes[node], strict=True):
                if part.ndim == 0 or part.shape[0] != size or tuple(part.shape[1:]) != expected:
                    refuse_batch_axis(node)
    return shapes, frozenset(several), values


def _run(
    graph: fx.Graph,
    model: nn.Module,
    constants: Mapping[str, Tensor],
    input_shapes: Sequence[tuple[int, ...]],
    batch: int,
) -> dict[fx.Node, Any]:
    """Run the graph on tensors that have shapes and dtypes but no entries."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    results: dict[fx.Node, Any] = {}
    shapes = iter(input_shapes)
    with torch.device("meta"), torch.no_grad():
        for node in graph.nodes:
            if node.op == "placeholder":
                tokens = node.users and all(_is_embedding(user, model) for user in node.users)
                shape = (batch, *next(shapes))
                results[node] = torch.empty(shape, dtype=torch.long if tokens else dtype)
            elif node.op == "get_attr":
                results[node] = fetch(str(node.target), model, constants).to("meta")
            elif node.op != "output":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), results.__getitem__)
                try:
                    results[node] = _call(node, model, args, kwargs)
                except Exception as error:
                    raise explain_shapes(node, error, results) from error
    return results


def _call(node: fx.Node, model: nn.Module, args: Any, kwargs: Any) -> Any:
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        entryless = {name: tensor.to("meta") for name, tensor in held.items()}
        return torch.func.functional_call(module, entryless, args, kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _is_embedding(node: fx.Node, model: nn.Module) -> bool:
    return node.op == "call_module" and type(model.get_submodule(str(node.target))) is Embedding


def fetch(path: str, model: nn.Module, constants: Mapping[str, Tensor]) -> Any:
    """Return the tensor that a `get_attr` node names."""
    if path in constants:
        return constants[path]
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)


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
        module.training and not leaf,
        tuple(
            (name, id(p), p.shape, p.requires_grad)
            for name, p in module._parameters.items()
            if p is not None
        ),
        tuple((name, b.shape) for name, b in module._buffers.items() if b is not None),
        sum(1 for _ in hooks_of(module)),
        tuple(
            (name, _frozen(value))
            for name, value in vars(module).items()
            if name not in _MODULE_INTERNALS
            and (numbers or not (leaf and isinstance(value, float)))
        ),
    )


def _frozen(value: Any) -> Any:
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return (type(value), value)
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(part) for part in value)
    if isinstance(value, Mapping):
        return tuple((_frozen(k), _frozen(v)) for k, v in value.items())
    if isinstance(value, Tensor):
        return (value.shape, value.dtype)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tuple((f.name, _frozen(getattr(value, f.name))) for f in dataclasses.fields(value))
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
