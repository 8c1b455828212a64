"""Clipping of cotangents in the backward pass, at a norm that is fixed or follows a quantile."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clipless.common import require_positive
from clipless.kernels import ExceedanceCount, make_finite_and_bounded


@dataclass(frozen=True, kw_only=True)
class FollowQuantile:
    """Move a clipping threshold so that a fraction `quantile` of examples stays below it.

    After every step, `C <- C exp(rate (fraction_above - (1 - quantile)))`, kept below the bound
    that is proved anyway and above `smallest` times it. The fraction is a noisy count, released by
    the step itself: in private training it is one more query of the same mechanism.

    A quantile clips the rare class of an imbalanced data set first, because its examples are the
    ones with large gradients. A fixed threshold does not.
    """

    quantile: float = 0.9
    rate: float = 0.2
    smallest: float = 1e-3

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        if not 0 < self.quantile < 1:
            raise ValueError(f"quantile must lie between 0 and 1, got {self.quantile!r}")
        require_positive("rate", self.rate)
        if not 0 < self.smallest < 1:
            raise ValueError(f"smallest must lie between 0 and 1, got {self.smallest!r}")

    def moved(self, threshold: float, *, fraction_above: float, largest: float) -> float:
        """Return the next threshold."""
        change = self.rate * (fraction_above - (1 - self.quantile))
        # Noise on the count can be large; one step may not do more than double or halve.
        moved = threshold * math.exp(max(-0.7, min(0.7, change)))
        return min(largest, max(self.smallest * largest, moved))


class ClipGradient(nn.Module):
    """Leave activations alone and clip every example's cotangent to norm `norm`.

    What flows to earlier layers is a descent direction rather than a gradient, bounded per example
    whatever follows; entries that are not finite become zeros. `norm` refers to the loss of ONE
    example. When the backward pass starts from a loss in which every example is weighted by a
    factor (1 / b for an average over b examples), set `loss_scale` to that factor: thresholds are
    compared before the division. With `follow`, the private engine moves `norm` after every step.
    """

    def __init__(
        self, norm: float, *, follow: FollowQuantile | None = None, loss_scale: float = 1.0
    ) -> None:
        super().__init__()
        self.norm = require_positive("norm", norm)
        self.follow = follow
        self.loss_scale = require_positive("loss_scale", loss_scale)
        self.exceeded = ExceedanceCount()
        if follow is not None:  # a threshold that moves is part of the model's state
            self.register_buffer("norm_state", torch.tensor(self.norm, dtype=torch.float64))
            self.register_load_state_dict_post_hook(_read_threshold)  # type: ignore[no-untyped-call]

    def threshold(self) -> float:
        """The limit that follows a quantile."""
        return self.norm

    def set_threshold(self, value: float) -> None:
        """Change the limit."""
        self.norm = require_positive("norm", value)
        if self.follow is not None:
            self.norm_state.fill_(self.norm)  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ...) -> the same values."""
        count = None if self.follow is None else self.exceeded
        return clip_cotangent(x, self.norm * self.loss_scale, count)

    def to_torch(self) -> nn.Module:
        """Return the identity: a deployed model has no backward pass."""
        return nn.Identity()

    def extra_repr(self) -> str:
        """The arguments, for printing."""
        follow = "" if self.follow is None else f", follow={self.follow}"
        return f"norm={self.norm:g}{follow}"


def _read_threshold(module: Any, incompatible_keys: object) -> None:
    module.norm = float(module.norm_state)


def clip_cotangent(x: Tensor, norm: float, count: ExceedanceCount | None = None) -> Tensor:
    """Return `x`; in the backward pass make each example's cotangent finite, of norm <= `norm`."""
    clipped: Tensor = _ClipCotangent.apply(x, norm, count)  # type: ignore[no-untyped-call]
    return clipped


class _ClipCotangent(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, norm: float, count: ExceedanceCount | None) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        _, ctx.norm, ctx.count = inputs

    @staticmethod
    def backward(ctx, cotangent: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        if ctx.count is not None:
            flat = torch.nan_to_num(cotangent.detach().unsqueeze(-1).flatten(1))
            ctx.count.add(torch.linalg.vector_norm(flat, dim=1) > ctx.norm)
        return make_finite_and_bounded(cotangent, ctx.norm), None, None
