"""Weights that stay in their constraint sets when they are rounded to bfloat16."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from clipless.bounds import weight_product
from clipless.errors import ConstraintError
from clipless.kernels import LazyCudaGraph
from clipless.nn import AffineModule
from clipless.privacy._precision import UNITS, WEIGHT_ROOM
from clipless.spectral import (
    UNIT_ROUNDOFF,
    ConvolutionBall,
    Orthogonal,
    SpectralBall,
    gram_iteration,
)

# Squarings of the distance from a multiple of the identity, each of which tightens its bound.
_SQUARINGS = 3
# Room for the scalar operations of a bound in double precision.
_SCALARS = 1 + 1e-9


class RoundedWeights:
    """Keeps the norm of every rounded weight below `(1 + WEIGHT_ROOM)` times its constraint.

    That holds for nearly all weights as they are. It is certified after every step; a weight for
    which the certificate fails is made smaller by the factor that makes it true for any rounding.
    Nothing is read back from the device.
    """

    def __init__(
        self, model: nn.Module, *, only: Callable[[Tensor], bool] | None = None
    ) -> None:  # fmt: skip
        groups: defaultdict[Any, list[AffineModule]] = defaultdict(list)
        self._names = {id(m.weight): f"{n}.weight" for n, m in model.named_modules()
                       if isinstance(m, AffineModule)}  # fmt: skip
        layers = (m for m in model.modules() if isinstance(m, AffineModule) and _may_grow(m))
        for module in {id(m.weight): m for m in layers}.values():
            if only is not None and not only(module.weight):
                continue
            key = (module._weight_constraint(), module.weight.shape, _scale(module))
            groups[key, module.weight.device].append(module)
        self._groups = [(key[0], members) for key, members in groups.items()]
        self._habit = LazyCudaGraph()

    def restore(self) -> None:
        """Shrink the weights, in place, whose rounded values are not proved to have their norm."""
        self._habit.run(self._shrink, [m.weight.detach() for _, ms in self._groups for m in ms])

    @torch.no_grad()
    def _shrink(self, tensors: list[Tensor]) -> None:
        rest = iter(tensors)
        for (constraint, _, scale), members in self._groups:
            weights = [next(rest) for _ in members]
            holds = self._holds(torch.stack(weights), constraint, scale)
            safe = 1 / (1 + UNITS["bfloat16"] * math.sqrt(weight_product(members[0]).rank))
            factors = torch.where(holds, 1.0, safe).to(weights[0].dtype)
            torch._foreach_mul_(weights, list(factors.unbind()))

    @torch.no_grad()
    def check(self) -> None:
        """Refuse weights whose rounded values are not proved to have their norm."""
        for (constraint, _, scale), members in self._groups:
            weights = torch.stack([module.weight for module in members])
            holds = self._holds(weights, constraint, scale).tolist()
            for module, fine in zip(members, holds, strict=True):
                if not fine:
                    raise ConstraintError(
                        f"{self._names[id(module.weight)]}: rounded to bfloat16, it is not proved "
                        f"to keep its constraint of {module.norm:g}. Make it slightly smaller, "
                        "or train in float32."
                    )

    def _holds(self, weights: Tensor, constraint: Any, scale: float) -> Tensor:
        """Whether each weight, rounded as the layer rounds it, keeps its constraint."""
        rounded = (weights * scale).to(torch.bfloat16).to(torch.float64) / scale
        bound = (
            constraint.bound(rounded)
            if isinstance(constraint, ConvolutionBall)
            else _norm_bound(constraint._matrices(rounded)).reshape(-1, constraint.groups).amax(1)
        )
        return bound <= constraint.radius * (1 + WEIGHT_ROOM)


def _may_grow(module: AffineModule) -> bool:
    """Whether rounding can enlarge the norm of a layer's weight by more than one unit."""
    return isinstance(module._weight_constraint(), Orthogonal | SpectralBall | ConvolutionBall)


def _scale(module: Any) -> float:
    """The factor that a layer multiplies its weight by before it is rounded."""
    return float(getattr(module, "scale", 1.0))


def _norm_bound(matrices: Tensor) -> Tensor:
    """Bound spectral norms: with G the Gram matrix and mu its mean, `||G|| <= mu + ||G - mu I||`.

    Good for matrices near orthogonal ones, and those with few large singular values; an upper
    bound for all. Float64.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        matrices = matrices.mT
    gram = matrices @ matrices.mT
    size = gram.shape[-1]
    energy = torch.diagonal(gram, dim1=-2, dim2=-1).sum(dim=-1)
    mean = energy / size
    identity = torch.eye(size, dtype=gram.dtype, device=gram.device)
    deviation = gram_iteration(gram - mean[:, None, None] * identity, _SQUARINGS)
    error = (matrices.shape[-1] + size + 8) * UNIT_ROUNDOFF * energy
    return torch.sqrt((mean + deviation + error) * _SCALARS)
