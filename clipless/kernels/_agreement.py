"""Whether a shortcut computes what it stands for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def is_close(found: Tensor, expected: Tensor, *, tolerance: float) -> bool:
    """Whether two tensors differ by rounding at most; NaN differs from everything."""
    return bool((found - expected).float().norm() <= tolerance * expected.float().norm() + 1e-12)


def all_are_close(found: Sequence[Tensor], expected: Sequence[Tensor], *, tolerance: float) -> bool:
    """Whether there are as many tensors, and each is close to its counterpart."""
    return len(found) == len(expected) and all(
        is_close(one, other, tolerance=tolerance) for one, other in zip(found, expected, strict=True)
    )
