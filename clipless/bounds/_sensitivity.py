"""`sensitivity`: the report of a model, a loss and an input shape."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import nn

from clipless.bounds import _shapes, walk
from clipless.bounds._refusal import refuse_self_changing, refuse_unlike_trace
from clipless.bounds._report import NodeBound, ParameterBound, SensitivityReport
from clipless.bounds._structure import ModelSnapshot
from clipless.bounds._trace import is_leaf
from clipless.errors import UnboundedSensitivityError
from clipless.losses import Loss
from clipless.nn import certify

Shape = int | Sequence[int] | Sequence[Sequence[int]]


def sensitivity(
    model: nn.Module,
    *,
    loss: Loss | float,
    input_shape: Shape,
    input_norm: float | Sequence[float] | None = None,
) -> SensitivityReport:
    """Prove how large one example's gradient can be, for every parameter of `model`.

    The model is traced anew each time. The cost does not depend on any batch size.

    Args:
        model: any module whose operations have rules; see `clipless.bounds.register`.
        loss: a loss of `clipless.losses`, or the Lipschitz constant of another per-example loss.
        input_shape: shape of one example, without the batch axis; for a model with several inputs,
            a sequence of shapes.
        input_norm: a bound of the norm of every input that is already guaranteed elsewhere. By
            default inputs are unbounded and the model has to begin with an input guard,
            `clipless.nn.BoundedInput`.

    Raises:
        UnsupportedOperationError: an operation has no rule, or mixes examples.
        UnboundedSensitivityError: a gradient has no finite bound.
        ConstraintError: a weight lies outside its constraint set.

    Example:
        >>> model = torch.nn.Sequential(
        ...     clipless.nn.BoundedInput(1.0), clipless.nn.SpectralLinear(8, 2))
        >>> report = sensitivity(model, loss=clipless.losses.CrossEntropy(), input_shape=(8,))
        >>> round(report.gradient_bounds["1.weight"], 4)
        1.4142
    """
    model = unwrap_module(model)
    traced = traced_model(model, input_shapes(input_shape))
    return prove_bounds(traced, model, loss=loss, input_norm=input_norm)


def prove_bounds(
    traced: _shapes.TracedModel,
    model: nn.Module,
    *,
    loss: Loss | float,
    input_norm: float | Sequence[float] | None = None,
) -> SensitivityReport:
    """Return the bounds of a model whose graph is known, with its layers as they are now."""
    shapes = traced.input_shapes
    passed = walk.forward(traced, model, _input_norms(input_norm, len(shapes)))
    certificates = certify(model)
    constant = _loss_constant(loss, passed.output_signal.shape)
    back = walk.backward(passed, constant)
    names = {id(p): name for name, p in model.named_parameters()}

    gradient: defaultdict[str, float] = defaultdict(float)
    uses: defaultdict[str, int] = defaultdict(int)
    jacobians: defaultdict[walk.Step, dict[str, float]] = defaultdict(dict)
    shares: defaultdict[walk.Step, dict[str, float]] = defaultdict(dict)
    for step, own_name, jacobian, bound in back.contributions:
        name = names[id(step.site.module.get_parameter(own_name))]
        gradient[name] += bound
        uses[name] += 1
        jacobians[step][name] = jacobian
        shares[step][name] = bound
        if not math.isfinite(bound) and model.get_parameter(name).requires_grad:
            raise UnboundedSensitivityError(_unbounded(step, name))

    return SensitivityReport(
        nodes=tuple(
            NodeBound(
                name=str(step.node.target) if step.site.called is not None else step.node.name,
                operation=step.site.operation,
                output_shape=step.site.output_shape,
                input_bounds=step.input_norms,
                lipschitz=step.lipschitz,
                output_bound=step.bound.output,
                cotangent_bound=back.cotangents.get(step.node, 0.0),
                jacobians=jacobians[step],
                gradient_bounds=shares[step],
                roundings=step.bound.roundings,
            )
            for step in passed.steps
        ),
        parameters=tuple(
            ParameterBound(
                name=name,
                shape=tuple(parameter.shape),
                gradient_bound=gradient[name],
                uses=uses[name],
                trainable=parameter.requires_grad,
                certificate=certificates.get(name),
            )
            for name, parameter in model.named_parameters()
        ),
        loss=type(loss).__name__ if isinstance(loss, Loss) else "given constant",
        loss_lipschitz=constant,
        lipschitz=_network_lipschitz(passed),
        output_bound=passed.output_signal.norm,
        input_shapes=shapes,
    )


def unwrap_module(model: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile` and data-parallel wrappers."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(
            model, nn.parallel.DistributedDataParallel | nn.DataParallel
        ):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def traced_model(model: nn.Module, shapes: tuple[tuple[int, ...], ...]) -> _shapes.TracedModel:
    """Return the model's graph, which computes what the model computes, or refuse the model."""
    before, buffers = ModelSnapshot(model), _versions(model)
    traced = _shapes.trace(model, shapes)
    # Rules refuse what must not be run backwards, such as windows without a cell.
    walk.forward(traced, model, [1.0] * len(shapes))
    if not _shapes.agrees_with_model(traced, model):
        refuse_unlike_trace()
    if before.changed() or buffers != _versions(model):
        refuse_self_changing()
    return traced


def _versions(model: nn.Module) -> list[int]:
    """How often the buffers of the user's own modules were written; rules know those of layers."""
    modules = (each for each in model.modules() if not is_leaf(each))
    return [b._version for each in modules for b in each._buffers.values() if b is not None]


def _loss_constant(loss: Loss | float, output_shape: tuple[int, ...]) -> float:
    constant = loss.lipschitz_for(output_shape) if isinstance(loss, Loss) else float(loss)
    if not 0 < constant < math.inf:
        raise ValueError(f"the loss needs a positive finite Lipschitz constant, got {constant}")
    return constant


def _network_lipschitz(passed: walk.ForwardPass) -> float:
    """The cotangent of norm one at the output bounds the Jacobian when it reaches the inputs."""
    cotangents = walk.backward(passed, 1.0, capped=False).cotangents
    return math.hypot(*(cotangents.get(node, 0.0) for node in passed.inputs))


def _unbounded(step: walk.Step, name: str) -> str:
    if not all(map(math.isfinite, step.input_norms)):
        return (
            f"{name}: the input of {step.site.where} has no bounded norm, so neither has this "
            "parameter's gradient. Begin the model with clipless.nn.BoundedInput(norm=...), or "
            "pass input_norm= if the data are bounded elsewhere."
        )
    return (
        f"{name}: the cotangent that reaches {step.site.where} has no finite bound, because a "
        "later operation has no Lipschitz constant (such as BoundedInput with mode='sphere' in the "
        "middle of a model)."
    )


def input_shapes(shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of one example's inputs, one for each input, from any way to give them."""
    sizes: list[Any] = [shape] if isinstance(shape, int) else list(shape)
    if all(isinstance(size, int) for size in sizes):
        sizes = [sizes]
    shapes = tuple(tuple(int(size) for size in one) for one in sizes)
    if any(size < 1 for one in shapes for size in one):
        raise ValueError(f"input_shape must hold positive sizes without the batch, got {shape}")
    return shapes


def _input_norms(norm: float | Sequence[float] | None, count: int) -> list[float]:
    if norm is None:
        return [math.inf] * count
    norms = [float(norm)] * count if isinstance(norm, int | float) else [float(n) for n in norm]
    if len(norms) != count or not all(0 < n < math.inf for n in norms):
        raise ValueError(f"input_norm must be {count} positive finite number(s), got {norm}")
    return norms
