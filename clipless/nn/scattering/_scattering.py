"""The scattering transform: a fixed, non-expansive front end for images.

One step takes a signal u to a smoothed version of it, which is kept, and to its wavelet
coefficients, whose modulus goes through the next step:

    S x = (x * phi, |x * psi_1| * phi, ||x * psi_1| * psi_2| * phi)   over all scales and angles.

Every step is a linear map of norm at most one (`_wavelets.py` certifies it) followed by the
modulus, which is 1-Lipschitz entry by entry. With D the difference of two signals at any place of
the tree, ||D||^2 is therefore at least the energy of what is kept of it plus the energy of the
differences that enter the next step; adding up over the tree, ||S x - S y|| <= ||x - y||.

Around the image lie zeros, which leave its norm alone, or its mirror images. The mirrored image has
four times the energy; but what is computed on each of the four copies is the mirror image of the
same coefficients (angles permuted), and the layer keeps one copy: a quarter of the energy again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipless.nn.scattering._wavelets import WaveletStep, build_step

Padding = Literal["zero", "symmetric"]
# The modulus is rounded off at zero: sqrt(|z|^2 + c^2) - c is 1-Lipschitz with a derivative that
# needs no exception, and equals |z| to the last bit of float32 for |z| above 1e-7.
_ROUNDED = 2.0**-50
# Complex numbers in the largest intermediate result: 2 MiB in single precision, and 512 MiB.
_ENTRIES_ON_CPU = 1 << 18
_ENTRIES_ELSEWHERE = 1 << 26


class Scattering2d(nn.Module):
    """The scattering transform of images: wavelet moduli, smoothed and subsampled, non-expansive.

    (batch, C, H, W) -> (batch, C * paths, H / 2^J, W / 2^J), every colour on its own, with J
    `scales` and L `angles`; paths = 1 + J L, and L^2 J (J - 1) / 2 more of `order` 2: 81 by
    default. The paths of a colour are next to each other: first the smoothed image, then (j, l),
    then (j1, j2, l1, l2).

    Coefficients change little when the image is moved or deformed by less than 2^J pixels. There is
    nothing to learn. The transform maps 0 to 0 and is `lipschitz`-Lipschitz, a constant of at most
    one certified for the filters in use: robustness certificates in pixels pass through it.

    Args:
        shape: (H, W), the size of all images; the certificate is for this size.
        scales: J.
        angles: L, in half a turn.
        order: how many wavelets in a row, 1 or 2.
        padding: what lies around the image. `"zero"`: zeros; sizes that are no multiple of 2^J are
            filled up. `"symmetric"`: its mirror images, edges included; H and W must be multiples
            of 2^J, and the work is two to three times that of zeros. Neither costs in the constant.

    Example:
        >>> layer = Scattering2d((32, 32))
        >>> layer(torch.rand(2, 3, 32, 32)).shape, layer.paths, layer.lipschitz <= 1
        (torch.Size([2, 243, 8, 8]), 81, True)
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        *,
        scales: int = 2,
        angles: int = 8,
        order: int = 2,
        padding: Padding = "zero",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape = _image_shape(shape)
        self.scales = _at_least("scales", scales, 1)
        self.angles = _at_least("angles", angles, 1)
        if order not in (1, 2):
            raise ValueError(f"order must be 1 or 2, got {order!r}")
        self.order = order
        if padding not in ("zero", "symmetric"):
            raise ValueError(f'padding must be "zero" or "symmetric", got {padding!r}')
        self.padding = padding
        if padding == "symmetric" and any(size % 2**scales for size in self.shape):
            raise ValueError(
                f'padding="symmetric" needs sizes that are multiples of {2**scales}, got '
                f'{self.shape}. Use padding="zero", fewer scales, or resize the images.'
            )
        tree = self.design()
        self.lipschitz = tree.lipschitz
        keep = functools.partial(_Step, crop=self._crop(), device=device, dtype=dtype)
        self.root = keep(tree.root)
        self.first = nn.ModuleList([keep(step) for step in tree.first])
        self.last = nn.ModuleList([keep(step) for step in tree.last])

    @property
    def paths(self) -> int:
        """How many coefficients there are for each colour and position."""
        first = self.scales * self.angles
        return 1 + first + (first * (self.scales - 1) * self.angles // 2) * (self.order - 1)

    @property
    def output_size(self) -> tuple[int, int]:
        """Height and width of the output: one position for every 2^J pixels."""
        rows, columns = (-(-size // 2**self.scales) for size in self.shape)
        return rows, columns

    @property
    def grid(self) -> tuple[int, int]:
        """Size of the periodic image that the transform works on."""
        if self.padding == "symmetric":
            return 2 * self.shape[0], 2 * self.shape[1]
        rows, columns = (2**self.scales * (size + 2) for size in self.output_size)
        return rows, columns

    def design(self) -> ScatteringTree:
        """Return the filters in double precision, with their certified norms."""
        return _design(self.grid, self.scales, self.angles, self.order)

    def is_intact(self) -> bool:
        """Whether the filters still are the certified ones, up to rounding in single precision."""
        fresh = type(self)(
            self.shape, scales=self.scales, angles=self.angles, order=self.order,
            padding=self.padding, dtype=torch.float64,
        )  # fmt: skip
        own, certified = dict(self.named_buffers()), dict(fresh.named_buffers())
        return own.keys() == certified.keys() and all(
            own[name].shape == filters.shape
            and torch.allclose(own[name].double().cpu(), filters, rtol=2**-23, atol=2.0**-120)
            for name, filters in certified.items()
        )

    def _crop(self) -> tuple[slice, slice]:
        """The output positions that lie on the image, along each axis."""
        first = 0 if self.padding == "symmetric" else 1
        rows, columns = (slice(first, first + size) for size in self.output_size)
        return rows, columns

    def _extend(self, x: Tensor) -> Tensor:
        """Surround the image: (..., H, W) -> (..., *grid)."""
        if self.padding == "symmetric":
            wide = torch.cat([x, x.flip(-1)], dim=-1)
            return torch.cat([wide, wide.flip(-2)], dim=-2)
        spare = [total - size for total, size in zip(self.grid, self.shape, strict=True)]
        before = [amount // 2 for amount in spare]
        return F.pad(x, (before[1], spare[1] - before[1], before[0], spare[0] - before[0]))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, C, H, W) -> (batch, C * paths, H', W')."""
        if not isinstance(x, Tensor):  # a tracer's stand-in has no size to look at
            return self._transform(x)
        if x.ndim != 4 or tuple(x.shape[-2:]) != self.shape:
            raise ValueError(
                f"the transform was made for images (batch, colours, {self.shape[0]}, "
                f"{self.shape[1]}), got {tuple(x.shape)}. Construct one for this size."
            )
        if x.numel() == 0:  # an empty batch, which not every Fourier transform knows
            rows, columns = self.output_size
            return x.new_zeros(len(x), x.shape[1] * self.paths, rows, columns) + x.sum()
        # In parts: intermediate results then stay in a processor's cache, and bounded on a GPU.
        limit = _ENTRIES_ON_CPU if x.device.type == "cpu" else _ENTRIES_ELSEWHERE
        part = max(1, limit // (self._largest() * x.shape[1]))
        if len(x) <= part:
            return self._transform(x)
        return torch.cat([self._transform(images) for images in x.split(part)])

    def _transform(self, x: Tensor) -> Tensor:
        smooth, moduli = self.root(self._extend(x))
        kept, deeper = [smooth.unsqueeze(2)], []
        for j, step in enumerate(self.first):
            smooth, twice = step(moduli[j])
            kept.append(smooth)
            for k in range(self.scales - 1 - j) if self.order == 2 else ():
                smooth, _ = self.last[j + k](twice[k])
                deeper.append(smooth.flatten(2, 3))
        return torch.cat([*kept, *deeper], dim=2).flatten(1, 2)

    def _largest(self) -> int:
        """Entries of the largest intermediate result of one colour of one image."""
        pixels = self.grid[0] * self.grid[1]
        twice = pixels // 4 * self.angles**2 if self.order == 2 and self.scales > 1 else 0
        return max(pixels * self.angles, twice)

    def extra_repr(self) -> str:
        """The arguments, for printing."""
        return (
            f"{self.shape}, scales={self.scales}, angles={self.angles}, order={self.order}, "
            f"padding={self.padding!r}"
        )


@dataclass(frozen=True)
class ScatteringTree:
    """All steps of a transform: of the image, of first moduli by scale, of second ones by scale."""

    root: WaveletStep
    first: tuple[WaveletStep, ...]
    last: tuple[WaveletStep, ...]
    """For moduli of scale 1, 2, ...: the last step only smooths."""

    @property
    def lipschitz(self) -> float:
        """The constant of the whole tree: the root's norm, times what can grow behind it."""
        behind = max((step.norm for step in self.last), default=0.0)
        within = max(step.norm for step in self.first) * max(1.0, behind)
        return self.root.norm * max(1.0, within)


@functools.lru_cache(maxsize=16)
def _design(grid: tuple[int, int], scales: int, angles: int, order: int) -> ScatteringTree:
    build = functools.partial(build_step, grid, last_scale=scales, angles=angles)
    return ScatteringTree(
        root=build(resolution=0, scales=range(scales)),
        first=tuple(
            build(resolution=j, scales=range(j + 1, scales) if order == 2 else ())
            for j in range(scales)
        ),
        last=tuple(build(resolution=j, scales=()) for j in range(1, scales) if order == 2),
    )


class _Step(nn.Module):
    """One step of the tree: smoothed signals, and the moduli of wavelet coefficients by scale."""

    low_rows: Tensor
    low_columns: Tensor

    def __init__(
        self,
        step: WaveletStep,
        *,
        crop: tuple[slice, slice],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.subsampling = step.subsampling
        tensors = {"low_rows": step.low_rows[crop[0]], "low_columns": step.low_columns[crop[1]].T}
        for index, wavelets in enumerate(step.wavelets):  # pairs of real numbers survive .double()
            tensors[f"wavelets_{index}"] = torch.view_as_real(wavelets)
        for name, tensor in tensors.items():
            own = tensor.to(device=device, dtype=dtype or torch.get_default_dtype(), copy=True)
            self.register_buffer(name, own.contiguous(), persistent=False)

    def forward(self, u: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(..., rows, columns) -> (..., H', W'), and (..., angles, rows / t, columns / t) by scale.

        Convolutions are products of spectra. Subsampled ones need the spectrum on the coarser grid
        only, where aliases add up.
        """
        smooth = self.low_rows @ u @ self.low_columns
        moduli = []
        if self.subsampling:
            spectrum = torch.fft.fft2(u).unsqueeze(-3)
            for index, t in enumerate(self.subsampling):
                wavelets = torch.view_as_complex(getattr(self, f"wavelets_{index}"))
                moduli.append(_modulus(torch.fft.ifft2(_product(spectrum, wavelets, t))))
        return smooth, moduli


def _product(spectrum: Tensor, wavelets: Tensor, t: int) -> Tensor:
    """Multiply spectra and add up t x t aliases: (..., rows / t, columns / t)."""
    rows, columns = (size // t for size in wavelets.shape[-2:])
    blocks = [
        (..., slice(k * rows, (k + 1) * rows), slice(m * columns, (m + 1) * columns))
        for k in range(t)
        for m in range(t)
    ]
    total = spectrum[blocks[0]] * wavelets[blocks[0]]
    for block in blocks[1:]:
        total = torch.addcmul(total, spectrum[block], wavelets[block])
    return total


def _modulus(z: Tensor) -> Tensor:
    energy = torch.addcmul(z.real.square(), z.imag, z.imag)
    return (energy + _ROUNDED**2).sqrt() - _ROUNDED


def _image_shape(shape: int | Sequence[int]) -> tuple[int, int]:
    sizes = (shape, shape) if isinstance(shape, int) else tuple(shape)
    if len(sizes) != 2 or any(isinstance(n, bool) or not isinstance(n, int) for n in sizes):
        raise ValueError(f"shape must be the height and width of the images, got {shape!r}")
    if any(size < 1 for size in sizes):
        raise ValueError(f"shape must hold positive sizes, got {shape!r}")
    return sizes[0], sizes[1]


def _at_least(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    return value
