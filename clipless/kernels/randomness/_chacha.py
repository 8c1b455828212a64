"""ChaCha20 (RFC 8439) as a source of random words: a key, a nonce, and a counter of blocks.

Who does not know the key cannot tell its stream from random bits by any known attack; that is an
assumption about computing power, and the only one. The time it takes depends on nothing secret.
On the CPU the blocks come from OpenSSL, by way of `cryptography`; on CUDA from a Triton kernel
(`_triton_noise`), bit for bit the same.
"""

from __future__ import annotations

import struct

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

KEY_BYTES = 32
BLOCK_BYTES = 64
_MOST_BLOCKS = 2**32
_RATCHET_PURPOSE = 0xFFFFFFFF
"""The purpose of the stream that the next key is taken from, and that nothing else uses."""


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
