"""Attack on the bounds: a search for examples and weights whose gradient exceeds them.

Gradient ascent runs over inputs, over targets where they are numbers, and over all weights inside
their constraint sets, from many starts at once, in double precision. It can only ever find lower
limits of the true maximum; a ratio above one would disprove a bound.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from clipless.bounds import SensitivityReport, sensitivity
from clipless.losses import Loss
from clipless.nn import ConstrainedModule
from clipless.spectral import Constraint

Sampler = Callable[[int, torch.Generator], Tensor]


@dataclass(frozen=True)
class AttackResult:
    """The largest gradient norm found for each parameter, beside its bound."""

    found: dict[str, float]
    bounds: dict[str, float]

    @property
    def ratios(self) -> dict[str, float]:
        """Found over bound, for each parameter: at most one if the bounds are right."""
        return {
            name: norm / self.bounds[name] if self.bounds[name] else math.inf * norm
            for name, norm in self.found.items()
            if self.bounds[name] or norm
        }

    def violations(self, *, tolerance: float = 1e-6) -> dict[str, float]:
        """Parameters whose bound was exceeded by more than the relative tolerance."""
        return {name: ratio for name, ratio in self.ratios.items() if not ratio <= 1 + tolerance}


def attack_bounds(
    model: nn.Module,
    *,
    loss: Loss,
    input_shape: tuple[int, ...],
    targets: Sampler,
    inputs: Sampler | None = None,
    bounds: dict[str, float] | None = None,
    restarts: int = 6,
    steps: int = 60,
    move_weights: bool = True,
    seed: int = 0,
) -> AttackResult:
    """Search for per-example gradients larger than the bounds of `model`.

    Args:
        model: as for `clipless.bounds.sensitivity`; it is copied, not changed.
        targets: draws targets, (count, ...). Floating ones are optimised as well.
        inputs: draws inputs, (count, *input_shape). By default Gaussian, constant and sparse ones
            of various norms. Floating ones are optimised.
        bounds: the bounds to attack, by default those of the sensitivity report.
        restarts: starts for each parameter.
        move_weights: also search over the weights, inside their constraint sets.

    Returns:
        The best norm found for every trainable parameter.
    """
    model = copy.deepcopy(model).double()
    generator = torch.Generator().manual_seed(seed)
    report: SensitivityReport = sensitivity(model, loss=loss, input_shape=input_shape)
    bounds = report.gradient_bounds if bounds is None else bounds
    names = list(bounds)
    count = restarts * len(names)
    goal = torch.arange(count) % len(names)

    constraints = _constraints_by_name(model)
    weights = _draw_weights(model, constraints, count, generator, spread=move_weights)
    x = (inputs or _default_inputs(input_shape))(count, generator)
    y = targets(count, generator)
    x, y = (t.double() if t.is_floating_point() else t for t in (x, y))
    buffers = dict(model.named_buffers())

    def gradient_norms(own: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        def objective(own: dict[str, Tensor]) -> Tensor:
            output = functional_call(model, {**own, **buffers}, (one[None],))
            return loss.per_example(output, target[None])[0]

        gradients = grad(objective)(own)
        return torch.stack([_norm(gradients[name]) for name in names])

    measure = vmap(gradient_norms)
    scale = torch.tensor([bounds[name] or 1.0 for name in names], dtype=torch.float64)
    best = torch.zeros(len(names), dtype=torch.float64)
    for step in range(steps + 1):
        moving = [x] if x.is_floating_point() else []
        moving += [y] if y.is_floating_point() else []
        moving += list(weights.values()) if move_weights else []
        for tensor in moving:
            tensor.requires_grad_(True)
        norms = measure(weights, x, y)
        best = torch.maximum(best, norms.detach().amax(dim=0))
        if step == steps:
            break
        chosen = (norms / scale).gather(1, goal[:, None]).sum()
        slopes = torch.autograd.grad(chosen, moving, allow_unused=True)
        rate = 0.5 * (0.02 ** (step / steps))
        with torch.no_grad():
            for tensor, slope in zip(moving, slopes, strict=True):
                tensor.requires_grad_(False)
                if slope is not None:
                    tensor += rate * _relative_step(slope, tensor)
            for name, constraint in constraints.items() if move_weights else ():
                weights[name].copy_(constraint.project(weights[name]))
    return AttackResult(dict(zip(names, best.tolist(), strict=True)), bounds)


def _relative_step(slope: Tensor, tensor: Tensor) -> Tensor:
    """A step along the slope, as long as the tensor itself, for each start on its own."""
    flat = torch.nan_to_num(slope).flatten(1)
    length = _norm_rows(flat).clamp_min(1e-300)
    size = _norm_rows(tensor.flatten(1)).clamp_min(1e-3)
    return (flat * (size / length)).view_as(slope)


def _constraints_by_name(model: nn.Module) -> dict[str, Constraint]:
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, Constraint] = {}
    for module in model.modules():
        if isinstance(module, ConstrainedModule):
            for own, constraint in module.constraints().items():
                found[names[id(module.get_parameter(own))]] = constraint
    return found


def _draw_weights(
    model: nn.Module,
    constraints: dict[str, Constraint],
    count: int,
    generator: torch.Generator,
    *,
    spread: bool,
) -> dict[str, Tensor]:
    """Copies of the weights: the model's own for one start, random members for the others."""
    weights = {}
    for name, parameter in model.named_parameters():
        stacked = parameter.detach().expand(count, *parameter.shape).clone()
        if spread and count > 1:
            noise = torch.randn(stacked.shape, generator=generator, dtype=torch.float64)
            stacked[1:] += noise[1:] * (parameter.detach().square().mean().sqrt() + 0.1)
            if name in constraints:
                with torch.no_grad():
                    stacked = constraints[name].project(stacked)
        weights[name] = stacked
    return weights


def _default_inputs(shape: tuple[int, ...]) -> Sampler:
    def draw(count: int, generator: torch.Generator) -> Tensor:
        x = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
        x[1::3] = 1.0 + 0.1 * x[1::3]  # nearly constant
        x[2::3] *= (x[2::3].abs() > 1.5).double()  # sparse
        norms = 10.0 ** (3 * torch.rand(count, generator=generator, dtype=torch.float64) - 1)
        lengths = _norm_rows(x.flatten(1)).clamp_min(1e-3)
        return x * (norms[:, None] / lengths).reshape(count, *([1] * len(shape)))

    return draw


def class_labels(classes: int) -> Sampler:
    """Draw integer labels below `classes`."""

    def draw(count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(classes, (count,), generator=generator)

    return draw


def gaussian_targets(*shape: int, scale: float = 1.0) -> Sampler:
    """Draw floating targets of the given shape, which the attack then optimises."""

    def draw(count: int, generator: torch.Generator) -> Tensor:
        return scale * torch.randn(count, *shape, generator=generator, dtype=torch.float64)

    return draw


def _norm(gradient: Tensor) -> Tensor:
    """Euclidean norm with a finite derivative at zero, where it is taken to be zero."""
    energy = gradient.square().sum()
    positive = torch.where(energy > 0, energy, 1.0)
    return torch.where(energy > 0, positive.sqrt(), 0.0)


def _norm_rows(rows: Tensor) -> Any:
    return torch.linalg.vector_norm(rows, dim=1, keepdim=True)
