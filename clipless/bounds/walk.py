"""Backpropagation for bounds: one forward and one backward pass over a traced model.

Forward, every node gets a bound of its output's norm. Backward, every node gets a bound G of the
norm of the cotangent that arrives at its output; `G * l` goes to its inputs and `G * J` to its
parameters. Whatever is used several times adds what it receives, by the triangle inequality.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from clipless.bounds._refusal import place_of, refuse_parameter, refuse_target
from clipless.bounds._rule import LARGEST, Bound, CallSite, Product, Signal, find_rule
from clipless.bounds._shapes import TracedModel, depends_on_batch
from clipless.bounds._trace import target_of
from clipless.bounds._trial_run import fetch
from clipless.errors import UnsupportedOperationError


@dataclass(frozen=True, eq=False)
class Step:
    """One operation of the model: its rule's answer, and the nodes it reads, in their order."""

    node: fx.Node
    site: CallSite
    bound: Bound
    sources: tuple[fx.Node, ...]
    lipschitz: tuple[float, ...]
    input_norms: tuple[float, ...]


@dataclass(frozen=True)
class ForwardPass:
    """The outcome of the forward pass: steps in order, and the output node with its signal."""

    steps: tuple[Step, ...]
    output: fx.Node
    output_signal: Signal
    inputs: tuple[fx.Node, ...]


@dataclass(frozen=True)
class BackwardPass:
    """Bounds of cotangents by node, and of gradients by (step, parameter name)."""

    cotangents: dict[fx.Node, float]
    contributions: list[tuple[Step, str, float, float]] = field(default_factory=list)
    """(step, parameter's name in its module, Jacobian bound, gradient bound)."""


def forward(traced: TracedModel, model: nn.Module, input_norms: Sequence[float]) -> ForwardPass:
    """Bound the norm of every activation."""
    signals: dict[fx.Node, Any] = dict(traced.values)
    norms = iter(input_norms)
    steps: list[Step] = []
    inputs: list[fx.Node] = []
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            signals[node] = Signal(next(norms), traced.shapes[node][0])
            inputs.append(node)
        elif node.op == "get_attr":
            signals[node] = fetch(str(node.target), model, traced.constants)
        elif node.op == "output":
            output = node.args[0]
            if not isinstance(output, fx.Node) or not isinstance(signals.get(output), Signal):
                raise UnsupportedOperationError(
                    "the model must return one tensor, with one row for each example"
                )
            return ForwardPass(tuple(steps), output, signals[output], tuple(inputs))
        elif node not in traced.values:
            step = _apply_rule(node, traced, model, signals)
            steps.append(step)
            parts = tuple(Signal(step.bound.output, shape) for shape in traced.shapes[node])
            signals[node] = parts if node in traced.is_tuple else parts[0]
    raise AssertionError("a traced graph ends in an output node")


def _apply_rule(
    node: fx.Node, traced: TracedModel, model: nn.Module, signals: dict[fx.Node, Any]
) -> Step:
    module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
    site = CallSite(
        where=place_of(node),
        output_shape=traced.shapes[node][0],
        target=target_of(node, module),
        called=module,
    )
    rule = find_rule(site.target)
    if rule is None:
        refuse_target(node, module)
    for source in node.all_input_nodes:
        value = signals[source]
        if isinstance(value, Tensor) and value.requires_grad:
            refuse_parameter(node, str(source.target))
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), signals.__getitem__)
    try:
        inspect.signature(rule).bind(site, *args, **kwargs)
    except TypeError as error:
        site.refuse(f"it is called in a way its rule does not cover: {error}.")
    if depends_on_batch((args, kwargs)) and not getattr(rule, "shapes_only", False):
        site.refuse(
            "it uses a number that depends on the size of the batch that was drawn, which couples "
            "the examples. Only view and reshape may use it, as the first size."
        )
    bound = rule(site, *args, **kwargs)
    sources = _tensor_sources(node, signals)
    lipschitz = bound.lipschitz if isinstance(bound.lipschitz, tuple) else (bound.lipschitz,)
    if len(lipschitz) == 1:
        lipschitz = lipschitz * len(sources)
    _check_answer(site, bound, lipschitz, sources, module)
    input_norms = tuple(_norm(signals[source]) for source in sources)
    return Step(node, site, bound, sources, lipschitz, input_norms)


def _check_answer(
    site: CallSite,
    bound: Bound,
    lipschitz: tuple[float, ...],
    sources: tuple[fx.Node, ...],
    module: nn.Module | None,
) -> None:
    """A rule must answer for every input and every parameter, with numbers that can be bounds."""
    if len(lipschitz) != len(sources):
        site.refuse(f"its rule gave {len(lipschitz)} Jacobian bounds for {len(sources)} inputs.")
    numbers = [*lipschitz, bound.output, bound.cotangent_cap]
    numbers += [*bound.parameters.values(), *bound.parameter_caps.values()]
    stated = bound.roundings
    numbers += [stated.rank, stated.terms] if isinstance(stated, Product) else [stated or 0.0]
    numbers.append(bound.forward_roundings or 0)
    if not all(number >= 0 for number in numbers):
        site.refuse(f"its rule gave a number that is no bound: {bound}.")
    if bound.rows_apart is not True:
        site.refuse(
            "its rule does not state that rows stay apart. If no example has a part in what is "
            "computed for another, forward or backward, say so: Bound(..., rows_apart=True)."
        )
    if LARGEST < bound.output < math.inf:
        site.refuse(
            f"its values can reach {bound.output:.3g}, where float32 overflows. Use smaller norms."
        )
    names = {name for name, _ in module.named_parameters()} if module is not None else set()
    if names != set(bound.parameters):
        site.refuse(
            f"its rule speaks of the parameters {sorted(bound.parameters)}, but the module has "
            f"{sorted(names)}: every parameter needs a Jacobian bound."
        )


def _tensor_sources(node: fx.Node, signals: dict[fx.Node, Any]) -> tuple[fx.Node, ...]:
    """The nodes that carry examples, in the order of the arguments, repetitions included."""
    found: list[fx.Node] = []

    def visit(source: fx.Node) -> fx.Node:
        value = signals[source]
        if isinstance(value, Signal) or (
            isinstance(value, tuple) and value and isinstance(value[0], Signal)
        ):
            found.append(source)
        return source

    fx.node.map_arg((node.args, node.kwargs), visit)
    return tuple(found)


def _norm(signal: Any) -> float:
    return float(signal.norm if isinstance(signal, Signal) else signal[0].norm)


def backward(passed: ForwardPass, output_cotangent: float, *, capped: bool = True) -> BackwardPass:
    """Bound every cotangent and every parameter's gradient, given the bound at the output.

    With `capped=False`, layers that clip cotangents are taken for the identities that they are in
    the forward pass: the result then bounds the true derivative of the function.
    """
    cotangents: defaultdict[fx.Node, float] = defaultdict(float)
    cotangents[passed.output] = output_cotangent
    contributions: list[tuple[Step, str, float, float]] = []
    for step in reversed(passed.steps):
        arriving = cotangents[step.node]
        for name, jacobian in step.bound.parameters.items():
            bound = times(arriving, jacobian)
            if capped:
                bound = min(bound, step.bound.parameter_caps.get(name, math.inf))
            contributions.append((step, name, jacobian, bound))
        for source, lipschitz in zip(step.sources, step.lipschitz, strict=True):
            leaving = times(arriving, lipschitz)
            cotangents[source] += min(leaving, step.bound.cotangent_cap) if capped else leaving
    return BackwardPass(dict(cotangents), contributions)


def times(a: float, b: float) -> float:
    """Product of bounds, in which nothing times infinity is nothing."""
    return 0.0 if a == 0 or b == 0 else a * b
