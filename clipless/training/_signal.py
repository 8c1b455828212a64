"""Whether a model can learn under the planned noise, told before training and without any data."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy
import torch
from torch import nn

from clipless.accounting.correlated import error_by_step
from clipless.distributed import processes_present
from clipless.losses import Loss
from clipless.privacy import Plan

_PROBES = 8
_ENOUGH = 1.0


class LittleSignalWarning(UserWarning):
    """The planned noise is far above any gradient that the model is likely to have."""


def typical_gradients(model: nn.Module, criterion: Loss, shape: Any) -> dict[str, float] | None:
    """Return the norm of each parameter's gradient for random inputs; None if that cannot be told.

    Inputs are standard normal and cotangents random with the norm of the loss's Lipschitz
    constant, which no gradient of the loss exceeds. Nothing is read from data, and no generator of
    the caller's is moved.
    """
    if processes_present() is not None or not isinstance(criterion, Loss):
        return None
    sizes = [shape] if isinstance(shape, int) else list(shape)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters or not all(isinstance(size, int) for size in sizes):
        return None  # several inputs
    place = next(iter(parameters.values()))
    generator = torch.Generator().manual_seed(0)
    training = model.training
    model.eval()  # no dropout, no buffer that moves
    try:
        x = torch.randn(_PROBES, *sizes, generator=generator).to(place)
        output = model(x)
        cotangent = torch.randn(output.shape, generator=generator).to(output)
        norms = cotangent.flatten(1).norm(dim=1).clamp(min=1e-12)
        cotangent /= norms.view(-1, *[1] * (output.ndim - 1))
        cotangent *= criterion.lipschitz_for(tuple(output.shape[1:]))
        totals = dict.fromkeys(parameters, 0.0)
        for row in range(_PROBES):
            found = torch.autograd.grad(
                output[row], list(parameters.values()), cotangent[row],
                retain_graph=True, allow_unused=True,
            )  # fmt: skip
            for name, gradient in zip(parameters, found, strict=True):
                totals[name] += 0.0 if gradient is None else float(gradient.norm()) / _PROBES
    except Exception:  # a warning that cannot be given must not stop anybody
        return None
    finally:
        model.train(training)
    return totals


def signal_over_noise(plan: Plan, typical: dict[str, float]) -> float:
    """Return how far all planned steps together move along a typical gradient, over the noise.

    Were every example of every step to have the same gradient, T steps would add up to `T g`, and
    noise of deviation s along that direction to `s sqrt(T)`: their quotient, over all parameters.
    """
    deviations = plan.noise_deviations
    shares = [
        typical[each.name] / deviations[each.name]
        for each in plan.parameters
        if each.name in typical and deviations[each.name] > 0
    ]
    steps = plan.steps or 1
    if plan.strategy is None:
        spread = math.sqrt(steps)
    else:  # of the sum of all steps' noise
        spread = error_by_step(numpy.ones((1, plan.strategy.steps)), plan.strategy).item()
    return math.hypot(*shares) * steps / spread if shares else math.inf


def warn_of_little_signal(plan: Plan, typical: dict[str, float]) -> None:
    """Say before training that nothing can come of it, if the noise is that large."""
    quotient = signal_over_noise(plan, typical)
    if quotient >= _ENOUGH:
        return
    widest = max(plan.parameters, key=lambda each: each.gradient_bound)
    budget = "this noise" if plan.target_epsilon is None else f"epsilon {plan.target_epsilon:g}"
    warnings.warn(
        f"this model will not learn at {budget}: signal over noise is {quotient:.2g} over all "
        f"{plan.steps} steps, for examples that all agree, and it takes well above 1. The largest "
        f"gradient bound is {widest.gradient_bound:.3g} ({widest.name}). Look where "
        "`clipless.sensitivity` finds it grow, use fewer or narrower layers, larger batches, more "
        "steps, or clip (bounds=ProvedBounds(product_clip=0.1), clipless.nn.ClipGradient).",
        LittleSignalWarning,
        stacklevel=6,
    )
