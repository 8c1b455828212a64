"""A number that changes with any bit of some tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def fingerprint(tensors: Sequence[Tensor], *, salt: int = 0) -> int:
    """Return 64 bits, with a sign, of a SHA-256 of the tensors; waits for their device."""
    digest = hashlib.sha256(f"clipless/fingerprint/{salt}".encode())
    for tensor in tensors:
        flat = tensor.detach().cpu().reshape(-1).view(_INTEGERS[tensor.element_size()])
        digest.update(flat.contiguous().numpy().data)
    return int.from_bytes(digest.digest()[:8], signed=True)
