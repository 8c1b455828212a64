"""Gaussian noise on a grid, from a ChaCha20 key to what is added to a release.

`round(N(0, 1) * 2^28)`, as integers made from random words: a cell of |N(0, 1)| is drawn from a
table, a place within it by inverting the distribution function there, and a sign. The place is a
uniform word plus a correction, because the density within a cell is not quite constant: of the
word's 63 bits, 18 become part of the integer, and the other 45 see to it that every integer has its
probability to a relative error of 2^-40 (`docs/arithmetic.md`). Nothing is rejected and no branch
depends on a value.

Who does not know the key cannot tell the stream of ChaCha20 (RFC 8439) from random bits by any
known attack; that is an assumption about computing power, and the only one. The time it takes
depends on nothing secret. On the CPU the blocks come from OpenSSL, by way of `cryptography`; on
CUDA from a Triton kernel (`_triton_noise`), bit for bit the same.
"""

from __future__ import annotations

import functools
import hashlib
import math
import secrets
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from torch import Tensor

from clipless.common import Query
from clipless.kernels.randomness._gaussian_table import CELL_BITS, LOW_BITS, WIDTH_BITS, cell_table

KEY_BYTES = 32
BLOCK_BYTES = 64
_MOST_BLOCKS = 2**32
_RATCHET_PURPOSE = 0xFFFFFFFF
"""The purpose of the stream that the next key is taken from, and that nothing else uses."""

GRID_STEPS = 2**28
"""How many steps of its grid the standard deviation of noise is: the grid is public."""

_CELL_STEPS_BITS = 28 - WIDTH_BITS
_PLACE_BITS = 63
_SLOPE = 2.0**-20  # the square of a cell's width: b below
_AT_ONCE = 1 << 15
"""Samples that are made at a time: what they need stays in the processor's caches."""
_CELLS, _THRESHOLDS, _PLACES = 0, 1, 2
"""The three streams of words: which slot and sign, which candidate, which place."""

STATE_NAME = "chacha20"
"""What a saved state calls the key of the noise."""


class GaussianNoise:
    """Gaussian noise on a grid, from a ChaCha20 key that moves on with every release.

    What is released is rounded to a grid and gets noise that lies on it, added as integers: the
    rounding of what the ideal mechanism releases, so that no digit tells more than its result does.
    The key comes from the operating system. After a release it is replaced by one that does not
    lead back to it: who steals a state learns the noise to come, and none that was. A copy, in
    memory or in a file, has a key of its own, and threads that release at once get different ones.
    `insecure_seed` is for tests: the noise can be recomputed by whoever knows the seed, and what it
    is added to is not private.
    """

    def __init__(self, *, insecure_seed: int | None = None) -> None:
        self.insecure = insecure_seed is not None
        self._taking = threading.Lock()
        if insecure_seed is None:
            self.renew()
        else:
            text = f"clipless/insecure noise/{insecure_seed}"
            self._key = hashlib.sha256(text.encode()).digest()

    @torch.no_grad()
    def add_(self, values: Sequence[Tensor], queries: Sequence[Query]) -> None:
        """Round the values of one release to their grids and add their noise, in place.

        Nothing is read back from an accelerator. The deviations are a little larger than asked
        for, by what rounding to grids moves two neighbours apart (`joint_grid_factor`).
        """
        if len(values) != len(queries):
            raise ValueError(f"{len(queries)} queries do not describe {len(values)} values")
        deviations = _grown_deviations(tuple(queries), tuple(each.numel() for each in values))
        with self._taking:
            key, self._key = self._key, next_key(self._key)
        add_grid_noise_(values, deviations, KeyStream(key))

    def renew(self) -> None:
        """Take a new key from the operating system."""
        self._key = secrets.token_bytes(KEY_BYTES)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy everything but the key, which would make the same noise twice."""
        return (_copied, (self._key if self.insecure else None,))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the key of the releases to come: keep it secret. Earlier noise is not in it."""
        return {STATE_NAME: torch.frombuffer(bytearray(self._key), dtype=torch.uint8)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue the noise where `state` was saved."""
        self._key = bytes(state[STATE_NAME].tolist())


def _copied(insecure_key: bytes | None) -> GaussianNoise:
    copied = GaussianNoise()
    if insecure_key is not None:
        copied.insecure, copied._key = True, insecure_key
    return copied


@functools.lru_cache(maxsize=16)
def _grown_deviations(queries: tuple[Query, ...], sizes: tuple[int, ...]) -> tuple[float, ...]:
    """The deviations of a release, with what rounding to grids asks for."""
    noisy = [(query, size) for query, size in zip(queries, sizes, strict=True)]
    noisy = [(query, size) for query, size in noisy if query.deviation > 0]
    multiplier = joint_multiplier(
        [query.sensitivity for query, _ in noisy], [query.deviation for query, _ in noisy]
    )
    entries = sum(size for _, size in noisy)
    factor = 1.0 if math.isinf(multiplier) else joint_grid_factor(multiplier, entries)
    return tuple(factor * query.deviation for query in queries)


def joint_multiplier(sensitivities: Sequence[float], deviations: Sequence[float]) -> float:
    """Return the noise multiplier of the joint release: `(sum (D_d / std_d)^2)^(-1/2)`."""
    pairs = [(d, s) for d, s in zip(sensitivities, deviations, strict=True) if d > 0]
    if any(s == 0 for _, s in pairs):
        return 0.0
    return 1 / math.sqrt(sum((d / s) ** 2 for d, s in pairs)) if pairs else math.inf


@torch.no_grad()
def add_grid_noise_(
    tensors: Sequence[Tensor], deviations: Sequence[float], stream: KeyStream
) -> None:
    """Round tensors to grids and add Gaussian noise of the given deviations, in place.

    The grid of a tensor is its deviation over 2^28. Rounding moves two neighbours apart by at most
    one step an entry, which whoever chooses the deviation has to account for.
    """
    both = zip(tensors, deviations, strict=True)
    wanted = {index: tensor for index, (tensor, deviation) in enumerate(both) if deviation > 0}
    for index, noise in _noise_of_each(wanted, stream):
        tensor, step = wanted[index], deviations[index] / GRID_STEPS
        places = torch.round(tensor.to(torch.float64) / step).to(torch.int64)
        places += noise.view(places.shape)
        tensor.copy_(places.to(torch.float64).mul_(step))


def _noise_of_each(
    tensors: Mapping[int, Tensor], stream: KeyStream
) -> Iterator[tuple[int, Tensor]]:
    """Yield the noise of every tensor, by its index; small ones on the CPU are made together."""
    together: dict[int, int] = {}
    for index, tensor in tensors.items():
        if tensor.device.type != "cpu" or tensor.numel() > _AT_ONCE:
            yield index, grid_noise(tensor.numel(), stream, index, tensor.device)
            continue
        if sum(together.values()) + tensor.numel() > _AT_ONCE:
            yield from _made_together(together, stream)
            together = {}
        together[index] = tensor.numel()
    yield from _made_together(together, stream)


def _made_together(counts: Mapping[int, int], stream: KeyStream) -> Iterator[tuple[int, Tensor]]:
    if counts:
        noise = _drawn([(index, 0, count) for index, count in counts.items()], stream)
        yield from zip(counts, noise.split(list(counts.values())), strict=True)


def grid_noise(
    count: int, stream: KeyStream, index: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """Return `round(N(0, 1) * 2^28)` for each of `count` samples, (count,) int64.

    The same on every device: a function of the stream's key and the index.

    Example:
        >>> noise = grid_noise(1000, KeyStream(bytes(32)))
        >>> bool((noise.double() / GRID_STEPS).std() < 1.1)
        True
    """
    device = torch.device(device)
    if device.type == "cuda":
        kernels = _cuda_kernels()
        if kernels is not None:
            noise: Tensor = kernels.grid_noise(count, stream.key, index, device)
            return noise
    parts = [
        _drawn([(index, first, min(_AT_ONCE, count - first))], stream)
        for first in range(0, count, _AT_ONCE)
    ]
    noise = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
    return noise.to(device)


def _cuda_kernels() -> ModuleType | None:
    """The kernels for CUDA, if Triton is there."""
    try:
        from clipless.kernels.randomness import _triton_noise
    except ImportError:
        return None
    return _triton_noise


def _drawn(pieces: Iterable[tuple[int, int, int]], stream: KeyStream) -> Tensor:
    """Samples of one stream after the other: of each index, `count` of them from `first` on.

    `first` is a multiple of what fills whole blocks.
    """

    def words(plane: int, each: int) -> Tensor:
        """A number for every sample, of which `each` are in a word."""
        found = [
            stream.words(
                -(-count // each), purpose=plane, index=index, first_block=first // (8 * each)
            ).view("<i4" if each == 2 else "<i8")[:count]
            for index, first, count in pieces
        ]
        return torch.from_numpy(np.concatenate(found))

    short = words(_CELLS, 2)  # a slot, 17 digits of chance, and a sign
    slots = (short & ((1 << CELL_BITS) - 1)).to(torch.int64)
    digits = (short >> CELL_BITS) & ((1 << LOW_BITS) - 1)
    chance = words(_THRESHOLDS, 1).bitwise_right_shift_(1).bitwise_and_((1 << 63) - 1)
    place = words(_PLACES, 1).bitwise_right_shift_(1).bitwise_and_((1 << 63) - 1)
    table = cell_table(torch.device("cpu"))
    threshold = table.threshold.take(slots)
    own = (chance < threshold) | ((chance == threshold) & (digits < table.below.take(slots)))
    cells = torch.where(own, slots, table.other.take(slots))
    place -= _correction(cells, place)
    # Rounded to the nearest step: twice as fine first, since a half more could overflow.
    steps = ((place >> (_PLACE_BITS - _CELL_STEPS_BITS - 1)) + 1) >> 1
    steps += cells << _CELL_STEPS_BITS
    return torch.where(short < 0, -steps, steps)


def _correction(cells: Tensor, place: Tensor) -> Tensor:
    """Return how much nearer to zero than uniform a place within its cell is, in units of 2^-63.

    With q = u - 1/2 for a uniform u, the place within a cell of width w around x is s + 1/2 where s
    has the distribution function u for the density exp(-m s - b s^2 / 2), m = w x, b = w^2. Its
    series is q - (1/4 - q^2) R(q), with R as below; what is left out is below 2^-60 for x <= 8.
    """
    m = cells.to(torch.float64).add_(0.5).mul_(_SLOPE)
    q = place.sub(1 << 62).to(torch.float64).mul_(2.0**-63)
    b, m2 = _SLOPE, m * m
    c0 = m * (m2 * (m2 * (1 / 720) + (-1 / 48 + 5 * b / 1152)) + (1 / 2 - b / 32 + b * b / 768))
    c1 = m2 * (m2 * (m2 * (17 / 5040) + (-1 / 30 + 29 * b / 2240)) + (1 / 3 - 17 * b / 240))
    c1 += b / 6 - b * b / 160
    c2 = m * (m2 * (m2 * (-1 / 24) + (1 / 4 - 43 * b / 360)) + (7 * b / 24 - 59 * b * b / 1440))
    c3 = m2 * (m2 * (m2 * (-1 / 21) + (1 / 5 - 11 * b / 63)) + 23 * b / 60) + 7 * b * b / 120
    c4 = m * (m2 * (m2 * (1 / 6) + 163 * b / 360) + 127 * b * b / 720)
    c5 = m2 * m2 * (m2 * (1 / 7) + 71 * b / 140)
    r = torch.addcmul(c4, c5, q)
    for coefficient in (c3, c2, c1, c0):
        r = torch.addcmul(coefficient, r, q)
    bell = torch.addcmul(torch.full_like(q, 0.25), q, q, value=-1)
    return r.mul_(bell).mul_(2.0**63).round_().to(torch.int64)


def joint_grid_factor(multiplier: float, entries: int) -> float:
    """Return by how much deviations must grow so that rounding to grids costs nothing.

    Rounding moves each of `entries` numbers of two neighbours apart by one step, which is 2^-28 of
    its deviation (an eighth more, for the rounding of the division). In units of deviations, one
    record then moves the release by `1 / multiplier` and by `1.125 sqrt(entries) 2^-28` more at
    most: the triangle inequality over all tensors that are released together.
    """
    moved = 1.125 * math.sqrt(entries) / GRID_STEPS * multiplier
    if not moved < 0.5:
        raise ValueError(
            f"a noise multiplier of {multiplier:g} on {entries} numbers is more than the grid of "
            "the noise allows; nothing is learned at such a multiplier. Take a smaller one."
        )
    return 1 / (1 - moved)


class KeyStream:
    """The random words that belong to one key, told apart by a purpose, an index and a position.

    Example:
        >>> stream = KeyStream(bytes(32))
        >>> stream.words(2, purpose=0, index=0).tolist() == stream.words(2, purpose=0).tolist()
        True
        >>> stream.words(2, purpose=0).tolist() == stream.words(2, purpose=1).tolist()
        False
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key of ChaCha20 has {KEY_BYTES} bytes, got {len(key)}")
        self.key = key

    def words(
        self, count: int, *, purpose: int, index: int = 0, first_block: int = 0
    ) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Return `count` words of 64 bits, (count,), from block `first_block` of 8 words on."""
        blocks = -(-count // 8)
        if not 0 <= first_block <= _MOST_BLOCKS - blocks:
            raise ValueError(
                f"{count} words from block {first_block} on are more than one nonce has: a stream "
                f"of ChaCha20 has {_MOST_BLOCKS} blocks of {BLOCK_BYTES} bytes"
            )
        start = struct.pack("<I", first_block) + nonce(purpose, index)
        stream = Cipher(ChaCha20(self.key, start), mode=None).encryptor()
        data = stream.update(bytes(BLOCK_BYTES * blocks))
        return np.frombuffer(data, dtype="<u8", count=count)


def nonce(purpose: int, index: int) -> bytes:
    """Return the 96 bits that tell streams of one key apart: what for, and which."""
    return struct.pack("<IQ", purpose, index)


def next_key(key: bytes) -> bytes:
    """Return the key that follows; nobody can go back from it to the one before.

    Example:
        >>> next_key(bytes(32)) == next_key(bytes(32)) != bytes(32)
        True
    """
    return KeyStream(key).words(KEY_BYTES // 8, purpose=_RATCHET_PURPOSE).tobytes()
