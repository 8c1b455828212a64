"""Linear layers with a bounded operator norm, and what they share with convolutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipless.common import require_positive
from clipless.kernels import (
    ExceedanceCount,
    GradientLimits,
    LimitKind,
    autocasts_to_bfloat16,
    bounded_linear_layer,
)
from clipless.nn._base import ConstrainedModule
from clipless.nn._gradient import FollowQuantile
from clipless.spectral import Constraint, EuclideanBall, Orthogonal, SpectralBall


class AffineModule(ConstrainedModule):
    """A constrained linear map with an optional bias in a Euclidean ball of radius `bias_norm`.

    `weight_clip`, if set, is a limit for the norm of one example's weight gradient, enforced by
    product clipping: the gradient is then a descent direction rather than a gradient. Like the
    norm of `ClipGradient` it refers to the loss of ONE example; when every example's loss is
    weighted by a factor (1 / b), `loss_scale` is that factor.
    """

    norm: float
    bias_norm: float
    weight_clip: float | None = None
    follow: FollowQuantile | None = None
    exceeded: ExceedanceCount
    """How many examples were clipped since it was last taken; there with `follow`."""
    loss_scale: float = 1.0

    def follow_quantile(self, follow: FollowQuantile | None) -> None:
        """Let `weight_clip` follow a quantile in private training; it then is part of the state."""
        self.follow = follow
        self.exceeded = ExceedanceCount()
        if follow is None:
            self._buffers.pop("weight_clip_state", None)
        elif self.weight_clip is not None:
            state = torch.tensor(self.weight_clip, dtype=torch.float64)
            self.register_buffer("weight_clip_state", state)
            self.register_load_state_dict_post_hook(_read_weight_clip)  # type: ignore[no-untyped-call]

    def _clip(self) -> LimitKind:
        count = None if self.follow is None else self.exceeded
        return LimitKind(by_design=self.weight_clip is not None, count=count)

    def threshold(self) -> float:
        """The limit that follows a quantile."""
        if self.weight_clip is None:
            raise RuntimeError("this layer has no weight_clip that could follow a quantile")
        return self.weight_clip

    def set_threshold(self, value: float) -> None:
        """Change the limit of the weight's gradient."""
        self.weight_clip = require_positive("weight_clip", value)
        state = self._buffers.get("weight_clip_state")
        if state is not None:
            state.fill_(self.weight_clip)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer; with product clipping, also outside private training."""
        clip = self.weight_clip
        limits = {} if clip is None else {"weight": clip * self.loss_scale}
        own: dict[str, Any] = {"weight": self.weight, "bias": self.bias}
        return self.forward_bounded(x, own, limits)

    def _register_bias(self, size: int, wanted: bool, bias_norm: float, **where: object) -> None:
        self.bias_norm = require_positive("bias_norm", bias_norm)
        if wanted:
            self.bias = nn.Parameter(torch.zeros(size, **where))  # type: ignore[call-overload]
        else:
            self.register_parameter("bias", None)

    def _weight_constraint(self) -> Constraint:
        raise NotImplementedError

    def constraints(self) -> Mapping[str, Constraint]:
        """The weight's set and, with a bias, its ball."""
        constraints: dict[str, Constraint] = {"weight": self._weight_constraint()}
        if self.bias is not None:
            constraints["bias"] = EuclideanBall(self.bias_norm)
        return constraints


def _read_weight_clip(module: Any, incompatible_keys: object) -> None:
    if "weight_clip_state" in module._buffers:
        module.weight_clip = float(module.weight_clip_state)


def draw_orthogonal(weight: Tensor, *, gain: float) -> None:
    """Fill a weight with a random orthogonal matrix, drawn in a precision that can hold one."""
    if weight.dtype in (torch.float32, torch.float64):
        nn.init.orthogonal_(weight, gain=gain)
    else:
        weight.copy_(nn.init.orthogonal_(torch.empty_like(weight, dtype=torch.float32), gain=gain))


class _Linear(AffineModule):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        norm: float,
        bias_norm: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if in_features < 1 or out_features < 1:
            raise ValueError(f"features must be positive, got {in_features} -> {out_features}")
        self.in_features = in_features
        self.out_features = out_features
        self.norm = require_positive("norm", norm)
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, device=device, dtype=dtype)
        )
        self._register_bias(out_features, bias, bias_norm, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw an orthogonal weight of norm `norm`, a zero bias, and project."""
        with torch.no_grad():
            draw_orthogonal(self.weight, gain=self.norm)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        self.project()

    def forward_bounded(
        self, x: Tensor, parameters: Mapping[str, Tensor], limits: GradientLimits
    ) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        if not limits and not autocasts_to_bfloat16(x):
            return F.linear(x, parameters["weight"], parameters["bias"])
        return bounded_linear_layer(x, parameters, limits=limits, clip=self._clip())

    def prepared(self, limits: GradientLimits) -> Callable[..., Tensor]:
        """Return `forward_bounded` for many passes with these limits, the layer being as it is."""
        return partial(bounded_linear_layer, limits=limits, clip=self._clip())

    def to_torch(self) -> nn.Module:
        """Return an `nn.Linear` with the same weights."""
        plain = nn.Linear(
            self.in_features,
            self.out_features,
            bias=self.bias is not None,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        plain.load_state_dict(self.state_dict())
        return plain

    def extra_repr(self) -> str:
        """The arguments, for printing."""
        bias = f", bias_norm={self.bias_norm:g}" if self.bias is not None else ", bias=False"
        clip = "" if self.weight_clip is None else f", weight_clip={self.weight_clip:g}"
        return f"{self.in_features}, {self.out_features}, norm={self.norm:g}{bias}{clip}"


class SpectralLinear(_Linear):
    """Linear layer whose weight has spectral norm at most `norm`.

    With `constraint="orthogonal"` (default) the projection moves all singular values to `norm`,
    which preserves gradient norms; with `"ball"` it only clips those above `norm`. Either way
    the layer is `norm`-Lipschitz. The bias, off by default because it costs sensitivity, stays in
    a ball of radius `bias_norm`.

    Example:
        >>> layer = SpectralLinear(8, 4)
        >>> layer(torch.zeros(2, 8)).shape, layer.certificate().holds
        (torch.Size([2, 4]), True)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        norm: float = 1.0,
        bias_norm: float = 1.0,
        constraint: Literal["orthogonal", "ball"] = "orthogonal",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, norm, bias_norm, device, dtype)
        if constraint not in ("orthogonal", "ball"):
            raise ValueError(f'constraint must be "orthogonal" or "ball", got {constraint!r}')
        self.constraint = constraint
        self.reset_parameters()

    def _weight_constraint(self) -> Constraint:
        return (Orthogonal if self.constraint == "orthogonal" else SpectralBall)(self.norm)

    def extra_repr(self) -> str:
        """The arguments, for printing."""
        return f"{super().extra_repr()}, constraint={self.constraint!r}"


class FrobeniusLinear(_Linear):
    """Linear layer whose weight has Frobenius norm at most `norm`: cheap, and exact for one output.

    The spectral norm is at most the Frobenius norm, so the layer is `norm`-Lipschitz.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        norm: float = 1.0,
        bias_norm: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, norm, bias_norm, device, dtype)
        self.reset_parameters()

    def _weight_constraint(self) -> Constraint:
        return EuclideanBall(self.norm)
