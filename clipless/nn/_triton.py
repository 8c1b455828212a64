# mypy: ignore-errors
"""GPU kernels in Triton: one pass over memory where torch's operators take several.

Imported on first use on a GPU, and only then (`clipless.nn._kernels`). Every kernel has a twin made
of torch operators, which is what the tests on the CPU run and the tests on a GPU compare with.
"""

import contextlib

import torch
from torch import Tensor

try:
    import triton
    from triton import jit
    from triton import language as tl
    from triton.language import constexpr
except ImportError:  # this file can be read all the same; `kernels_for` never leads here
    tl = None
    constexpr = int

    def jit(kernel):
        """Leave a kernel as it is."""
        return kernel


_BLOCK = 1024


@jit
def _sort_rows(
    x, ordered, swapped, count, inner,
    descending: constexpr, mark: constexpr, rows: constexpr, columns: constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = (row < count)[:, None] & (column < inner)[None, :]
    first = row.to(tl.int64)[:, None] * (2 * inner) + column[None, :]
    a = tl.load(x + first, mask=inside)
    b = tl.load(x + first + inner, mask=inside)
    swap = a < b if descending else a > b
    tl.store(ordered + first, tl.where(swap, b, a), mask=inside)
    tl.store(ordered + first + inner, tl.where(swap, a, b), mask=inside)
    if mark:
        place = row.to(tl.int64)[:, None] * inner + column[None, :]
        tl.store(swapped + place, swap.to(tl.uint8), mask=inside)


@jit
def _swap_rows(
    x, exchanged, swapped, count, inner, rows: constexpr, columns: constexpr
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = (row < count)[:, None] & (column < inner)[None, :]
    first = row.to(tl.int64)[:, None] * (2 * inner) + column[None, :]
    place = row.to(tl.int64)[:, None] * inner + column[None, :]
    swap = tl.load(swapped + place, mask=inside) != 0
    a = tl.load(x + first, mask=inside)
    b = tl.load(x + first + inner, mask=inside)
    tl.store(exchanged + first, tl.where(swap, b, a), mask=inside)
    tl.store(exchanged + first + inner, tl.where(swap, a, b), mask=inside)


@jit
def _sort_neighbours(
    x, ordered, swapped, entries, descending: constexpr, mark: constexpr, block: constexpr
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * block
    pair = start + tl.arange(0, block)
    entry = 2 * start + tl.arange(0, 2 * block)
    inside = entry < entries
    a, b = tl.split(tl.reshape(tl.load(x + entry, mask=inside), (block, 2)))
    swap = a < b if descending else a > b
    both = tl.join(tl.where(swap, b, a), tl.where(swap, a, b))
    tl.store(ordered + entry, tl.reshape(both, (2 * block,)), mask=inside)
    if mark:
        tl.store(swapped + pair, swap.to(tl.uint8), mask=2 * pair < entries)


@jit
def _swap_neighbours(x, exchanged, swapped, entries, block: constexpr):
    start = tl.program_id(0).to(tl.int64) * block
    pair = start + tl.arange(0, block)
    entry = 2 * start + tl.arange(0, 2 * block)
    inside = entry < entries
    swap = tl.load(swapped + pair, mask=2 * pair < entries) != 0
    a, b = tl.split(tl.reshape(tl.load(x + entry, mask=inside), (block, 2)))
    both = tl.join(tl.where(swap, b, a), tl.where(swap, a, b))
    tl.store(exchanged + entry, tl.reshape(both, (2 * block,)), mask=inside)


@jit
def _pool(
    x, pooled, total, inner, width, height, out_width, out_height, negligible,
    kernel_height: constexpr, kernel_width: constexpr, wide: constexpr, block: constexpr,
):  # fmt: skip
    # In memory, x is (planes, height, width, inner) and pooled (planes, out_height, ...).
    start = tl.program_id(0)
    if wide:
        start = start.to(tl.int64)
    index = start * block + tl.arange(0, block)
    inside = index < total
    position, rest = index // inner, index % inner
    line, out_column = position // out_width, position % out_width
    plane, out_row = line // out_height, line % out_height
    corner = (
        (plane * height + out_row * kernel_height) * width + out_column * kernel_width
    ) * inner + rest
    energy = tl.zeros((block,), tl.float32)
    for i in tl.static_range(kernel_height):
        for j in tl.static_range(kernel_width):
            entry = tl.load(x + corner + (i * width + j) * inner, mask=inside, other=0.0)
            entry = entry.to(tl.float32)
            energy += entry * entry
    norm = tl.where(energy > negligible, tl.sqrt_rn(energy), 0.0)
    norm = tl.where(energy != energy, energy, norm)
    tl.store(pooled + index, norm.to(pooled.dtype.element_ty), mask=inside)


@jit
def _spread(
    x, pooled, cotangent, gradient, total, inner, width, height, out_width, out_height,
    kernel_height: constexpr, kernel_width: constexpr, wide: constexpr, block: constexpr,
):  # fmt: skip
    start = tl.program_id(0)
    if wide:
        start = start.to(tl.int64)
    index = start * block + tl.arange(0, block)
    inside = index < total
    position, rest = index // inner, index % inner
    line, column = position // width, position % width
    plane, row = line // height, line % height
    out_row, out_column = row // kernel_height, column // kernel_width
    window = ((plane * out_height + out_row) * out_width + out_column) * inner + rest
    covered = inside & (out_row < out_height) & (out_column < out_width)
    norm = tl.load(pooled + window, mask=covered, other=0.0).to(tl.float32)
    flowing = tl.load(cotangent + window, mask=covered, other=0.0).to(tl.float32)
    entry = tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
    ratio = tl.where(norm == 0.0, 0.0, flowing / tl.where(norm == 0.0, 1.0, norm))
    tl.store(gradient + index, (entry * ratio).to(gradient.dtype.element_ty), mask=inside)


def sort_pairs(
    x: Tensor, ordered: Tensor, swapped: Tensor | None, inner: int, descending: bool
) -> None:
    """Write the sorted pairs of `x`, members `inner` entries apart, and which were swapped."""
    count = x.numel() // (2 * inner)
    mark = swapped is not None
    marks = swapped.view(torch.uint8) if mark else x
    with _on_device_of(x):
        if inner == 1:
            grid = (triton.cdiv(count, _BLOCK),)
            _sort_neighbours[grid](x, ordered, marks, x.numel(), descending, mark, _BLOCK)
        else:
            rows, columns = _tile(inner)
            grid = (triton.cdiv(count, rows), triton.cdiv(inner, columns))
            _sort_rows[grid](x, ordered, marks, count, inner, descending, mark, rows, columns)


def swap_pairs(x: Tensor, exchanged: Tensor, swapped: Tensor, inner: int) -> None:
    """Write `x` with the members of marked pairs exchanged."""
    count = x.numel() // (2 * inner)
    marks = swapped.view(torch.uint8)
    with _on_device_of(x):
        if inner == 1:
            grid = (triton.cdiv(count, _BLOCK),)
            _swap_neighbours[grid](x, exchanged, marks, x.numel(), _BLOCK)
        else:
            rows, columns = _tile(inner)
            grid = (triton.cdiv(count, rows), triton.cdiv(inner, columns))
            _swap_rows[grid](x, exchanged, marks, count, inner, rows, columns)


def pool(x: Tensor, pooled: Tensor, kernel: tuple[int, int], negligible: float) -> None:
    """Write the Euclidean norms of the windows that tile `x` (batch, channels, height, width)."""
    total = pooled.numel()
    grid = (triton.cdiv(total, _BLOCK),)
    with _on_device_of(x):
        _pool[grid](
            x, pooled, total, *_sizes(x, pooled), negligible,
            *kernel, x.numel() >= 1 << 31, _BLOCK,
        )  # fmt: skip


def spread(
    x: Tensor, pooled: Tensor, cotangent: Tensor, gradient: Tensor, kernel: tuple[int, int]
) -> None:
    """Write the gradient of `x` from its windows' norms and their cotangents."""
    total = x.numel()
    grid = (triton.cdiv(total, _BLOCK),)
    with _on_device_of(x):
        _spread[grid](
            x, pooled, cotangent, gradient, total, *_sizes(x, pooled),
            *kernel, total >= 1 << 31, _BLOCK,
        )  # fmt: skip


def _on_device_of(x: Tensor) -> contextlib.AbstractContextManager:
    """Launches go to the current device, which nearly always is the right one already."""
    if x.get_device() == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def _sizes(x: Tensor, pooled: Tensor) -> tuple[int, int, int, int, int]:
    """Entries beside each other at one position, then width and height before and after."""
    inner = 1 if x.is_contiguous() else x.shape[1]
    return inner, x.shape[3], x.shape[2], pooled.shape[3], pooled.shape[2]


def _tile(inner: int) -> tuple[int, int]:
    """Rows and columns of a block."""
    columns = min(256, triton.next_power_of_2(inner))
    return _BLOCK // columns, columns
