"""The shapes in a traced model, and proof that the batch stays an axis of its own.

The graph is run on a few random examples, then each of its operations on all but the last of them:
every tensor must have the batch as its first axis, whole, in both, and the rows that stayed must
have the results that they had. Numbers that come from the size of the batch are followed: they may
shape a tensor and do nothing else. Last, model and graph are run on the same examples, and must
agree in values and gradients.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from clipless.bounds._refusal import explain_shapes, refuse_batch_axis, refuse_mixed_rows
from clipless.bounds._trace import check_rules, is_query, target_of
from clipless.kernels import TRACING_LOCK
from clipless.nn import Embedding

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
    with torch.no_grad(), trial_run(), _own_randomness(model):
        inputs = _random_inputs(graph, model, input_shapes, _BATCH_SIZES[0])
        whole = _run(graph, model, constants, inputs)
        fewer = _run(graph, model, constants, [x[: _BATCH_SIZES[1]] for x in inputs], whole)
        runs = (whole, fewer)
        shapes, several = _shapes(graph, runs)
        _check_rows_apart(graph, model, runs)
    values = _values(graph, runs[0], shapes)
    return TracedModel(graph, shapes, several, values, constants, tuple(input_shapes))


def _own_randomness(model: nn.Module) -> AbstractContextManager[None]:
    """Leave the generators as they were found."""
    return torch.random.fork_rng(devices=_cuda_devices(model))


def _cuda_devices(model: nn.Module) -> list[torch.device]:
    return sorted({each.device for each in model.parameters() if each.is_cuda}, key=str)


def seed_generators(model: nn.Module) -> None:
    """Seed what a model draws from: torch would seed the generators of all devices there are."""
    torch.default_generator.manual_seed(0)
    for device in _cuda_devices(model):
        with torch.cuda.device(device):
            torch.cuda.manual_seed(0)


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
        if _is_tensor_tuple(results[0]):
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
        again = _call(node, model, args, kwargs)
        if _same_rows(whole[node], again):  # it draws no numbers, such as those of dropout
            refuse_mixed_rows(node)


def _same_rows(results: Any, others: Any) -> bool:
    """Whether the rows that both have are the same, up to rounding, in all tensors."""
    if _is_tensor_tuple(results):
        return all(map(_same_rows, results, others))
    if not isinstance(results, Tensor) or not results.is_floating_point():
        return True
    a, b = results[: others.shape[0]], others
    room = _ROUNDINGS * torch.finfo(a.dtype).eps
    scale = float(b.detach().abs().nan_to_num(0.0, 0.0, 0.0).amax()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=room, atol=room * scale, equal_nan=True)


def _is_tensor_tuple(value: Any) -> bool:
    return isinstance(value, tuple | list) and any(isinstance(part, Tensor) for part in value)


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


def _random_inputs(
    graph: fx.Graph, model: nn.Module, input_shapes: Sequence[tuple[int, ...]], batch: int
) -> list[Tensor]:
    """Inputs of ordinary size for every placeholder; tokens, which have to exist, are zeros."""
    reference = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    generator = torch.Generator().manual_seed(0)
    inputs = []
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, shape in zip(placeholders, input_shapes, strict=True):
        if _is_tokens(node, model):
            tokens = torch.zeros((batch, *shape), dtype=torch.long, device=reference.device)
            inputs.append(tokens)
        else:
            drawn = torch.randn((batch, *shape), generator=generator)
            inputs.append(drawn.to(reference))
    return inputs


def _is_tokens(node: fx.Node, model: nn.Module) -> bool:
    return bool(node.users) and all(
        user.op == "call_module" and type(model.get_submodule(str(user.target))) is Embedding
        for user in node.users
    )


def _run(
    graph: fx.Graph,
    model: nn.Module,
    constants: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    larger: Mapping[fx.Node, Any] | None = None,
) -> dict[fx.Node, Any]:
    """Run the graph and return what every node yields.

    Given the results for a larger batch, each operation is run on the first rows of those.
    """
    results: dict[fx.Node, Any] = {}
    rows = next((x.shape[0] for x in inputs), 0)
    remaining = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            results[node] = next(remaining)
        elif node.op == "get_attr":
            results[node] = fetch(str(node.target), model, constants)
        elif node.op != "output":
            seen = results if larger is None else _first_rows(node, larger, results, rows)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), seen.__getitem__)
            try:
                results[node] = _call(node, model, args, kwargs)
            except Exception as error:
                raise explain_shapes(node, error, results) from error
    return results


def _first_rows(
    node: fx.Node, larger: Mapping[fx.Node, Any], results: Mapping[fx.Node, Any], rows: int
) -> dict[fx.Node, Any]:
    """What a node reads: the first rows of the tensors of a larger batch, and all else as it is."""

    def part(source: fx.Node) -> Any:
        found = larger[source]
        if source.op == "get_attr" or not (isinstance(found, Tensor) or _is_tensor_tuple(found)):
            return results[source]
        if isinstance(found, Tensor):
            return found[:rows] if found.ndim else found
        return type(found)(each[:rows] if each.ndim else each for each in found)

    return {source: part(source) for source in node.all_input_nodes}


def _call(node: fx.Node, model: nn.Module, args: Any, kwargs: Any) -> Any:
    if node.op == "call_module":
        return model.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def agrees_with_model(traced: TracedModel, model: nn.Module) -> bool:
    """Whether graph and model give the same values and gradients on a few random entries.

    A forward can look at things that symbolic tracing does not show it (the type of its argument,
    other names of a tensor, global state), or bring a backward pass of its own; then the graph is
    not the model.
    """
    drawn = _random_inputs(traced.graph, model, traced.input_shapes, _BATCH_SIZES[0])
    inputs = [t.requires_grad_() if t.is_floating_point() else t for t in drawn]
    (output,) = (node.args[0] for node in traced.graph.nodes if node.op == "output")
    if not isinstance(output, fx.Node):
        return True  # refused later, for not being one tensor
    sources = [t for t in (*inputs, *model.parameters()) if t.requires_grad]
    with torch.enable_grad(), trial_run(), _own_randomness(model):
        seed_generators(model)
        by_graph = _run(traced.graph, model, traced.constants, inputs)[output]
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


class _Rehearsing(threading.local):
    here = False


_rehearsing = _Rehearsing()


def is_trial_run() -> bool:
    """Whether this thread runs a model on random entries just to compare it with its trace."""
    return _rehearsing.here


@contextmanager
def trial_run() -> Iterator[None]:
    before = _rehearsing.here
    with TRACING_LOCK:  # other threads would draw from the same global generators
        _rehearsing.here = True
        try:
            yield
        finally:
            _rehearsing.here = before


def fetch(path: str, model: nn.Module, constants: Mapping[str, Tensor]) -> Any:
    """Return the tensor that a `get_attr` node names."""
    if path in constants:
        return constants[path]
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)
