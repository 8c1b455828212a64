"""Linear layers with a bounded operator norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipless.common import require_positive
from clipless.kernels import GradientLimits, autocasts_to_bfloat16, bounded_linear, to_bfloat16
from clipless.nn._base import AffineModule, draw_orthogonal
from clipless.spectral import Constraint, EuclideanBall, Orthogonal, SpectralBall


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
        weight, bias = parameters["weight"], parameters["bias"]
        if autocasts_to_bfloat16(x):
            x = to_bfloat16(x)
        elif not limits:
            return F.linear(x, weight, bias)
        return bounded_linear(x, weight, bias, limits, self._clip())

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
