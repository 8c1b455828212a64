# mypy: ignore-errors
"""ChaCha20 and Gaussian noise on a grid as Triton kernels: the words and noise of the CPU's twins.

One kernel writes the blocks of a stream, another makes noise of their words. Neither branches on a
value, and every sample is made by one thread from its own words.
"""

import numpy as np
import torch
from torch import Tensor
from triton import cdiv, jit
from triton import language as tl
from triton.language import constexpr

from clipless.kernels.randomness._gaussian import nonce
from clipless.kernels.randomness._gaussian_table import cell_table

_LANES = 128
_WORDS = 16


def grid_noise(count: int, key: bytes, index: int, device: torch.device) -> Tensor:
    """Return `round(N(0, 1) * 2^28)` for each of `count` samples, (count,) int64."""
    cells, chances, places = (
        chacha_words(key, plane, index, blocks, device)
        for plane, blocks in enumerate((cdiv(count, 16), cdiv(count, 8), cdiv(count, 8)))
    )
    noise = torch.empty(count, dtype=torch.int64, device=device)
    table = cell_table(device)
    _noise[(cdiv(count, 1024),)](
        noise, cells, chances.view(torch.int64), places.view(torch.int64),
        table.threshold, table.below, table.other, count, lanes=1024,
    )  # fmt: skip
    return noise


def chacha_words(key: bytes, purpose: int, index: int, blocks: int, device: torch.device) -> Tensor:
    """Return the words of the first blocks of a stream, (16 blocks,) int32."""
    start = np.frombuffer(key + nonce(purpose, index), dtype="<i4").copy()
    words = torch.empty(_WORDS * blocks, dtype=torch.int32, device=device)
    secret = torch.from_numpy(start).to(device, non_blocking=True)
    _chacha[(cdiv(blocks, _LANES),)](words, secret, blocks, lanes=_LANES)
    return words


@jit
def _turned(x, by: constexpr):
    return (x << by) | (x >> (32 - by))


@jit
def _quarter(a, b, c, d):
    a = a + b
    d = _turned(d ^ a, 16)
    c = c + d
    b = _turned(b ^ c, 12)
    a = a + b
    d = _turned(d ^ a, 8)
    c = c + d
    b = _turned(b ^ c, 7)
    return a, b, c, d


@jit
def _chacha(words, secret, blocks, lanes: constexpr):
    block = tl.program_id(0) * lanes + tl.arange(0, lanes)
    zero = tl.zeros((lanes,), dtype=tl.uint32)
    s0, s1, s2, s3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    s4 = zero + tl.load(secret + 0).to(tl.uint32, bitcast=True)
    s5 = zero + tl.load(secret + 1).to(tl.uint32, bitcast=True)
    s6 = zero + tl.load(secret + 2).to(tl.uint32, bitcast=True)
    s7 = zero + tl.load(secret + 3).to(tl.uint32, bitcast=True)
    s8 = zero + tl.load(secret + 4).to(tl.uint32, bitcast=True)
    s9 = zero + tl.load(secret + 5).to(tl.uint32, bitcast=True)
    s10 = zero + tl.load(secret + 6).to(tl.uint32, bitcast=True)
    s11 = zero + tl.load(secret + 7).to(tl.uint32, bitcast=True)
    s12 = block.to(tl.uint32)
    s13 = zero + tl.load(secret + 8).to(tl.uint32, bitcast=True)
    s14 = zero + tl.load(secret + 9).to(tl.uint32, bitcast=True)
    s15 = zero + tl.load(secret + 10).to(tl.uint32, bitcast=True)
    x0, x1, x2, x3, x4, x5, x6, x7 = s0, s1, s2, s3, s4, s5, s6, s7
    x8, x9, x10, x11, x12, x13, x14, x15 = s8, s9, s10, s11, s12, s13, s14, s15
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    there = block < blocks
    to = words + block.to(tl.int64) * 16
    tl.store(to + 0, (x0 + s0).to(tl.int32, bitcast=True), mask=there)
    tl.store(to + 1, (x1 + s1).to(tl.int32, bitcast=True), mask=there)
    tl.store(to + 2, (x2 + s2).to(tl.int32, bitcast=True), mask=there)
    tl.store(to + 3, (x3 + s3).to(tl.int32, bitcast=True), mask=there)
    tl.store(to + 4, (x4 + s4).to(tl.int32, bitcast=True), mask=there)
    tl.store(to + 5, (x5 + s5).to(tl.int32, bitcast=True), mask=there)
    tl.store(to + 6, (x6 + s6).to(tl.int32, bitcast=True), mask=there)
    tl.store(to + 7, (x7 + s7).to(tl.int32, bitcast=True), mask=there)
    tl.store(to + 8, (x8 + s8).to(tl.int32, bitcast=True), mask=there)
    tl.store(to + 9, (x9 + s9).to(tl.int32, bitcast=True), mask=there)
    tl.store(to + 10, (x10 + s10).to(tl.int32, bitcast=True), mask=there)
    tl.store(to + 11, (x11 + s11).to(tl.int32, bitcast=True), mask=there)
    tl.store(to + 12, (x12 + s12).to(tl.int32, bitcast=True), mask=there)
    tl.store(to + 13, (x13 + s13).to(tl.int32, bitcast=True), mask=there)
    tl.store(to + 14, (x14 + s14).to(tl.int32, bitcast=True), mask=there)
    tl.store(to + 15, (x15 + s15).to(tl.int32, bitcast=True), mask=there)


@jit
def _noise(
    noise, cells, chances, places, threshold, below, other, count, lanes: constexpr
):  # fmt: skip
    """The formulas of `_gaussian._drawn` and `_gaussian._correction`, which says what they are."""
    sample = tl.program_id(0).to(tl.int64) * lanes + tl.arange(0, lanes)
    there = sample < count
    short = tl.load(cells + sample, mask=there, other=0)
    slot = (short & 0x3FFF).to(tl.int64)
    chance = (tl.load(chances + sample, mask=there, other=0) >> 1) & 0x7FFFFFFFFFFFFFFF
    place = (tl.load(places + sample, mask=there, other=0) >> 1) & 0x7FFFFFFFFFFFFFFF
    first = tl.load(threshold + slot, mask=there, other=0)
    digits = (short >> 14) & 0x1FFFF
    last = tl.load(below + slot, mask=there, other=0)
    own = (chance < first) | ((chance == first) & (digits < last))
    cell = tl.where(own, slot, tl.load(other + slot, mask=there, other=0))
    b = 1.0 / 1048576.0
    m = (cell.to(tl.float64) + 0.5) * b
    q = (place - 0x4000000000000000).to(tl.float64) * (1.0 / 9223372036854775808.0)
    m2 = m * m
    c0 = m * (m2 * (m2 * (1 / 720) + (-1 / 48 + 5 * b / 1152)) + (1 / 2 - b / 32 + b * b / 768))
    c1 = m2 * (m2 * (m2 * (17 / 5040) + (-1 / 30 + 29 * b / 2240)) + (1 / 3 - 17 * b / 240))
    c1 += b / 6 - b * b / 160
    c2 = m * (m2 * (m2 * (-1 / 24) + (1 / 4 - 43 * b / 360)) + (7 * b / 24 - 59 * b * b / 1440))
    c3 = m2 * (m2 * (m2 * (-1 / 21) + (1 / 5 - 11 * b / 63)) + 23 * b / 60) + 7 * b * b / 120
    c4 = m * (m2 * (m2 * (1 / 6) + 163 * b / 360) + 127 * b * b / 720)
    c5 = m2 * m2 * (m2 * (1 / 7) + 71 * b / 140)
    r = ((((c5 * q + c4) * q + c3) * q + c2) * q + c1) * q + c0
    units = r * (0.25 - q * q) * 9223372036854775808.0
    # To the nearest whole number: adding and taking away 1.5 2^52 rounds there.
    place = place - ((units + 6755399441055744.0) - 6755399441055744.0).to(tl.int64)
    steps = (((place >> 44) + 1) >> 1) + (cell << 18)
    tl.store(noise + sample, tl.where(short < 0, -steps, steps), mask=there)
