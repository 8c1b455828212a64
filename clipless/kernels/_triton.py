# mypy: ignore-errors
"""GPU kernels in Triton: one pass over memory where torch's operators take several.

Imported on first use on a GPU, and only then (`kernels._dispatch`). Every kernel has a twin made
of torch operators, which is what the tests on the CPU run and the tests on a GPU compare with.
"""

import torch
from torch import Tensor

try:
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
_TINY = torch.finfo(torch.float32).tiny


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


@jit
def _guard(x, guarded, size, radius, sphere: constexpr, block: constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    place = tl.arange(0, block)
    inside = place < size
    entry = tl.load(x + row + place, mask=inside, other=0.0)
    entry = tl.where(tl.abs(entry) < float("inf"), entry, 0.0)  # which NaN is not
    largest = tl.max(tl.abs(entry), 0)
    if sphere:
        scale = tl.where(largest > 0.0, largest, 1.0)
        least = 0.0
    else:
        scale = tl.maximum(largest, radius)
        least = tl.div_rn(radius, scale)
        least = least * least
    unit = tl.div_rn(entry, tl.broadcast_to(scale, (block,)))
    energy = tl.sum(unit * unit, 0)
    moved = energy > least
    factor = tl.div_rn(radius, tl.sqrt_rn(tl.where(moved, energy, 1.0)))
    tl.store(guarded + row + place, tl.where(moved, unit * factor, entry), mask=inside)


@jit
def _energy_of(x, size, block: constexpr):
    total = tl.zeros((block,), dtype=tl.float32)
    for start in range(0, size, block):
        place = start + tl.arange(0, block)
        entry = tl.load(x + place, mask=place < size, other=0.0).to(tl.float32)
        total += entry * entry
    return tl.sum(total, 0)


@jit
def _norms(x, norms, size, vanishing, block: constexpr):
    row = tl.program_id(0).to(tl.int64)
    energy = _energy_of(x + row * size, size, block)
    tl.store(norms + row, tl.sqrt_rn(energy + vanishing))


@jit
def _bound_rows(
    cotangent, x, norms, cotangent_size, x_size, gain, limit, vanishing, block: constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    energy = _energy_of(cotangent + row * cotangent_size, cotangent_size, block)
    bound = gain * tl.sqrt_rn(energy + vanishing) * tl.load(norms + row)
    factor = tl.where(bound <= limit, 1.0, limit / bound)
    # NaN is not below infinity; and numbers that are not normal have too few digits for a factor.
    factor = tl.where((bound < float("inf")) & (factor >= 1.1754943508222875e-38), factor, 0.0)
    _scale_row(cotangent, x, row, factor, cotangent_size, x_size, block)


@jit
def _scale_row(cotangent, x, row, factor, cotangent_size, x_size, block: constexpr):
    if factor != 1.0:
        for start in range(0, cotangent_size, block):
            place = start + tl.arange(0, block)
            entry = cotangent + row * cotangent_size + place
            value = tl.load(entry, mask=place < cotangent_size, other=0.0)
            scaled = tl.where(factor > 0.0, value * factor, 0.0)
            tl.store(entry, scaled.to(cotangent.dtype.element_ty), mask=place < cotangent_size)
        if factor == 0.0:
            for start in range(0, x_size, block):
                place = start + tl.arange(0, block)
                zeros = tl.zeros((block,), dtype=x.dtype.element_ty)
                tl.store(x + row * x_size + place, zeros, mask=place < x_size)


@jit
def _scale_rows(cotangent, x, factors, cotangent_size, x_size, block: constexpr):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factors + row)
    _scale_row(cotangent, x, row, factor, cotangent_size, x_size, block)


def sort_pairs(
    x: Tensor, ordered: Tensor, swapped: Tensor | None, inner: int, descending: bool
) -> None:
    """Write the sorted pairs of `x`, members `inner` entries apart, and which were swapped."""
    count = x.numel() // (2 * inner)
    mark = swapped is not None
    tensors = (x, ordered, swapped.view(torch.uint8) if mark else x)
    if inner == 1:
        _launch(
            _sort_neighbours, (_parts(count, _BLOCK),), tensors, (x.numel(),),
            (descending, mark, _BLOCK),
        )  # fmt: skip
    else:
        rows, columns = _tile(inner)
        _launch(
            _sort_rows, (_parts(count, rows), _parts(inner, columns)), tensors, (count, inner),
            (descending, mark, rows, columns),
        )  # fmt: skip


def swap_pairs(x: Tensor, exchanged: Tensor, swapped: Tensor, inner: int) -> None:
    """Write `x` with the members of marked pairs exchanged."""
    count = x.numel() // (2 * inner)
    tensors = (x, exchanged, swapped.view(torch.uint8))
    if inner == 1:
        _launch(_swap_neighbours, (_parts(count, _BLOCK),), tensors, (x.numel(),), (_BLOCK,))
    else:
        rows, columns = _tile(inner)
        _launch(
            _swap_rows, (_parts(count, rows), _parts(inner, columns)), tensors, (count, inner),
            (rows, columns),
        )  # fmt: skip


def pool(x: Tensor, pooled: Tensor, kernel: tuple[int, int], negligible: float) -> None:
    """Write the Euclidean norms of the windows that tile `x` (batch, channels, height, width)."""
    total = pooled.numel()
    _launch(
        _pool, (_parts(total, _BLOCK),), (x, pooled), (total, *_sizes(x, pooled), negligible),
        (*kernel, x.numel() >= 1 << 31, _BLOCK),
    )  # fmt: skip


def spread(
    x: Tensor, pooled: Tensor, cotangent: Tensor, gradient: Tensor, kernel: tuple[int, int]
) -> None:
    """Write the gradient of `x` from its windows' norms and their cotangents."""
    total = x.numel()
    _launch(
        _spread, (_parts(total, _BLOCK),), (x, pooled, cotangent, gradient),
        (total, *_sizes(x, pooled)), (*kernel, total >= 1 << 31, _BLOCK),
    )  # fmt: skip


def guard(x: Tensor, guarded: Tensor, radius: float, sphere: bool) -> None:
    """Write the examples of `x`, made finite, in the ball or on the sphere of a radius."""
    size = x.numel() // x.shape[0]
    block = 1 << (size - 1).bit_length()
    _launch(_guard, (x.shape[0],), (x, guarded), (size, float(radius)), (sphere, block))


def norms(x: Tensor, result: Tensor) -> None:
    """Write an upper bound of the norm of every row of `x`, whose entries lie together."""
    if result.numel():
        size = x[0].numel()
        _launch(_norms, (result.numel(),), (x, result), (size, size * _TINY), (_block(size),))


def bound_rows(cotangent: Tensor, x: Tensor, norms: Tensor, gain: float, limit: float) -> None:
    """Scale rows of cotangents, in place, such that `gain ||g|| ||x||` is at most the limit.

    What is not finite becomes zero, in `x` too. `norms` holds those of `x`.
    """
    if norms.numel():
        sizes = (cotangent[0].numel(), x[0].numel())
        numbers = (*sizes, float(gain), float(limit), sizes[0] * _TINY)
        tensors, block = (cotangent, x, norms), _block(sizes[0])
        _launch(_bound_rows, (norms.numel(),), tensors, numbers, (block,))


def scale_rows(cotangent: Tensor, x: Tensor, factors: Tensor) -> None:
    """Multiply rows of cotangents by factors, in place; a factor of 0 clears the row of `x` too.

    Rows with a factor of 1 are not even read.
    """
    sizes = (cotangent[0].numel(), x[0].numel())
    if factors.numel():
        _launch(_scale_rows, (factors.numel(),), (cotangent, x, factors), sizes, (_BLOCK,))


def _block(size: int) -> int:
    return min(4096, max(128, 1 << (size - 1).bit_length()))


_COMPILED = {}
_NO_OPTIONS = {}


def _launch(kernel, grid, tensors, numbers, constants, options=_NO_OPTIONS) -> None:
    """Launch a kernel, of which there is one for each kind of arguments.

    Triton compiles for constants, types, and whether sizes and addresses are multiples of 16. It
    finds out which of its kernels that is at every launch, in more time than most kernels take.
    """
    device = tensors[0].get_device()
    if device < 0:  # tests interpret kernels on the CPU
        kernel[grid](*tensors, *numbers, *constants, **options)
        return
    if device != torch.cuda.current_device():  # launches go to the current one
        with torch.cuda.device(device):
            _launch(kernel, grid, tensors, numbers, constants, options)
        return
    key = (id(kernel), device, constants, *map(_kind, tensors), *map(_kind_of_number, numbers))
    compiled = _COMPILED.get(key)
    if compiled is None:
        _COMPILED[key] = kernel[grid](*tensors, *numbers, *constants, **options)
    else:
        compiled[(*grid, 1, 1)[:3]](*tensors, *numbers, *constants)


def _kind(tensor: Tensor) -> tuple:
    return tensor.dtype, tensor.data_ptr() % 16 == 0


def _kind_of_number(number: float) -> object:
    return float if type(number) is float else (number % 16 == 0, number == 1, number >> 31 > 0)


def _parts(total: int, size: int) -> int:
    return -(-total // size)


def _sizes(x: Tensor, pooled: Tensor) -> tuple[int, int, int, int, int]:
    """Entries beside each other at one position, then width and height before and after."""
    inner = 1 if x.is_contiguous() else x.shape[1]
    return inner, x.shape[3], x.shape[2], pooled.shape[3], pooled.shape[2]


def _tile(inner: int) -> tuple[int, int]:
    """Rows and columns of a block."""
    columns = min(256, 1 << (inner - 1).bit_length())
    return _BLOCK // columns, columns
