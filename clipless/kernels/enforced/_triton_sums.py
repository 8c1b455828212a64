# mypy: ignore-errors
"""A GPU kernel that adds up examples' scaled gradients without storing any of them.

`sum_i f_i (sum_t g_it x_it^T)`: a product for each example, in float32 from exact products, scaled
and added to a tile of the weight's gradient. A float32 tile holds the sum of a few examples, each
below its threshold already, so that its rounding is small against one of them; the tiles of all
parts of the batch are added up in float64. What cancels within an example rounds it alone.
"""

import torch
from torch import Tensor

try:
    from triton import cdiv, jit
    from triton import language as tl
    from triton.language import constexpr
except ImportError:  # this file can be read all the same; see `kernels._dispatch`
    tl, cdiv = None, None
    constexpr = int

    def jit(kernel):
        """Leave a kernel as it is."""
        return kernel


AT_ONCE = 16
"""So many examples are in a float32 tile: 2 * 16^2 * 2^-24 of a threshold is lost at most."""


@jit
def _scaled_products(
    cotangents, inputs, factors, parts, rows, positions, wide, deep,
    at_once: constexpr, tile_out: constexpr, tile_in: constexpr, tile_positions: constexpr,
):  # fmt: skip
    across = tl.cdiv(deep, tile_in)
    out = (tl.program_id(0) // across) * tile_out + tl.arange(0, tile_out)
    inn = (tl.program_id(0) % across) * tile_in + tl.arange(0, tile_in)
    part = tl.program_id(1)
    total = tl.zeros((tile_out, tile_in), dtype=tl.float32)
    for example in range(at_once):
        # Behind the last example, the last one is read again, and counts nothing.
        row = tl.minimum(part * at_once + example, rows - 1)
        factor = tl.load(factors + row)
        factor = tl.where(part * at_once + example < rows, factor, 0.0)
        start = row.to(tl.int64) * positions
        own = tl.zeros((tile_out, tile_in), dtype=tl.float32)
        for begin in range(0, positions, tile_positions):
            place = begin + tl.arange(0, tile_positions)
            here = place < positions
            g = tl.load(
                cotangents + (start + place)[:, None] * wide + out[None, :],
                mask=here[:, None] & (out < wide)[None, :], other=0.0,
            )  # fmt: skip
            x = tl.load(
                inputs + (start + place)[:, None] * deep + inn[None, :],
                mask=here[:, None] & (inn < deep)[None, :], other=0.0,
            )  # fmt: skip
            own = tl.dot(tl.trans(g), x, own, input_precision="tf32")
        total += tl.where(factor > 0, own * factor, 0.0)
    size = wide.to(tl.int64) * deep
    tl.store(
        parts + part * size + out.to(tl.int64)[:, None] * deep + inn[None, :], total,
        mask=(out < wide)[:, None] & (inn < deep)[None, :],
    )  # fmt: skip


def scaled_products(cotangent: Tensor, x: Tensor, factors: Tensor) -> Tensor:
    """Return `sum_i f_i g_i^T x_i` in float64, from (batch, T, out), (batch, T, in), (batch,).

    Of float32 operands, no more than ten binary digits may be set (`rounded_to_tf32`).
    """
    rows, positions, wide = cotangent.shape
    deep = x.shape[2]
    if rows == 0:
        return x.new_zeros((wide, deep), dtype=torch.float64)
    count = cdiv(rows, AT_ONCE)
    parts = torch.empty((count, wide, deep), dtype=torch.float32, device=x.device)
    tile_out, tile_in, tile_positions = 64, 128, 32
    grid = (cdiv(wide, tile_out) * cdiv(deep, tile_in), count)
    _scaled_products[grid](
        cotangent.contiguous(), x.contiguous(), factors.contiguous(), parts, rows, positions, wide,
        deep, AT_ONCE, tile_out, tile_in, tile_positions,
    )  # fmt: skip
    return parts.sum(dim=0, dtype=torch.float64)
