"""Convolutions with a bounded operator norm.

The stored weight is the unit-scale kernel Psi of reshaped-kernel orthogonalisation; the layer
convolves with `Psi / sqrt(m)`, m being the number of patches a pixel can lie in. If the reshaped
Psi has spectral norm at most c, the patches' energy is at most m times the image's, and so the
convolution is c-Lipschitz, and its output is c-Lipschitz-like in Psi: ||J_Psi|| <= ||x||.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipless.common import require_positive
from clipless.kernels import (
    ConvolutionGeometry,
    GradientLimits,
    autocasts_to_bfloat16,
    bounded_convolution,
    example_norm,
    is_compiling,
    per_example_parameter,
    precomputed_norm,
    to_bfloat16,
)
from clipless.nn._linear import AffineModule, draw_orthogonal
from clipless.spectral import (
    Constraint,
    ConvolutionBall,
    Orthogonal,
    SpectralBall,
    patch_multiplicity,
)

Size = int | Sequence[int]


class _SpectralConv(AffineModule):
    axes: ClassVar[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | Literal["same", "valid"] = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: Literal["zeros", "circular"] = "zeros",
        *,
        norm: float = 1.0,
        bias_norm: float = 1.0,
        constraint: Literal["orthogonal", "ball"] = "orthogonal",
        certificate_size: Size | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(
                f"groups={groups} must divide in_channels={in_channels} and "
                f"out_channels={out_channels}"
            )
        if constraint not in ("orthogonal", "ball"):
            raise ValueError(f'constraint must be "orthogonal" or "ball", got {constraint!r}')
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = self._per_axis("kernel_size", kernel_size)
        self.stride = self._per_axis("stride", stride)
        self.dilation = self._per_axis("dilation", dilation)
        self.groups = groups
        self.padding_mode = padding_mode
        self.padding = self._resolve_padding(padding)
        self.norm = require_positive("norm", norm)
        self.constraint = constraint
        self.certificate_size = (
            None
            if certificate_size is None
            else self._per_axis("certificate_size", certificate_size)
        )
        shape = (out_channels, in_channels // groups, *self.kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self._register_bias(out_channels, bias, bias_norm, device=device, dtype=dtype)
        self.reset_parameters()

    @property
    def multiplicity(self) -> int:
        """In how many patches one pixel can lie: m."""
        return patch_multiplicity(self.kernel_size, self.stride, self.dilation)

    @property
    def scale(self) -> float:
        """The factor N = 1 / sqrt(m) between the stored kernel and the one convolved with."""
        return 1.0 / math.sqrt(self.multiplicity)

    def reset_parameters(self) -> None:
        """Draw an orthogonal kernel in every group, a zero bias, and project."""
        with torch.no_grad():
            for part in self.weight.chunk(self.groups):
                draw_orthogonal(part, gain=self.norm)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        self.project()

    def forward_bounded(
        self, x: Tensor, parameters: Mapping[str, Tensor], limits: GradientLimits
    ) -> Tensor:
        """(batch, in_channels, *size) -> (batch, out_channels, *size')."""
        weight, bias = parameters["weight"], parameters["bias"]
        if autocasts_to_bfloat16(x):
            x = to_bfloat16(x)
        symmetric = [before for before, _ in self.padding]
        padded = self.padding_mode == "circular"
        norm = None
        if "weight" in limits:
            norm = example_norm(x.detach()) if padded else precomputed_norm(x)
        if padded:
            x = F.pad(x, self._flat_padding(), mode="circular")
            symmetric = [0] * self.axes
        elif symmetric != [after for _, after in self.padding]:
            x = F.pad(x, self._flat_padding())
            symmetric = [0] * self.axes
        geometry = (list(self.stride), symmetric, list(self.dilation), self.groups)
        if is_compiling() and x.dtype != torch.bfloat16:
            # The factor comes last, where a compiler makes it a part of the kernels around it.
            image = self._convolve(x, weight, None, geometry, norm, limits) * self.scale
            if bias is None:
                return image
            shift = per_example_parameter(bias, x.shape[0], limits.get("bias"))
            return image + shift.view(*shift.shape, *[1] * self.axes)
        # The weight's gradient is N times the kernel's.
        factors = {"weight": 1 / self.scale, "bias": 1.0}
        limits = {name: factors[name] * limit for name, limit in limits.items()}
        return self._convolve(x, weight * self.scale, bias, geometry, norm, limits)

    def _convolve(
        self,
        x: Tensor,
        kernel: Tensor,
        bias: Tensor | None,
        geometry: ConvolutionGeometry,
        norm: Tensor | None,
        limits: GradientLimits,
    ) -> Tensor:
        """Convolve, with limits if there are any: patches have norm at most sqrt(m) ||x||."""
        if not limits and x.dtype != torch.bfloat16:
            return (F.conv1d if self.axes == 1 else F.conv2d)(x, kernel, bias, *geometry)
        with _kept_alike(norm):
            return bounded_convolution(
                x, kernel, bias, geometry, gain=math.sqrt(self.multiplicity), input_norm=norm,
                limits=limits, clip=self._clip(),
            )  # fmt: skip

    def _weight_constraint(self) -> Constraint:
        if self.certificate_size is not None:
            return ConvolutionBall(
                radius=self.norm,
                groups=self.groups,
                scale=self.scale,
                multiplicity=self.multiplicity,
                input_size=self.certificate_size,
                dilation=self.dilation,
                circular=self.padding_mode == "circular",
                orthogonal=self.constraint == "orthogonal",
            )
        kind = Orthogonal if self.constraint == "orthogonal" else SpectralBall
        return kind(self.norm, self.groups)

    def _per_axis(self, name: str, value: Size) -> tuple[int, ...]:
        values = (value,) * self.axes if isinstance(value, int) else tuple(value)
        if len(values) != self.axes or any(not isinstance(v, int) or v < 1 for v in values):
            raise ValueError(f"{name} must be {self.axes} positive integer(s), got {value!r}")
        return values

    def _resolve_padding(self, padding: Size | str) -> tuple[tuple[int, int], ...]:
        """Return how much is added before and after each axis."""
        totals = [d * (k - 1) for k, d in zip(self.kernel_size, self.dilation, strict=True)]
        same = tuple((total // 2, total - total // 2) for total in totals)
        if isinstance(padding, str):
            if padding not in ("same", "valid"):
                raise ValueError(f'padding must be "same", "valid" or sizes, got {padding!r}')
            resolved = same if padding == "same" else ((0, 0),) * self.axes
        else:
            sizes = (padding,) * self.axes if isinstance(padding, int) else tuple(padding)
            if len(sizes) != self.axes or any(not isinstance(p, int) or p < 0 for p in sizes):
                raise ValueError(f"padding must be {self.axes} sizes >= 0, got {padding!r}")
            resolved = tuple((p, p) for p in sizes)
        if self.padding_mode == "zeros":
            return resolved
        if self.padding_mode != "circular":
            raise ValueError(
                f"padding_mode={self.padding_mode!r} repeats pixels in a way that breaks the bound "
                'of the patch count: use "zeros" or "circular"'
            )
        if any(sum(pair) != total for pair, total in zip(resolved, totals, strict=True)):
            raise ValueError(
                "circular padding is sound only with a total of dilation * (kernel_size - 1) on "
                f'every axis, {tuple(totals)} here: use padding="same"'
            )
        return resolved

    def _flat_padding(self) -> list[int]:
        """The layout of `F.pad`: last axis first."""
        return [amount for pair in reversed(self.padding) for amount in pair]

    def to_torch(self) -> nn.Module:
        """Return a torch convolution with the scale in its kernel, behind a pad where needed."""
        symmetric = all(before == after for before, after in self.padding)
        plain = (nn.Conv1d if self.axes == 1 else nn.Conv2d)(
            self.in_channels,
            self.out_channels,
            self.kernel_size,  # type: ignore[arg-type]
            stride=self.stride,  # type: ignore[arg-type]
            padding=tuple(before for before, _ in self.padding) if symmetric else 0,  # type: ignore[arg-type]
            dilation=self.dilation,  # type: ignore[arg-type]
            groups=self.groups,
            bias=self.bias is not None,
            padding_mode=self.padding_mode if symmetric else "zeros",
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        with torch.no_grad():
            plain.weight.copy_(self.weight * self.scale)
            if self.bias is not None and plain.bias is not None:
                plain.bias.copy_(self.bias)
        if symmetric:
            return plain
        pads: dict[tuple[int, str], type[nn.Module]] = {
            (1, "zeros"): nn.ZeroPad1d,
            (2, "zeros"): nn.ZeroPad2d,
            (1, "circular"): nn.CircularPad1d,
            (2, "circular"): nn.CircularPad2d,
        }
        return nn.Sequential(pads[self.axes, self.padding_mode](tuple(self._flat_padding())), plain)

    def extra_repr(self) -> str:
        """The arguments, for printing."""
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"]
        parts.append(f"stride={self.stride}, padding={self.padding}, norm={self.norm:g}")
        if any(d != 1 for d in self.dilation):
            parts.append(f"dilation={self.dilation}")
        if self.groups != 1:
            parts.append(f"groups={self.groups}")
        if self.padding_mode != "zeros":
            parts.append(f"padding_mode={self.padding_mode!r}")
        parts.append(f"bias_norm={self.bias_norm:g}" if self.bias is not None else "bias=False")
        if self.constraint != "orthogonal":
            parts.append(f"constraint={self.constraint!r}")
        if self.weight_clip is not None:
            parts.append(f"weight_clip={self.weight_clip:g}")
        if self.certificate_size is not None:
            parts.append(f"certificate_size={self.certificate_size}")
        return ", ".join(parts)


def _kept_alike(norm: Tensor | None) -> contextlib.AbstractContextManager[object]:
    """Keep a norm and what it is the norm of as they are, for the backward pass.

    `saved_tensors_hooks` of somebody else could change one of them and not the other. Transforms of
    `torch.func` have none, and private sessions refuse to run inside of them.
    """
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if norm is None or transformed or torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


class SpectralConv1d(_SpectralConv):
    """Convolution over sequences (batch, channels, length); see `SpectralConv2d`."""

    axes = 1


class SpectralConv2d(_SpectralConv):
    """Convolution over images (batch, channels, height, width) with operator norm at most `norm`.

    Arguments are those of `torch.nn.Conv2d`, except: the bias is off by default and kept in a ball
    of radius `bias_norm`; padding is zeros or circular; `"same"` also works with a stride.
    `constraint` is as in `SpectralLinear`, on the kernel reshaped to (out, in * window), in every
    group. Given `certificate_size`, the largest image the layer will meet (the exact one for
    circular padding), the norm is certified through Fourier blocks instead, which is tighter and
    lets the kernel be larger; each projection then costs more.

    Example:
        >>> layer = SpectralConv2d(3, 8, 3, padding="same")
        >>> layer(torch.zeros(2, 3, 16, 16)).shape, layer.certificate().holds
        (torch.Size([2, 8, 16, 16]), True)
    """

    axes = 2
