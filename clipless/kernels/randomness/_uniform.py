"""Random numbers for sampling, from cryptographic words: exponentials, and subsets of a size."""

from __future__ import annotations

from typing import Any

import numpy as np

from clipless.kernels.randomness._gaussian import KeyStream


class WordSource:
    """Words of one stream, handed out one after the other."""

    def __init__(self, stream: KeyStream, *, purpose: int, index: int = 0) -> None:
        self._stream, self._purpose, self._index = stream, purpose, index
        self._block = 0

    def take(self, count: int) -> Any:
        """Return the next `count` words, (count,) uint64; the rest of a block is left out."""
        found = self._stream.words(
            count, purpose=self._purpose, index=self._index, first_block=self._block
        )
        self._block += -(-count // 8)
        return found


def standard_exponential(source: WordSource, count: int) -> Any:
    """Return `count` standard exponentials, (count,) float64: -log of a uniform on 2^-53 steps."""
    uniform = (source.take(count) >> np.uint64(11)).astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-53
    return -np.log(uniform)


def random_subset(source: WordSource, size: int, count: int) -> Any:
    """Return `count` of `size` indices in order, (count,) int64, all subsets equally likely.

    Every index draws a number and the smallest win; where few are wanted, indices are drawn until
    `count` different ones are found.
    """
    if 16 * count > size:
        return np.sort(np.argpartition(source.take(size), count - 1)[:count])
    found = np.empty(0, dtype=np.int64)
    while len(found) < count:
        # Of 2^64 words, each index has the same number but for one: below 2^-30 for 2^34 indices.
        drawn = (source.take(count + 8) % np.uint64(size)).astype(np.int64)
        both = np.concatenate([found, drawn])
        _, first = np.unique(both, return_index=True)
        found = both[np.sort(first)][:count]
    return np.sort(found)
