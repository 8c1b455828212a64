"""Gradients of weights as exact sums of integers, where a device has the kernels for it.

`prepare_integer_sums` tries the kernels, at the time when a plan is made, against what float64
computes. Operands of the largest size are part of it: a sum that is not exact shows there first.
Every shape is compared once more at its first use, on the first rows of a batch, bit for bit.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from clipless.kernels._weight_sums import (
    _LIBRARY,
    _TAGS,
    ConvolutionGeometry,
    transformed,
)
from clipless.kernels.exact._grid import (
    LEAST_LIMIT,
    Grid,
    Layout,
    cotangent_integers,
    grid_of,
    input_integers,
)
from clipless.kernels.exact._products import Windows, integer_products

IntegerSums = Literal["float16", "int8", "float64"]
"""How integers are multiplied: by a kernel, as numbers of one type or the other, or by torch."""

_KINDS: dict[str, IntegerSums | None] = {"cpu": None}
"""The way of each type of device that was asked for; None for sums of floats."""
_COMPARED: set[Any] = set()
_COMPARED_ROWS = 4
_COUNTS: dict[Any, tuple[Tensor | None, int]] = {}
"""In how many windows places are, and how many entries all windows have, for each geometry."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ENTRIES = 1 << 28
"""So many integers are held at a time, at most."""


@dataclass(frozen=True)
class _Sum:
    """What is added up: the layouts, the windows, and the public grid."""

    inputs: Layout
    outputs: Layout
    windows: Windows
    counts: Tensor | None
    """How many windows each place of a padded image is in; None for one each."""
    grid: Grid


def prepare_integer_sums(device: str, kind: IntegerSums | None = None) -> IntegerSums | None:
    """Return how a type of device adds up integers, tried; None if floats are added up there.

    A `kind` that is given is tried alone, and refused if it is not exact.
    """
    if kind is not None:
        if kind != "float64" and not sums_are_exact(device, kind):
            raise RuntimeError(f"sums of integers by {kind} products are not exact on {device}")
        _KINDS[device] = kind
    if device not in _KINDS:
        _KINDS[device] = _tried(device) if device == "cuda" else None
    return _KINDS[device]


def adds_integers(cotangent: Tensor, limit: float | None) -> bool:
    """Whether the gradient of a weight with such a limit is a sum of integers on this device."""
    kind = cotangent.device.type
    if limit is None or not LEAST_LIMIT <= limit < float("inf"):
        return False
    if cotangent.dtype not in _DTYPES or transformed():
        return False
    if torch.compiler.is_compiling():
        return _KINDS.get(kind) is not None
    return prepare_integer_sums(kind) is not None


def integer_linear_weight(
    cotangent: Tensor, x: Tensor, *, limit: float, shares: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradient of a linear weight, (out, in), from (batch, ..., out), (batch, ..., in).

    In float64: `sum_i f_i g_i x_i^T`, with factors that hold `||g|| ||x||` of every row to the
    limit, times the row's share. And which rows were above it, (batch,).
    """
    found: tuple[Tensor, Tensor] = (
        torch.ops.clipless.integer_linear_sum(cotangent, x, limit, shares)
        if torch.compiler.is_compiling()
        else _linear_sum(cotangent, x, limit, shares)
    )
    return found


def integer_convolution_weight(
    cotangent: Tensor,
    x: Tensor,
    window: Sequence[int],
    geometry: ConvolutionGeometry,
    *,
    limit: float,
    shares: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The same for a convolution in one or two dimensions, with the norm of all patches for ||x||.

    Which is at most `sqrt(m) ||x||`, m the number of patches that a pixel is in, and less at edges.
    """
    arguments = (cotangent, x, limit, shares, list(window), *geometry)
    found: tuple[Tensor, Tensor] = (
        torch.ops.clipless.integer_convolution_sum(*arguments)
        if torch.compiler.is_compiling()
        else _convolution_sum(*arguments)
    )
    return found


def _linear_sum(
    cotangent: Tensor, x: Tensor, limit: float, shares: Tensor | None
) -> tuple[Tensor, Tensor]:
    if not x.numel() or not cotangent.numel():
        return x.new_zeros(cotangent.shape[-1], x.shape[-1], dtype=torch.float64), _none(cotangent)
    weight, outside = _weight_sum(_line(cotangent), _line(x), Windows(), 1, limit, shares)
    return weight.flatten(1), outside


def _line(x: Tensor) -> Tensor:
    """Return (batch, ..., features) as an image of one line, (batch, features, 1, positions)."""
    return x.reshape(len(x), 1, -1, x.shape[-1]).permute(0, 3, 1, 2)


def _convolution_sum(
    cotangent: Tensor, x: Tensor, limit: float, shares: Tensor | None,
    window: list[int], stride: list[int], padding: list[int], dilation: list[int], groups: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    flat = x.ndim == 3
    if flat:  # one line
        cotangent, x = cotangent.unsqueeze(2), x.unsqueeze(2)
    steps = (window, stride, padding, dilation)
    first = (1, 1, 0, 1)  # of the one line
    windows = Windows(
        *((of if flat else each[0], each[-1]) for of, each in zip(first, steps, strict=True))
    )
    if not x.numel() or not cotangent.numel():
        shape = (cotangent.shape[1], x.shape[1] // groups, *window)
        return x.new_zeros(shape, dtype=torch.float64), _none(cotangent)
    weight, outside = _weight_sum(cotangent, x, windows, groups, limit, shares)
    return (weight.squeeze(2) if flat else weight), outside


def _none(cotangent: Tensor) -> Tensor:
    return cotangent.new_zeros(len(cotangent), dtype=torch.bool)


@torch.no_grad()
def _weight_sum(
    cotangent: Tensor, x: Tensor, windows: Windows, groups: int,
    limit: float, shares: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    kind = prepare_integer_sums(x.device.type) or "float64"
    what = _described(cotangent, x, windows, groups, limit, multiple=16 if kind == "int8" else 8)
    if kind == "float64":
        total, outside = _by_torch(cotangent, x, what, shares)
    else:
        _compare_once(cotangent, x, what, shares, kind)
        total, outside = _by_kernels(cotangent, x, what, shares, kind)
    total = total[:, : what.outputs.channels, ..., : what.inputs.channels]
    weight = total * torch.tensor(what.grid.unit, dtype=torch.float64)
    return weight.movedim(-1, 2).flatten(0, 1).contiguous(), outside


def _described(
    cotangent: Tensor, x: Tensor, windows: Windows, groups: int, limit: float, *, multiple: int
) -> _Sum:
    """Return what is known of a sum without looking at values."""
    padded = x.shape[2] + 2 * windows.padding[0], x.shape[3] + 2 * windows.padding[1]
    key = (windows, padded, cotangent.shape[2:], x.device)
    if key not in _COUNTS:
        table = windows.counts(padded, (cotangent.shape[2], cotangent.shape[3]))
        known = None if table is None else torch.tensor(table, dtype=torch.int32).to(x.device)
        _COUNTS[key] = known, x.shape[2:].numel() if table is None else sum(map(sum, table))
    counts, entries = _COUNTS[key]
    return _Sum(
        Layout(groups, x.shape[1] // groups, multiple),
        Layout(groups, cotangent.shape[1] // groups, multiple),
        windows,
        counts,
        grid_of(limit=limit, inputs=entries * x.shape[1], outputs=cotangent[0].numel()),
    )


def _by_torch(
    cotangent: Tensor, x: Tensor, what: _Sum, shares: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the sum, (groups, out, *window, in) of int64, and which rows were above the limit."""
    padding = what.windows.padding
    columns, multipliers, squares = input_integers(
        x, padding=padding, layout=what.inputs, counts=what.counts
    )
    rows, outside = cotangent_integers(
        cotangent, multipliers, squares, what.grid, shares, layout=what.outputs,
    )  # fmt: skip
    return integer_products(rows, columns, what.windows), outside


def _by_kernels(
    cotangent: Tensor, x: Tensor, what: _Sum, shares: Tensor | None, kind: IntegerSums
) -> tuple[Tensor, Tensor]:
    kernels: Any = importlib.import_module("clipless.kernels.exact._triton_exact")
    dtype = getattr(torch, kind)
    groups, size, padding = what.inputs.groups, what.windows.size, what.windows.padding
    shape = (groups, 2, what.outputs.padded, *size, what.inputs.padded)
    total = x.new_zeros(shape, dtype=torch.int64)
    places = (x.shape[2] + 2 * padding[0]) * (x.shape[3] + 2 * padding[1])
    own = groups * max(
        what.inputs.padded * places, 2 * what.outputs.padded * cotangent.shape[2:].numel()
    )
    at_once = max(1, _ENTRIES // own)
    outside = []
    for begin in range(0, len(x), at_once):
        part = slice(begin, begin + at_once)
        columns, multipliers, squares = kernels.round_inputs(
            x[part], padding=padding, layout=what.inputs, counts=what.counts, kind=dtype,
        )  # fmt: skip
        some = None if shares is None else shares[part]
        limbs, above = kernels.round_cotangents(
            cotangent[part], multipliers, squares, what.grid, some, layout=what.outputs,
            kind=dtype,
        )  # fmt: skip
        kernels.multiply(limbs, columns, what.windows, total)
        outside.append(above)
    above = outside[0] if len(outside) == 1 else torch.cat(outside)
    return torch.add(total[:, 1], total[:, 0], alpha=256), above


def _compare_once(
    cotangent: Tensor, x: Tensor, what: _Sum, shares: Tensor | None, kind: IntegerSums
) -> None:
    """Hold a kernel against its twin where its shape is used for the first time."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    known = (
        x.device, kind, x.dtype, cotangent.dtype, what.inputs, what.outputs, what.windows,
        x.shape[1:], x.stride()[1:], cotangent.shape[1:], cotangent.stride()[1:], shares is None,
    )  # fmt: skip
    if known in _COMPARED:
        return
    few = slice(0, _COMPARED_ROWS)
    some = None if shares is None else shares[few]
    found = _by_kernels(cotangent[few], x[few], what, some, kind)
    expected = _by_torch(cotangent[few], x[few], what, some)
    if not all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)):
        raise RuntimeError(
            f"the kernels that add up integers compute something else than they should for rows of "
            f"{tuple(x.shape[1:])} and {tuple(cotangent.shape[1:])}: a fault of this version of "
            "Triton, or of the driver. Nothing was released. Try another version; without Triton, "
            "sums are taken in floats, and the plan says what that leaves uncovered."
        )
    _COMPARED.add(known)


def _tried(device: str) -> IntegerSums | None:
    reason: object = "sums were not exact"
    kinds: tuple[IntegerSums, ...] = ("float16", "int8")
    for kind in kinds:
        try:
            importlib.import_module("triton")
            if sums_are_exact(device, kind):
                return kind
        except Exception as error:  # no Triton, no compiler, an old GPU: all are good reasons
            reason = error
    warnings.warn(
        f"weight gradients cannot be added up as integers on {device} ({reason}): convolutions are "
        "summed in float32, and the plan states what that leaves uncovered.",
        stacklevel=2,
    )
    return None


def sums_are_exact(device: str, kind: IntegerSums, *, positions: int = 70_000) -> bool:
    """Whether kernels add up the largest operands there are, and ordinary ones, without error."""
    kernels: Any = importlib.import_module("clipless.kernels.exact._triton_exact")
    dtype = getattr(torch, kind)
    patterns = torch.tensor([[-128, 127, 1, -1, 0, 3], [127, -127, 127, 126, 1, -3]], device=device)
    few = torch.arange(positions, device=device)
    for left, right in ((0, 0), (1, 1), (2, 0), (few % 6, few % 5), (few % 2, 1)):
        rows = torch.zeros(positions, 1, 1, 1, 2, 16, dtype=torch.int64, device=device)
        columns = torch.zeros(positions, 1, 1, 1, 16, dtype=torch.int64, device=device)
        rows[..., 0, :] = patterns[0, left].view(-1, 1, 1, 1, 1)
        rows[..., 1, ::3] = patterns[1, left].view(-1, 1, 1, 1, 1)
        columns[..., :] = patterns[1, right].view(-1, 1, 1, 1, 1)
        total = torch.zeros(1, 2, 16, 1, 1, 16, dtype=torch.int64, device=device)
        kernels.multiply(rows.to(dtype), columns.to(dtype), Windows(), total)
        expected = rows.double().view(positions, 32).mT @ columns.double().view(positions, 16)
        if not torch.equal(total.view(32, 16), expected.to(torch.int64)):
            return False
    return _examples_agree(device, kind)


def _examples_agree(device: str, kind: IntegerSums) -> bool:
    random = torch.Generator().manual_seed(0)
    for channels, height, windows, groups in (
        (12, 1, Windows(), 1),
        (12, 9, Windows((3, 3), (2, 1), (1, 1), (1, 2)), 2),
    ):
        out = (height + 1) // 2, height - 2 if height > 1 else 1
        x = torch.randn(5, channels, height, height, generator=random).to(device)
        cotangent = torch.randn(5, 4, *out, generator=random).to(device)
        what = _described(cotangent, x, windows, groups, 0.1, multiple=16)
        found = _by_kernels(cotangent, x, what, None, kind)
        expected = _by_torch(cotangent, x, what, None)
        if not all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)):
            return False
    return True


_LIBRARY.define(
    "integer_linear_sum(Tensor cotangent, Tensor x, float limit, Tensor? shares) "
    "-> (Tensor, Tensor)",
    tags=_TAGS,
)
_LIBRARY.define(
    "integer_convolution_sum(Tensor cotangent, Tensor x, float limit, Tensor? shares, "
    "int[] window, int[] stride, int[] padding, int[] dilation, int groups) -> (Tensor, Tensor)",
    tags=_TAGS,
)
_LIBRARY.impl("integer_linear_sum", _linear_sum, "CompositeExplicitAutograd")
_LIBRARY.impl("integer_convolution_sum", _convolution_sum, "CompositeExplicitAutograd")


def _fake_linear_sum(
    cotangent: Tensor, x: Tensor, limit: float, shares: Tensor | None
) -> tuple[Tensor, Tensor]:
    shape = (cotangent.shape[-1], x.shape[-1])
    outside = x.new_empty(x.shape[0], dtype=torch.bool)
    return x.new_empty(shape, dtype=torch.float64), outside


def _fake_convolution_sum(
    cotangent: Tensor, x: Tensor, limit: float, shares: Tensor | None,
    window: list[int], stride: list[int], padding: list[int], dilation: list[int], groups: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = (cotangent.shape[1], x.shape[1] // groups, *window)
    outside = x.new_empty(x.shape[0], dtype=torch.bool)
    return x.new_empty(shape, dtype=torch.float64), outside


torch.library.register_fake("clipless::integer_linear_sum", _fake_linear_sum)
torch.library.register_fake("clipless::integer_convolution_sum", _fake_convolution_sum)
