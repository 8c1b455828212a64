"""Normalisation of features with known Lipschitz constants: groups, channels, mixing.

Dividing by an example's own standard deviation has no Lipschitz constant, unless the deviation is
kept away from zero; dividing by constants has, but a small deviation makes it large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipless.common import require_positive
from clipless.kernels import scale_into_ball
from clipless.spectral import spectral_norm_bound


class GroupNormalize(nn.Module):
    """Bring each group of channels to mean zero and standard deviation one, or below `floor` less.

    `(x - mean) / max(deviation, floor)` over each of `groups` groups of consecutive channels and
    all positions, example by example, in evaluation as in training. With n entries in a group this
    is 1 / floor times the projection of the centred group onto a ball of radius floor * sqrt(n):
    it is (1 / floor)-Lipschitz, and the norm of each group's output is at most sqrt(n), exactly
    that where the deviation is at least `floor`. Without a floor, as in `nn.GroupNorm`, no
    Lipschitz constant exists.

    Example:
        >>> GroupNormalize(2, floor=0.5)(torch.tensor([[1.0, 3.0, 0.0, 0.2]]))
        tensor([[-1.0000,  1.0000, -0.2000,  0.2000]])
    """

    def __init__(self, groups: int, *, floor: float) -> None:
        super().__init__()
        if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
            raise ValueError(f"groups must be a positive integer, got {groups!r}")
        self.groups = groups
        self.floor = require_positive("floor", floor)

    @property
    def lipschitz(self) -> float:
        """1 / floor."""
        return 1.0 / self.floor

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, ...) -> the same shape; groups must divide the channels."""
        grouped = x.unflatten(1, (self.groups, -1)).flatten(2)
        root_size = grouped.size(-1) ** 0.5
        centred = grouped - grouped.mean(dim=-1, keepdim=True)
        rows = (centred / (self.floor * root_size)).flatten(0, 1)
        return (scale_into_ball(rows, 1.0) * root_size).view_as(x)

    def extra_repr(self) -> str:
        """The arguments, for printing."""
        return f"{self.groups}, floor={self.floor:g}"


class ChannelStandardize(nn.Module):
    """`(x - mean) / deviation`, one constant pair for each channel: a fixed affine map.

    Its Lipschitz constant is one over the smallest deviation, usually far above one, so
    certificates in front of it shrink by that factor; the norm of its output grows by it and by the
    norm of the shift. Put `BoundedInput` behind it to train on the result.

    **The constants are released with the model.** Take public ones, or private statistics that are
    in the ledger; the layer keeps them as buffers and never changes them.

    Args:
        mean: one number a channel.
        deviation: one number above 0 a channel.

    Example:
        >>> layer = ChannelStandardize([1.0, 2.0], [2.0, 0.5])
        >>> layer(torch.tensor([[5.0, 2.5]])), layer.lipschitz
        (tensor([[2., 1.]]), 2.0)
    """

    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        mean: Tensor | Sequence[float],
        deviation: Tensor | Sequence[float],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, values in (("mean", mean), ("deviation", deviation)):
            wide = torch.as_tensor(values, dtype=torch.float64).detach()
            own = wide.to(device=device, dtype=dtype or torch.get_default_dtype(), copy=True)
            self.register_buffer(name, own)
        if self.mean.ndim != 1 or self.mean.shape != self.deviation.shape or not len(self.mean):
            raise ValueError(
                "mean and deviation must hold one number for each channel, got shapes "
                f"{tuple(self.mean.shape)} and {tuple(self.deviation.shape)}"
            )
        self.lipschitz, self.shift_norm = self.constants()
        if not math.isfinite(self.lipschitz + self.shift_norm):
            raise ValueError("mean must be finite, and deviation finite and greater than 0")
        self.register_load_state_dict_post_hook(_read_constants)  # type: ignore[no-untyped-call]

    def constants(self) -> tuple[float, float]:
        """The Lipschitz constant, and the norm of `mean / deviation`: infinite if there is none."""
        mean, deviation = self.mean.double(), self.deviation.double()
        gain = 1 / deviation
        if not bool((gain > 0).all() & gain.isfinite().all() & mean.isfinite().all()):
            return math.inf, math.inf
        return gain.max().item(), torch.linalg.vector_norm(mean * gain).item()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, ...) -> the same shape."""
        return ((x.movedim(1, -1) - self.mean) / self.deviation).movedim(-1, 1)

    def extra_repr(self) -> str:
        """The size, for printing."""
        return f"{len(self.mean)}, lipschitz={self.lipschitz:g}"


def _read_constants(module: ChannelStandardize, incompatible_keys: object) -> None:
    """Whoever watches the model's numbers for changes then sees that its constants are others."""
    module.lipschitz, module.shift_norm = module.constants()


class ChannelMix(nn.Module):
    """`x -> A x` at every position, with one fixed matrix A for the channels: a linear map.

    Its Lipschitz constant is the spectral norm of A. Decorrelating channels by the inverse root of
    their covariance is its use: put `ChannelStandardize` before and `BoundedInput` behind it.

    **The matrix is released with the model.** Take a public one, or one from private statistics
    that are in the ledger; the layer keeps it as a buffer and never changes it.

    Args:
        matrix: (channels out, channels in).

    Example:
        >>> layer = ChannelMix([[0.0, 2.0], [1.0, 0.0]])
        >>> layer(torch.tensor([[5.0, 2.5]])), round(layer.lipschitz, 6)
        (tensor([[5., 5.]]), 2.0)
    """

    matrix: Tensor

    def __init__(
        self,
        matrix: Tensor | Sequence[Sequence[float]],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        wide = torch.as_tensor(matrix, dtype=torch.float64).detach()
        own = wide.to(device=device, dtype=dtype or torch.get_default_dtype(), copy=True)
        if own.ndim != 2 or not own.numel() or not bool(own.isfinite().all()):
            raise ValueError(
                "matrix must hold finite numbers, one row for each channel that comes out, got "
                f"shape {tuple(own.shape)}"
            )
        self.register_buffer("matrix", own)
        self.lipschitz = self.constant()
        self.register_load_state_dict_post_hook(_read_constant)  # type: ignore[no-untyped-call]

    def constant(self) -> float:
        """The Lipschitz constant, certified: infinite if the matrix is not finite."""
        if not bool(self.matrix.isfinite().all()):
            return math.inf
        return spectral_norm_bound(self.matrix.detach().double().cpu()[None]).item()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels in, ...) -> (batch, channels out, ...)."""
        return F.linear(x.movedim(1, -1), self.matrix).movedim(-1, 1)

    def extra_repr(self) -> str:
        """The sizes, for printing."""
        out, into = self.matrix.shape
        return f"{into}, {out}, lipschitz={self.lipschitz:g}"


def _read_constant(module: ChannelMix, incompatible_keys: object) -> None:
    module.lipschitz = module.constant()
