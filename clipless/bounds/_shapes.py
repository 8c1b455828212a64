"""Shapes of a traced model, and checks that the batch stays the first axis, rows apart.

The graph is run on a few random examples, then each of its operations on all but the last of them:
every tensor must have the batch as its first axis, whole, in both, and the rows that stayed must
have the results that they had. Numbers that come from the size of the batch are followed: they may
shape a tensor and do nothing else. Last, model and graph are run on the same examples, and must
agree in values and gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from clipless.bounds._refusal import refuse_batch_axis, refuse_mixed_rows
from clipless.bounds._trace import check_rules, is_query, target_of
from clipless.bounds._trial_run import (
    call_node,
    is_tensor_tuple,
    own_randomness,
    random_inputs,
    run_graph,
    seed_generators,
    trial_run,
)

# Two sizes, so that an axis that merely happens to have the size of the batch is found out.
_BATCH_SIZES = (3, 2)
# Units by which results may differ that were computed in batches of different sizes.
_ROUNDINGS = 1e3


@dataclass(frozen=True)
class BatchNumber:
    """A number that comes from the size of the batch: `exact` if it is that size itself."""

    exact: bool

    def __repr__(self) -> str:
        return "a number that depends on the size of the batch"


@dataclass(frozen=True)
class TracedModel:
    """A model's graph with the shapes, without the batch axis, of every tensor in it."""

    graph: fx.Graph
    shapes: Mapping[fx.Node, tuple[tuple[int, ...], ...]]
    """For every node that yields tensors, the shape of each."""
    is_tuple: frozenset[fx.Node]
    """Nodes that yield several tensors."""
    values: Mapping[fx.Node, Any]
    """For every other node, its value, with a `BatchNumber` where the batch size enters."""
    constants: Mapping[str, Tensor]
    """Tensors that the model's code creates on the fly."""
    input_shapes: tuple[tuple[int, ...], ...]


def trace(model: nn.Module, input_shapes: Sequence[tuple[int, ...]]) -> TracedModel:
    """Trace `model` on examples of the given shapes, or refuse with the reason."""
    graph, constants = check_rules(model)
    wanted = sum(node.op == "placeholder" for node in graph.nodes)
    if wanted != len(input_shapes):
        raise ValueError(
            f"the model's forward takes {wanted} input(s), but input_shape names "
            f"{len(input_shapes)}: give one shape for each, such as ((3, 32, 32), (10,))"
        )
    # Dropout draws numbers: a report must not change what the user's program draws next.
    with torch.no_grad(), trial_run(), own_randomness(model):
        inputs = random_inputs(graph, model, input_shapes, _BATCH_SIZES[0])
        whole = run_graph(graph, model, constants, inputs)
        fewer = run_graph(graph, model, constants, [x[: _BATCH_SIZES[1]] for x in inputs], whole)
        runs = (whole, fewer)
        shapes, several = _shapes(graph, runs)
        _check_rows_apart(graph, model, runs)
    values = _values(graph, runs[0], shapes)
    return TracedModel(graph, shapes, several, values, constants, tuple(input_shapes))


def _shapes(
    graph: fx.Graph, runs: Sequence[Mapping[fx.Node, Any]]
) -> tuple[dict[fx.Node, tuple[tuple[int, ...], ...]], frozenset[fx.Node]]:
    """Shapes of all tensors, after checking that the batch is their first axis."""
    shapes: dict[fx.Node, tuple[tuple[int, ...], ...]] = {}
    several = set()
    for node in graph.nodes:
        if node.op in ("get_attr", "output"):
            continue
        results = [run[node] for run in runs]
        if is_tensor_tuple(results[0]):
            several.add(node)
        elif not isinstance(results[0], Tensor):
            continue
        parts = [tuple(r) if node in several else (r,) for r in results]
        shapes[node] = tuple(tuple(part.shape[1:]) for part in parts[0])
        for run_parts, size in zip(parts, _BATCH_SIZES, strict=True):
            if len(run_parts) != len(shapes[node]):
                refuse_batch_axis(node)
            for part, expected in zip(run_parts, shapes[node], strict=True):
                if part.ndim == 0 or part.shape[0] != size or tuple(part.shape[1:]) != expected:
                    refuse_batch_axis(node)
    return shapes, frozenset(several)


def _check_rows_apart(
    graph: fx.Graph, model: nn.Module, runs: Sequence[Mapping[fx.Node, Any]]
) -> None:
    """Refuse an operation in which what is computed for a row depends on another row."""
    whole, fewer = runs
    for node in graph.nodes:
        if not node.op.startswith("call_") or _same_rows(whole[node], fewer[node]):
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), whole.__getitem__)
        again = call_node(node, model, args, kwargs)
        if _same_rows(whole[node], again):  # it draws no numbers, such as those of dropout
            refuse_mixed_rows(node)


def _same_rows(results: Any, others: Any) -> bool:
    """Whether the rows that both have are the same, up to rounding, in all tensors."""
    if is_tensor_tuple(results):
        return all(map(_same_rows, results, others))
    if not isinstance(results, Tensor) or not results.is_floating_point():
        return True
    a, b = results[: others.shape[0]], others
    room = _ROUNDINGS * torch.finfo(a.dtype).eps
    scale = float(b.detach().abs().nan_to_num(0.0, 0.0, 0.0).amax()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=room, atol=room * scale, equal_nan=True)


def _values(
    graph: fx.Graph, run: Mapping[fx.Node, Any], shapes: Mapping[fx.Node, Any]
) -> dict[fx.Node, Any]:
    """Values of all nodes that are no tensors, with what comes from the batch size marked."""
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node in shapes or node.op in ("get_attr", "output"):
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values.get(n, n))
        if is_query(node):
            values[node] = _answer(node, [*args[1:], *kwargs.values()], run)
        elif node.target is operator.getitem and not _has_batch(args[1]):
            values[node] = args[0][args[1]]
        else:
            values[node] = BatchNumber(exact=False) if _has_batch((args, kwargs)) else run[node]
    return values


def _answer(node: fx.Node, asked: Sequence[Any], run: Mapping[fx.Node, Any]) -> Any:
    """The answer to a question for a tensor's size, its first entry marked."""
    raw, tensor = run[node], node.all_input_nodes[0]
    if tensor.op == "get_attr":  # a weight or a constant has no batch axis
        return raw
    if isinstance(raw, tuple):
        return (BatchNumber(exact=True), *raw[1:]) if raw else raw
    if asked and target_of(node, None) is Tensor.size:
        if _has_batch(asked):
            return BatchNumber(exact=False)
        return BatchNumber(exact=True) if asked[0] % run[tensor].ndim == 0 else raw
    return raw


def _has_batch(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_batch, value.values()))
    if isinstance(value, tuple | list):
        return any(map(_has_batch, value))
    if isinstance(value, slice):
        return any(map(_has_batch, (value.start, value.stop, value.step)))
    return isinstance(value, BatchNumber)


def depends_on_batch(arguments: Any) -> bool:
    """Whether a number that comes from the size of the batch is among the arguments."""
    return _has_batch(arguments)


def agrees_with_model(traced: TracedModel, model: nn.Module) -> bool:
    """Whether graph and model give the same values and gradients on a few random entries.

    A forward can look at things that symbolic tracing does not show it (the type of its argument,
    other names of a tensor, global state), or bring a backward pass of its own; then the graph is
    not the model.
    """
    drawn = random_inputs(traced.graph, model, traced.input_shapes, _BATCH_SIZES[0])
    inputs = [t.requires_grad_() if t.is_floating_point() else t for t in drawn]
    (output,) = (node.args[0] for node in traced.graph.nodes if node.op == "output")
    if not isinstance(output, fx.Node):
        return True  # refused later, for not being one tensor
    sources = [t for t in (*inputs, *model.parameters()) if t.requires_grad]
    with torch.enable_grad(), trial_run(), own_randomness(model):
        seed_generators(model)
        by_graph = run_graph(traced.graph, model, traced.constants, inputs)[output]
        seed_generators(model)
        by_model = model.forward(*inputs)
        if not isinstance(by_graph, Tensor) or not isinstance(by_model, Tensor):
            return True
        return by_graph.shape == by_model.shape and all(
            _close(a, b)
            for a, b in zip(
                (by_graph, *_derivatives(by_graph, sources)),
                (by_model, *_derivatives(by_model, sources)),
                strict=True,
            )
        )


def _derivatives(output: Tensor, sources: Sequence[Tensor]) -> Sequence[Tensor | None]:
    if not output.requires_grad or not sources:
        return ()
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(output.shape, generator=generator).to(output)
    return torch.autograd.grad(output, sources, cotangent, allow_unused=True)


def _close(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
