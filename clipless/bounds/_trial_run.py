"""Trial runs of traced models: random examples, run through a graph operation by operation."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from clipless.bounds._refusal import explain_shapes
from clipless.kernels import TRACING_LOCK
from clipless.nn import Embedding


class _TrialRun(threading.local):
    here = False
    """Whether this thread runs a model on random entries just to compare it with its trace."""


TRIAL_RUN = _TrialRun()
"""Whether a trial run is under way, thread by thread: hooks of a session then do nothing."""


@contextmanager
def trial_run() -> Iterator[None]:
    """Mark a trial run of this thread within a `with` block, one thread at a time."""
    before = TRIAL_RUN.here
    with TRACING_LOCK:  # other threads would draw from the same global generators
        TRIAL_RUN.here = True
        try:
            yield
        finally:
            TRIAL_RUN.here = before


def own_randomness(model: nn.Module) -> AbstractContextManager[None]:
    """Leave the generators as they were found."""
    return torch.random.fork_rng(devices=_cuda_devices(model))


def _cuda_devices(model: nn.Module) -> list[torch.device]:
    return sorted({each.device for each in model.parameters() if each.is_cuda}, key=str)


def seed_generators(model: nn.Module, seed: int = 0) -> None:
    """Seed what a model draws from: torch would seed the generators of all devices there are."""
    torch.default_generator.manual_seed(seed)
    for device in _cuda_devices(model):
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def random_inputs(
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


def run_graph(
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
                results[node] = call_node(node, model, args, kwargs)
            except Exception as error:
                raise explain_shapes(node, error, results) from error
    return results


def _first_rows(
    node: fx.Node, larger: Mapping[fx.Node, Any], results: Mapping[fx.Node, Any], rows: int
) -> dict[fx.Node, Any]:
    """What a node reads: the first rows of the tensors of a larger batch, and all else as it is."""

    def part(source: fx.Node) -> Any:
        found = larger[source]
        if source.op == "get_attr" or not (isinstance(found, Tensor) or is_tensor_tuple(found)):
            return results[source]
        if isinstance(found, Tensor):
            return found[:rows] if found.ndim else found
        return type(found)(each[:rows] if each.ndim else each for each in found)

    return {source: part(source) for source in node.all_input_nodes}


def is_tensor_tuple(value: Any) -> bool:
    """Return whether a value is a tuple or list of tensors."""
    return isinstance(value, tuple | list) and any(isinstance(part, Tensor) for part in value)


def call_node(node: fx.Node, model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return what one node of a graph computes."""
    if node.op == "call_module":
        return model.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def fetch(path: str, model: nn.Module, constants: Mapping[str, Tensor]) -> Any:
    """Return the tensor that a `get_attr` node names."""
    if path in constants:
        return constants[path]
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)
