"""Scores of canaries from what training released, step by step."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from clipless.audit._canaries import Examples
from clipless.losses import Loss
from clipless.privacy import PoissonSampling, PrivacyEngine

_ROWS = 8192
_STEP = 1e-4


class ReleaseScores:
    """Watches the noisy gradients of a run and scores canaries by how much of them is in there.

    What the optimizer finds in `p.grad` is what a step releases, and the guarantee is about an
    adversary who sees all of it. For each canary, the gradient of its own loss at the weights of
    the step is what it would have added. The score is the sum over steps of what the inner
    product of the two, divided by the variance of the noise, says for the canary; with Poisson
    sampling, by the likelihoods of it having been drawn or not. For a canary at its bound, whose
    gradient no other example shares, that is the best test there is.

    Inner products are differences of the canaries' losses along the released gradient, in double
    precision: two forward passes over the canaries for each step, and no gradients of single
    examples. Where cotangents are clipped, the direction is that of the loss before clipping.

    Call it after `make_private`; `scores` is complete when training ends. With `stand_ins`, the
    score of a stand-in is subtracted.

    Example:
        >>> model = torch.nn.Sequential(
        ...     clipless.nn.BoundedInput(1.0), clipless.nn.SpectralLinear(4, 2))
        >>> canaries = (torch.eye(4), torch.tensor([0, 1, 0, 1]))
        >>> criterion = clipless.losses.CrossEntropy()
        >>> engine = PrivacyEngine()
        >>> model, optimizer, loader = engine.make_private(
        ...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ...     data_loader=torch.utils.data.DataLoader(
        ...         torch.utils.data.TensorDataset(*canaries), batch_size=2),
        ...     criterion=criterion, noise_multiplier=1.0)
        >>> with ReleaseScores(engine, canaries) as watch:
        ...     for x, y in loader:
        ...         optimizer.zero_grad()
        ...         criterion(model(x), y).backward()
        ...         optimizer.step()
        >>> watch.steps, watch.scores.shape
        (2, torch.Size([4]))
    """

    def __init__(
        self, engine: PrivacyEngine, canaries: Examples, *, stand_ins: Examples | None = None
    ) -> None:
        session = engine.session
        self._engine = engine
        self._parameters = dict(session.model.named_parameters())
        self._copy = copy.deepcopy(session.model).double().eval()
        self._criterion = copy.deepcopy(session.criterion)
        self._canaries = [canaries] if stand_ins is None else [canaries, stand_ins]
        self.scores = torch.zeros(len(canaries[0]), dtype=torch.float64)
        """The scores so far, (m,): high ones speak for a canary being in."""
        self.steps = 0
        """How many steps were watched."""
        # Registered after the engine's own hook, so that it finds the gradients with their noise
        # and the weights they were taken at.
        self._handle = session.optimizer.register_step_pre_hook(self._watch)

    def close(self) -> None:
        """Stop watching."""
        self._handle.remove()

    def __enter__(self) -> ReleaseScores:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    @torch.no_grad()
    def _watch(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        plan = self._engine.plan
        self.steps += 1
        direction: dict[str, Tensor] = {}
        for name, deviation in plan.noise_deviations.items():
            parameter = self._parameters.get(name)
            if parameter is None or parameter.grad is None:
                continue  # a count that is released beside the gradients
            # In units of one example's own gradient, so that the public batch size drops out.
            noise = plan.expected_batch_size * deviation**2 if deviation > 0 else 1.0
            direction[name] = parameter.grad.double() / noise
        length = math.sqrt(sum(float(each.square().sum()) for each in direction.values()))
        if not (length > 0 and math.isfinite(length)):
            return
        ahead, behind = (
            {
                name: self._parameters[name].double() + side * _STEP / length * each
                for name, each in direction.items()
            }
            for side in (1.0, -1.0)
        )
        for sign, (inputs, targets) in zip((1.0, -1.0), self._canaries, strict=False):
            rise = self._losses(ahead, inputs, targets) - self._losses(behind, inputs, targets)
            self.scores += sign * self._evidence((length / (2 * _STEP)) * rise)

    def _evidence(self, product: Tensor) -> Tensor:
        """Return what a step says for a canary, from its inner product with what was released.

        Where a canary is sampled with probability q, that is the log-likelihood ratio
        `log(1 - q + q exp(product - mu^2 / 2))` of a canary whose gradient is at its bound, mu
        being the sensitivity in units of noise: a canary that is seen clearly in one step is not
        lost among the steps in which it was not there.
        """
        plan = self._engine.plan
        sampling, sigma = plan.sampling, plan.noise_multiplier
        if not isinstance(sampling, PoissonSampling) or sampling.rate == 1.0 or sigma == 0:
            return product
        odds = math.log(sampling.rate) + product - 0.5 / sigma**2
        return torch.logaddexp(torch.full_like(odds, math.log1p(-sampling.rate)), odds)

    def _losses(self, weights: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        def call(rows: Tensor) -> Tensor:
            return functional_call(self._copy, weights, (rows,))

        return example_losses(call, self._criterion, inputs, targets, self._copy)


def example_losses(
    call: Any, criterion: Loss, inputs: Tensor, targets: Tensor, model: nn.Module
) -> Tensor:
    """Return the loss of every example, (m,), in double precision on the CPU.

    Inputs are brought to the device and precision of the model's parameters.
    """
    like = next(model.parameters())
    found = []
    for start in range(0, len(inputs), _ROWS):
        rows, labels = (
            part[start : start + _ROWS].to(like if part.is_floating_point() else like.device)
            for part in (inputs, targets)
        )
        found.append(criterion.per_example(call(rows), labels).double().cpu())
    return torch.cat(found)
