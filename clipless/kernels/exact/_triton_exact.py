# mypy: ignore-errors
"""Exact sums of integers on a GPU: rounding to the grids, and products, as Triton kernels.

The rounding is that of `_grid`, bit for bit: no step of it depends on an order of summation, and
none multiplies and adds at once. Integers of 8 bits are multiplied either as they are, with sums in
int32, or as float16 numbers, with sums of up to 1,024 products in float32: these stay below 2^24,
so that float32 holds every one of them, in whatever order they are taken. (Tensor cores read
float16 operands along either axis. 8-bit operands must be turned first, which takes longer than
multiplying them.)
"""

import torch
from torch import Tensor

from clipless.kernels._triton import _launch, _parts
from clipless.kernels.exact._grid import (
    FRACTION,
    LARGEST_COTANGENT,
    LARGEST_INPUT,
    LEAST,
    Grid,
    Layout,
    row_squares,
)
from clipless.kernels.exact._products import Windows

try:
    from triton import jit
    from triton import language as tl
    from triton.language import constexpr
except ImportError:  # this file can be read all the same, as `clipless.kernels._triton`
    tl = None
    constexpr = int

    def jit(kernel):
        """Leave a kernel as it is."""
        return kernel


_PRODUCTS = 1024
"""Of a number of at most 127 and one of at most 128: so many are below 2^24."""
_SPAN = 65_536
"""So many products one program adds up, of the 131,072 that are below 2^31."""
_PROGRAMS = 512
"""Enough to fill a GPU."""
_SHRINK = 1 - 2.0**-20


@jit
def _entries(
    x, first, rows, size, row_stride, channel_stride, line_stride, column_stride,
    height, width, wide, pad_height, pad_width, start,
    groups: constexpr, channels: constexpr, padded: constexpr,
    block_rows: constexpr, block: constexpr,
):  # fmt: skip
    """Entries of some rows, as they lie behind one another in the integers' layout."""
    row = first + tl.arange(0, block_rows)
    place = start + tl.arange(0, block)
    position = place // (groups * padded)
    channel = place % padded
    line = position // wide - pad_height
    column = position % wide - pad_width
    there = (line >= 0) & (line < height) & (column >= 0) & (column < width) & (place < size)
    if padded != channels:
        there = there & (channel < channels)
    source = ((place % (groups * padded)) // padded * channels + channel) * channel_stride
    source += line * line_stride + column * column_stride
    entry = row.to(tl.int64)[:, None] * row_stride + source[None, :]
    inside = (row < rows)[:, None] & there[None, :]
    return tl.load(x + entry, mask=inside, other=0.0).to(tl.float32)


@jit
def _integers(value, multiplier, place, most: constexpr):
    """Entries times a multiplier for each row, rounded by a hash of their bits and places."""
    used = tl.where(multiplier > 0.0, multiplier, 0.0)
    scaled = tl.where(used[:, None] > 0.0, value * used[:, None], 0.0)
    mixed = scaled.to(tl.uint32, bitcast=True) ^ (place.to(tl.uint32) * 0x9E3779B1)[None, :]
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D
    mixed = (mixed ^ (mixed >> 15)) * 0x846CA68B
    rounded = (scaled.to(tl.int32) + (mixed >> 16).to(tl.int32)) >> 16
    return tl.minimum(tl.maximum(rounded, -most), most)


@jit
def _largest(largest, value):
    size = tl.abs(value)
    size = tl.where(size < float("inf"), size, float("inf"))  # which NaN is not
    return tl.maximum(largest, tl.max(size, 1))


@jit
def _round_inputs(
    x, integers, multipliers, squares, counts, rows, size, row_stride, channel_stride,
    line_stride, column_stride, height, width, wide, pad_height, pad_width, least,
    groups: constexpr, channels: constexpr, padded: constexpr, most: constexpr,
    fraction: constexpr, counted: constexpr, block_rows: constexpr, block: constexpr,
):  # fmt: skip
    first = tl.program_id(0) * block_rows
    row = first + tl.arange(0, block_rows)
    largest = tl.zeros((block_rows,), dtype=tl.float32)
    for start in range(0, size, block):
        value = _entries(
            x, first, rows, size, row_stride, channel_stride, line_stride, column_stride,
            height, width, wide, pad_height, pad_width, start,
            groups, channels, padded, block_rows, block,
        )  # fmt: skip
        largest = _largest(largest, value)
    usable = (largest >= least) & (largest < float("inf"))
    top = tl.full((block_rows,), most * fraction, dtype=tl.float32)
    multiplier = tl.where(usable, tl.div_rn(top, tl.where(usable, largest, 1.0)), 0.0)
    multiplier = tl.where(largest == float("inf"), -1.0, multiplier)
    total = tl.zeros((block_rows,), dtype=tl.int64)
    for start in range(0, size, block):
        value = _entries(
            x, first, rows, size, row_stride, channel_stride, line_stride, column_stride,
            height, width, wide, pad_height, pad_width, start,
            groups, channels, padded, block_rows, block,
        )  # fmt: skip
        place = start + tl.arange(0, block)
        rounded = _integers(value, multiplier, place, most)
        squared = (rounded * rounded).to(tl.int64)
        if counted:
            position = place // (groups * padded)
            squared = squared * tl.load(counts + position, mask=place < size, other=0)[None, :]
        total += tl.sum(squared, 1)
        target = integers + row.to(tl.int64)[:, None] * size + place[None, :]
        inside = (row < rows)[:, None] & (place < size)[None, :]
        tl.store(target, rounded.to(integers.dtype.element_ty), mask=inside)
    tl.store(multipliers + row, multiplier, mask=row < rows)
    tl.store(squares + row, total, mask=row < rows)


@jit
def _cotangents_pass(
    x, integers, multiplier, cut, rows, first, size, row_stride, channel_stride,
    line_stride, column_stride, height, width,
    groups: constexpr, channels: constexpr, padded: constexpr, most: constexpr,
    block_rows: constexpr, block: constexpr,
):  # fmt: skip
    """Write the limbs of all cotangents of some rows, cut towards zero where `cut` is not 1."""
    row = first + tl.arange(0, block_rows)
    total = tl.zeros((block_rows,), dtype=tl.int64)
    for start in range(0, size, block):
        value = _entries(
            x, first, rows, size, row_stride, channel_stride, line_stride, column_stride,
            height, width, width, 0, 0, start, groups, channels, padded, block_rows, block,
        )  # fmt: skip
        place = start + tl.arange(0, block)
        rounded = _integers(value, multiplier, place, most)
        smaller = (rounded.to(tl.float32) * cut[:, None]).to(tl.int32)
        rounded = tl.where((cut < 1.0)[:, None], smaller, rounded)
        total += tl.sum((rounded * rounded).to(tl.int64), 1)
        low = ((rounded + 128) & 255) - 128
        high = (rounded - low) >> 8
        target = integers + row.to(tl.int64)[:, None] * (2 * size)
        target += (place // padded * (2 * padded) + place % padded)[None, :]
        inside = (row < rows)[:, None] & (place < size)[None, :]
        tl.store(target, high.to(integers.dtype.element_ty), mask=inside)
        tl.store(target + padded, low.to(integers.dtype.element_ty), mask=inside)
    return total


@jit
def _round_cotangents(
    x, integers, multipliers, squares, shares, bounds, outside, rows, size, square,
    row_stride, channel_stride, line_stride, column_stride, height, width, wanted, reserve, least,
    shrink,
    groups: constexpr, channels: constexpr, padded: constexpr, most: constexpr,
    fraction: constexpr, shared: constexpr, block_rows: constexpr, block: constexpr,
):  # fmt: skip
    first = tl.program_id(0) * block_rows
    row = first + tl.arange(0, block_rows)
    there = row < rows
    largest = tl.zeros((block_rows,), dtype=tl.float32)
    for start in range(0, size, block):
        value = _entries(
            x, first, rows, size, row_stride, channel_stride, line_stride, column_stride,
            height, width, width, 0, 0, start, groups, channels, padded, block_rows, block,
        )  # fmt: skip
        largest = _largest(largest, value)
    own = tl.load(squares + row, mask=there, other=0)
    usable = (largest >= least) & (largest < float("inf")) & (own > 0)
    if shared:
        square = tl.load(bounds + row, mask=there, other=0)
    allowed = square // tl.maximum(own, 1)
    full = tl.zeros((block_rows,), dtype=tl.float32) + wanted
    if shared:
        full = full * tl.load(shares + row, mask=there, other=0.0)
    of_inputs = tl.load(multipliers + row, mask=there, other=0.0)
    full = tl.div_rn(full, tl.where(usable, of_inputs, 1.0))
    top = tl.full((block_rows,), most * fraction, dtype=tl.float32)
    highest = tl.div_rn(top, tl.where(usable, largest, 1.0))
    multiplier = tl.where(usable, tl.minimum(full, highest), 0.0)
    ones = tl.full((block_rows,), 1.0, dtype=tl.float32)
    found = _cotangents_pass(
        x, integers, multiplier, ones, rows, first, size, row_stride, channel_stride,
        line_stride, column_stride, height, width,
        groups, channels, padded, most, block_rows, block,
    )  # fmt: skip
    above = (found > allowed) | (usable & (full > highest)) | (largest == float("inf"))
    above = above | (of_inputs < 0.0)
    tl.store(outside + row, above.to(tl.int8), mask=there)
    if tl.max((found > allowed).to(tl.int32), 0) > 0:
        room = allowed.to(tl.float32)
        root = tl.sqrt_rn(room)
        target = tl.maximum(((room - reserve) - root) - root, 0.5 * room)
        again = tl.where(found > 0, found.to(tl.float32), 1.0)
        smaller = tl.where(found > allowed, tl.sqrt_rn(tl.div_rn(target, again)), 1.0)
        multiplier = multiplier * smaller
        found = _cotangents_pass(
            x, integers, multiplier, ones, rows, first, size, row_stride,
            channel_stride, line_stride, column_stride, height, width,
            groups, channels, padded, most, block_rows, block,
        )  # fmt: skip
        if tl.max((found > allowed).to(tl.int32), 0) > 0:
            again = tl.where(found > 0, found.to(tl.float32), 1.0)
            cut = tl.sqrt_rn(tl.div_rn(room, again)) * shrink
            cut = tl.where(found > allowed, cut, 1.0)
            _cotangents_pass(
                x, integers, multiplier, cut, rows, first, size, row_stride,
                channel_stride, line_stride, column_stride, height, width,
                groups, channels, padded, most, block_rows, block,
            )  # fmt: skip


@jit
def _multiply(
    rows, columns, total, count, span, area, width, plane, line, column, tap_line, tap_column,
    groups: constexpr, outputs: constexpr, channels: constexpr, taps: constexpr,
    kernel_width: constexpr, whole: constexpr, products: constexpr,
    block_m: constexpr, block_n: constexpr, block_k: constexpr,
):  # fmt: skip
    """Add `sum g x^T` over a span of positions to the total, for a tile of its entries."""
    entries: constexpr = taps * channels
    per_line: constexpr = (entries + block_n - 1) // block_n
    per_group: constexpr = per_line * ((outputs + block_m - 1) // block_m)
    tile = tl.program_id(0)
    group = tile // per_group
    m = (tile % per_group) // per_line * block_m + tl.arange(0, block_m)
    n = tile % per_line * block_n + tl.arange(0, block_n)
    tap = n // channels
    offset = tap // kernel_width * tap_line + tap % kernel_width * tap_column
    offset += group * channels + n % channels
    begin = tl.program_id(1) * span
    end = tl.minimum(begin + span, count)
    sums = tl.zeros((block_m, block_n), dtype=tl.int32)
    kind: constexpr = tl.int32 if whole else tl.float32
    for outer in range(begin, end, products):
        part = tl.zeros((block_m, block_n), dtype=kind)
        for start in range(outer, tl.minimum(outer + products, end), block_k):
            k = start + tl.arange(0, block_k)
            inside = k < end
            rest = k % area
            base = k // area * plane + rest // width * line + rest % width * column
            here = (k * (groups * outputs) + group * outputs)[:, None] + m[None, :]
            a = tl.load(rows + here, mask=inside[:, None] & (m < outputs)[None, :], other=0)
            there = base[:, None] + offset[None, :]
            b = tl.load(columns + there, mask=inside[:, None] & (n < entries)[None, :], other=0)
            part = tl.dot(tl.trans(a), b, part, out_dtype=kind)
        sums += part.to(tl.int32)
    place = (group * outputs + m)[:, None] * entries + n[None, :]
    inside = (m < outputs)[:, None] & (n < entries)[None, :]
    tl.atomic_add(total + place, sums.to(tl.int64), mask=inside, sem="relaxed")


_ROUNDING = {"num_warps": 4, "enable_fp_fusion": False}


def round_inputs(
    x: Tensor,
    *,
    padding: tuple[int, int],
    layout: Layout,
    counts: Tensor | None,
    kind: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """`_grid.input_integers`, of `kind`."""
    rows, _, height, width = x.shape
    high, wide = height + 2 * padding[0], width + 2 * padding[1]
    integers = x.new_empty((rows, high, wide, layout.groups, layout.padded), dtype=kind)
    multipliers = x.new_empty(rows, dtype=torch.float32)
    squares = x.new_empty(rows, dtype=torch.int64)
    size = integers[0].numel() if rows else 0
    block_rows, block = _rounding_blocks(size)
    if rows:
        _launch(
            _round_inputs, (_parts(rows, block_rows),),
            (x, integers, multipliers, squares, squares if counts is None else counts),
            (rows, size, *x.stride(), height, width, wide, *padding, LEAST),
            (
                layout.groups, layout.channels, layout.padded, LARGEST_INPUT, FRACTION,
                counts is not None, block_rows, block,
            ),
            _ROUNDING,
        )  # fmt: skip
    return integers, multipliers, squares


def round_cotangents(
    cotangent: Tensor,
    multipliers: Tensor,
    squares: Tensor,
    grid: Grid,
    shares: Tensor | None,
    *,
    layout: Layout,
    kind: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`_grid.cotangent_integers` in limbs: (batch, height, width, groups, 2, channels)."""
    rows, _, height, width = cotangent.shape
    integers = cotangent.new_empty(
        (rows, height, width, layout.groups, 2, layout.padded), dtype=kind
    )
    outside = cotangent.new_empty(rows, dtype=torch.int8)
    size = height * width * layout.groups * layout.padded
    block_rows, block = _rounding_blocks(size)
    of_rows, limits = multipliers, squares  # not read
    if shares is not None:
        of_rows, limits = shares.to(torch.float32), row_squares(grid, shares)
    if rows:
        _launch(
            _round_cotangents, (_parts(rows, block_rows),),
            (cotangent, integers, multipliers, squares, of_rows, limits, outside),
            (
                rows, size, grid.square, *cotangent.stride(), height, width,
                grid.multiplier, grid.reserve, LEAST, _SHRINK,
            ),
            (
                layout.groups, layout.channels, layout.padded, LARGEST_COTANGENT, FRACTION,
                shares is not None, block_rows, block,
            ),
            _ROUNDING,
        )  # fmt: skip
    return integers, outside.bool()


def multiply(
    limbs: Tensor, x: Tensor, windows: Windows, total: Tensor, *, span: int | None = None
) -> None:
    """Add the products of all positions to a total, (groups, 2 outputs, window, inputs) of int64.

    `limbs` and `x` as `round_cotangents` and `round_inputs` return them, both of one type. `span`:
    how many positions one program adds up, for tests.
    """
    rows, height, width, groups, _, outputs = limbs.shape
    channels = x.shape[-1]
    plane, line, column = x.stride()[:3]
    count = rows * height * width
    if not count:
        return
    whole = x.dtype == torch.int8
    taps = windows.size[0] * windows.size[1]
    block_m, block_n, block_k, warps = _tile(2 * outputs, taps * channels, whole)
    tiles = groups * _parts(2 * outputs, block_m) * _parts(taps * channels, block_n)
    few = _parts(count * tiles, _PROGRAMS * _PRODUCTS) * _PRODUCTS
    span = span or min(_SPAN, few)
    _launch(
        _multiply, (tiles, _parts(count, span)), (limbs, x, total),
        (
            count, span, height * width, width, plane, windows.stride[0] * line,
            windows.stride[1] * column, windows.dilation[0] * line, windows.dilation[1] * column,
        ),
        (
            groups, 2 * outputs, channels, taps, windows.size[1], whole,
            span if whole else _PRODUCTS, block_m, block_n, block_k,
        ),
        {"num_warps": warps, "num_stages": 3},
    )  # fmt: skip


def _rounding_blocks(size: int) -> tuple[int, int]:
    block = min(1024, max(32, 1 << (size - 1).bit_length())) if size else 32
    return max(1, 1024 // block), block


def _tile(outputs: int, entries: int, whole: bool) -> tuple[int, int, int, int]:
    """Rows, columns and depth of a tile, and how many warps work on it."""
    block_m = min(128, max(16, 1 << (outputs - 1).bit_length()))
    block_n = min(128, max(16, 1 << (entries - 1).bit_length()))
    warps = 8 if block_m * block_n >= 128 * 128 else 4
    return block_m, block_n, 128 if whole else 64, warps
