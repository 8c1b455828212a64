"""Projected gradient descent in a Euclidean ball: the attack that tries to break certificates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clipless.bounds import unwrap_module
from clipless.robustness._certifier import EVALUATION_BATCH, plain_copy, reference_tensor

_MOMENTUM = 0.75

Box = tuple[float, float]


@dataclass(frozen=True)
class PGDResult:
    """The best attack found for every example.

    `adversarial` has the shape of the inputs and lies within `radius` of them, `success` says
    whether the decision there differs from the one attacked, `margin` by how much the attacked
    class leads there (negative after success).
    """

    adversarial: Tensor
    success: Tensor
    margin: Tensor


def pgd_attack(
    model: nn.Module,
    x: Tensor,
    y: Tensor | None = None,
    *,
    radius: float | Tensor,
    steps: int = 40,
    restarts: int = 5,
    threshold: float = 0.0,
    box: Box | None = None,
    dtype: torch.dtype | None = None,
    batch_size: int = EVALUATION_BATCH,
    seed: int = 0,
) -> PGDResult:
    """Search, within a Euclidean radius of each example, for an input that is decided otherwise.

    Normalised gradient steps with momentum and decreasing length descend the margin between the
    attacked class and the best other one. The first start is a full step along the gradient, the
    others are random; from the third on, each aims at one other class, the nearest first. It
    works on a copy from which gradient clipping is removed. Any model of torch operations can be
    attacked, certified or not.

    Args:
        x: (batch, ...) inputs; examples that are not finite are left alone.
        y: the classes to get away from, by default the model's own decisions.
        radius: one for all, or (batch,), in the units of `x`. The results keep it exactly.
        box: limits of every entry, such as (0, 1) for pixels; none by default, since certificates
            do not need them.
        dtype: the precision of the attack, by default the model's.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
        >>> _ = model[0].weight.data.copy_(torch.eye(2))
        >>> x = torch.tensor([[3.0, 1.0]])  # sqrt(2) from where both logits are equal
        >>> [bool(pgd_attack(model, x, radius=r).success) for r in (1.41, 1.42)]
        [False, True]
    """
    if steps < 1 or restarts < 1:
        raise ValueError(f"steps and restarts must be at least 1, got {steps} and {restarts}")
    inner = unwrap_module(model)
    reference = reference_tensor(inner)
    working = reference.dtype if dtype is None else dtype
    attack = Attack(
        plain_copy(inner, working), threshold=threshold, steps=steps, restarts=restarts, box=box
    )
    radii = torch.as_tensor(radius, dtype=working, device=x.device).expand(len(x))
    if not bool((radii >= 0).all() & torch.isfinite(radii).all()):
        raise ValueError("radius must be finite and not negative")
    generator = torch.Generator(device=reference.device).manual_seed(seed)
    parts = []
    for chosen in torch.arange(len(x), device=x.device).split(batch_size) if len(x) else ():
        inputs = x[chosen].to(reference.device, working)
        labels = attack.decide(inputs) if y is None else y[chosen].to(reference.device).long()
        parts.append(attack.run(inputs, labels, radii[chosen].to(inputs), generator))
    if not parts:
        nothing = torch.zeros(0, device=x.device)
        return PGDResult(x.to(working), nothing.bool(), nothing.to(working))
    return PGDResult(
        torch.cat([part.adversarial for part in parts]).to(x.device),
        torch.cat([part.success for part in parts]).to(x.device),
        torch.cat([part.margin for part in parts]).to(x.device),
    )


class Attack:
    """An attack on one function, prepared once and run on batches."""

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        *,
        threshold: float,
        steps: int,
        restarts: int,
        box: Box | None = None,
    ) -> None:
        self._function, self._threshold, self._box = function, threshold, box
        self._steps, self._restarts = steps, restarts

    def decide(self, x: Tensor) -> Tensor:
        """Return (batch,) decisions."""
        with torch.no_grad():
            logits = self._logits(x)
        return (logits[:, 0] > 0).long() if logits.shape[1] == 1 else logits.argmax(dim=1)

    def run(self, x: Tensor, y: Tensor, radius: Tensor, generator: torch.Generator) -> PGDResult:
        """Attack one batch, all tensors on the function's device and in its precision."""
        if self._box is not None and not bool(((x >= self._box[0]) & (x <= self._box[1])).all()):
            raise ValueError(f"some inputs lie outside the box {self._box}")
        y = (y > 0).long() if self._logits(x[:1]).shape[1] == 1 else y
        best = x.clone()
        margin = self._margin(x, y).detach()
        active = torch.isfinite(x).flatten(1).all(dim=1) & (margin > 0)
        rival = self._rivals(x, y)
        for restart in range(self._restarts):
            rows = active.nonzero()[:, 0]
            if len(rows) == 0:
                break
            aim = None
            if restart >= 2 and rival.shape[1] > 1:
                aim = rival[rows, (restart - 2) % rival.shape[1]]
            found, value = self._descend(
                x[rows], y[rows], radius[rows], aim, restart == 0, generator
            )
            better = value < margin[rows]
            best[rows[better]], margin[rows[better]] = found[better], value[better]
            active[rows] = margin[rows] > 0
        changed = self.decide(best) != y
        return PGDResult(best, changed & torch.isfinite(x).flatten(1).all(dim=1), margin)

    # --- one restart -----------------------------------------------------------------------------

    def _descend(
        self,
        x: Tensor,
        y: Tensor,
        radius: Tensor,
        aim: Tensor | None,
        along_gradient: bool,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        if along_gradient:
            change = -self._direction(x, y, aim, generator) * _column(radius, x)
        else:
            random = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
            length = torch.rand(len(x), generator=generator, device=x.device, dtype=x.dtype).sqrt()
            change = _unit(random) * _column(radius * length, x)
        momentum = torch.zeros_like(x)
        best, margin = x.clone(), torch.full_like(radius, math.inf)
        for step in range(self._steps + 1):
            moved = self._project(x, change, radius)
            with torch.no_grad():
                value = self._margin(moved, y)
            better = value < margin
            best[better], margin[better] = moved[better], value[better]
            if step == self._steps:
                break
            slope = self._direction(moved, y, aim, generator)
            momentum = _MOMENTUM * momentum + slope
            length = radius * max(1 - step / self._steps, 0.02)
            change = moved - x - _unit(momentum) * _column(length, x)
        return best, margin

    def _direction(
        self, x: Tensor, y: Tensor, aim: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """Unit gradients of the margin; random ones where it is flat."""
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self._margin(x, y, aim).sum(), x)
        slope = torch.nan_to_num(slope)
        flat = _unit(slope).flatten(1).square().sum(dim=1) < 0.5
        if bool(flat.any()):
            random = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
            slope = torch.where(_column(flat, x), random, slope)
        return _unit(slope)

    def _project(self, x: Tensor, change: Tensor, radius: Tensor) -> Tensor:
        """Bring `x + change` into the box and the ball, the rounding of the sum included."""
        if self._box is not None:
            change = (x + change).clamp(*self._box) - x
        eps = torch.finfo(x.dtype).eps
        length = _length(change)
        limit = (radius - eps * (_length(x) + 2 * radius)).clamp(min=0)
        factor = torch.where(length > limit, limit / length.clamp(min=1e-300), 1.0)
        return x + change * _column(factor, x)

    # --- margins ---------------------------------------------------------------------------------

    def _logits(self, x: Tensor) -> Tensor:
        output = self._function(x)
        logits = output.reshape(len(x), -1)
        return logits - self._threshold if logits.shape[1] == 1 else logits

    def _margin(self, x: Tensor, y: Tensor, aim: Tensor | None = None) -> Tensor:
        """How far class y leads, (batch,): over the best other class, or over the one aimed at."""
        logits = self._logits(x)
        if logits.shape[1] == 1:
            return logits[:, 0] * (2 * y - 1)
        own = logits.gather(1, y[:, None])[:, 0]
        if aim is not None:
            return own - logits.gather(1, aim[:, None])[:, 0]
        return own - logits.scatter(1, y[:, None], -math.inf).amax(dim=1)

    def _rivals(self, x: Tensor, y: Tensor) -> Tensor:
        """The other classes of every example, the best first."""
        with torch.no_grad():
            logits = self._logits(x)
        if logits.shape[1] == 1:
            return y[:, None]
        others = logits.scatter(1, y[:, None], -math.inf)
        return others.argsort(dim=1, descending=True)[:, : logits.shape[1] - 1]


def _column(values: Tensor, x: Tensor) -> Tensor:
    return values.reshape(-1, *([1] * (x.ndim - 1)))


def _length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.flatten(1), dim=1)


def _unit(x: Tensor) -> Tensor:
    """Rows of norm one; zero stays zero."""
    return x / _column(_length(x).clamp(min=torch.finfo(x.dtype).tiny), x)
