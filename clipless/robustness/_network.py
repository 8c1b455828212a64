"""The Lipschitz constants, input guard and last layer of a network, for certificates.

The walk of `clipless.bounds` is used with the certified norms of the weights that are there, in
place of the radii that their constraints allow. For certificates a network is read as

    input --(l_before)--> guard --(l)--> logits,    logits = W h + b,  guard --(l_features)--> h

where the guard and the last layer are used if they are there.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from torch import Tensor, fx, nn

from clipless import nn as lip
from clipless.bounds import TracedModel, find_rule, traced_model, unwrap_module, walk
from clipless.bounds.rules import modules as _module_rules
from clipless.bounds.rules import shapes as _shape_rules
from clipless.errors import UnsupportedOperationError
from clipless.nn import constrained_modules
from clipless.spectral import fourier_bound, spectral_norm_bound

# Rounding of the walk's own arithmetic: a few hundred products and sums in double precision.
_WALK_SLACK = 1 + 1e-12
# Convolutions whose Fourier blocks hold more entries than this keep the norm of their constraint.
_FOURIER_ENTRIES = 1 << 23

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_LINEAR = (lip.SpectralLinear, lip.FrobeniusLinear)
_CONVOLUTION = (lip.SpectralConv1d, lip.SpectralConv2d)
_NOTHING_HAPPENS = (nn.Identity, lip.ClipGradient, *_DROPOUT)
_RESHAPING = (_shape_rules.reshape, _shape_rules.flatten, _shape_rules.squeeze)


@dataclass(frozen=True)
class Guard:
    """The input guard through which all of the input passes."""

    path: str
    node: fx.Node
    radius: float
    sphere: bool
    lipschitz_before: float
    """Lipschitz constant of what happens to the input before it."""


@dataclass(frozen=True)
class Network:
    """The certified constants of a model in evaluation mode."""

    model: nn.Module
    """A copy of the user's model, in evaluation mode."""
    traced: TracedModel
    norms: Mapping[int, float]
    """Certified operator norms of affine layers, by identity."""
    guard: Guard | None
    lipschitz: float
    """From the guard's output (or else from the input) to the logits."""
    head: Tensor | None
    """The weight of the last layer, (K, features), if it is linear."""
    feature_lipschitz: float
    """From the guard's output (or else from the input) to the last layer's input."""
    output_shape: tuple[int, ...]

    def forward(self, input_norm: float) -> walk.ForwardPass:
        """Bound all activations for inputs of norm at most `input_norm`."""
        passed = walk.forward(self.traced, self.model, [input_norm])
        steps = tuple(tightened(step, self.norms) for step in passed.steps)
        return replace(passed, steps=steps)


def read_network(model: nn.Module, input_shape: tuple[int, ...]) -> Network:
    """Certify the weights of `model` and find its constants, or refuse with the reason."""
    own = copy.deepcopy(unwrap_module(model)).eval()
    traced = traced_model(own, (input_shape,))
    for node in traced.graph.nodes:
        if node.op == "call_method" and node.target == "float":
            raise UnsupportedOperationError(
                "the model converts to float32 in its own code (.float()), and certificates are "
                "evaluated in double precision. Convert the data before they enter the model."
            )
    passed = walk.forward(traced, own, [math.inf])
    norms = _certified_norms(own, traced, passed)
    steps = tuple(tightened(step, norms) for step in passed.steps)
    passed = replace(passed, steps=steps)
    guard = _find_guard(passed)
    start = passed.inputs[0] if guard is None else guard.node
    lipschitz = _between(passed, start, passed.output)
    if not math.isfinite(lipschitz):
        _refuse_unbounded(passed)
    head, features = _find_head(passed)
    return Network(
        model=own,
        traced=traced,
        norms=norms,
        guard=guard,
        lipschitz=lipschitz,
        head=head,
        feature_lipschitz=_between(passed, start, features),
        output_shape=passed.output_signal.shape,
    )


def tightened(step: walk.Step, norms: Mapping[int, float]) -> walk.Step:
    """Replace what a constraint allows by what is certified, and dropout by the identity."""
    module = step.site.called
    if type(module) in _DROPOUT:
        return replace(step, lipschitz=(1.0,))
    if id(module) in norms:
        return replace(step, lipschitz=(norms[id(module)],))
    return step


def _certified_norms(
    model: nn.Module, traced: TracedModel, passed: walk.ForwardPass
) -> dict[int, float]:
    """Certified operator norms of the affine layers, for the sizes of image that they meet."""
    certificates = lip.certify(model)
    norms: dict[int, float] = {}
    for path, layer in constrained_modules(model):
        if type(layer) in (*_LINEAR, *_CONVOLUTION):
            norms[id(layer)] = certificates[f"{path}.weight" if path else "weight"].bound
        if type(layer) is lip.FrobeniusLinear:
            norms[id(layer)] = min(
                norms[id(layer)], float(spectral_norm_bound(layer.weight.detach()))
            )
    found: dict[int, list[float]] = {}
    for step in passed.steps:
        convolution = step.site.called
        if type(convolution) in _CONVOLUTION:
            size = traced.shapes[step.sources[0]][0][1:]
            found.setdefault(id(convolution), []).append(_fourier_norm(convolution, size))
    for key, bounds in found.items():
        norms[key] = min(norms[key], max(bounds))
    return norms


def _fourier_norm(layer: Any, size: tuple[int, ...]) -> float:
    """The norm of a convolution on images of this very size: the patch count overstates it."""
    circular = layer.padding_mode == "circular"
    period = size if circular else tuple(
        n + d * (k - 1) for n, k, d in zip(size, layer.kernel_size, layer.dilation, strict=True)
    )  # fmt: skip
    if math.prod(period) * layer.weight.shape[0] * layer.weight.shape[1] > _FOURIER_ENTRIES:
        return math.inf
    kernel = layer.weight.detach()
    bound = fourier_bound(
        kernel,
        input_size=size,
        dilation=layer.dilation,
        groups=layer.groups,
        circular=circular,
        iterations=8,
    )
    return float(bound) * layer.scale * _WALK_SLACK


def _between(passed: walk.ForwardPass, start: fx.Node, end: fx.Node) -> float:
    """Lipschitz constant of one node as a function of an earlier one, all else held fixed."""
    if start is end:
        return 1.0
    back = walk.backward(replace(passed, output=end), 1.0, capped=False)
    return back.cotangents.get(start, 0.0) * _WALK_SLACK


def _find_guard(passed: walk.ForwardPass) -> Guard | None:
    """The first input guard without which nothing of the input reaches the output."""
    called = [step.site.called for step in passed.steps]
    for index, step in enumerate(passed.steps):
        module = step.site.called
        if not isinstance(module, lip.BoundedInput) or type(module) is not lip.BoundedInput:
            continue
        if called.count(module) > 1:
            continue
        blocked = (
            *passed.steps[:index],
            replace(step, lipschitz=(0.0,)),
            *passed.steps[index + 1 :],
        )
        if _between(replace(passed, steps=blocked), passed.inputs[0], passed.output) > 0:
            continue
        before = _between(passed, passed.inputs[0], step.sources[0])
        if math.isfinite(before):
            return Guard(
                path=str(step.node.target),
                node=step.node,
                radius=module.norm,
                sphere=module.mode == "sphere",
                lipschitz_before=before,
            )
    return None


def _find_head(passed: walk.ForwardPass) -> tuple[Tensor | None, fx.Node]:
    """The last layer's weight and the node that it reads, if logits are a linear map of it."""
    steps = {step.node: step for step in passed.steps}
    node = passed.output
    while node in steps and _changes_nothing(steps[node], steps):
        node = steps[node].sources[0]
    step = steps.get(node)
    if step is None or type(step.site.called) not in _LINEAR or len(step.site.output_shape) != 1:
        return None, passed.output
    return step.site.module.weight.detach(), step.sources[0]


def _changes_nothing(step: walk.Step, steps: Mapping[fx.Node, walk.Step]) -> bool:
    """Whether a step is the identity, or gives the same single number another shape."""
    if type(step.site.called) in _NOTHING_HAPPENS:
        return True
    before = steps.get(step.sources[0])
    rearranges = find_rule(step.site.target) in (_module_rules.flatten, *_RESHAPING)
    one_number = before is not None and before.site.output_size == step.site.output_size == 1
    return rearranges and one_number


def _refuse_unbounded(passed: walk.ForwardPass) -> NoReturn:
    places = [
        f"{step.site.where} ({step.site.operation})"
        for step in passed.steps
        if not all(map(math.isfinite, step.lipschitz))
    ]
    raise UnsupportedOperationError(
        f"no radius can be certified: {', '.join(places)} has no Lipschitz constant. "
        "A BoundedInput with mode='sphere' is understood if it comes first and all of the input "
        "passes through it, once; in the middle of a model use BallProjection or mode='clip'. "
        "Tokens have no neighbourhood at all."
    )
