"""Orthogonalisation and clipping of singular values, approximate; certificates check them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The cubic step sends singular values in [0, sqrt(3)] into [0, 1] without changing their sign.
_SAFE_NORM = math.sqrt(3.0)
# Without a look at the values (on a GPU) this many steps restore a weight that a step has moved.
_BLIND_ITERATIONS = 8
_MOST_ITERATIONS = 60
# A residual below which one more step of order three ends at the rounding error of float32.
_NEARLY_THERE = 5e-3


def orthogonalize(matrices: Tensor, *, iterations: int | None = None) -> Tensor:
    """Return the nearest (semi-)orthogonal matrices, by Newton-Schulz steps from `matrices`.

    With the residual R = I - W W^T, a step is `W <- W + R W / 2`, and near the end, where it is
    safe, `W <- W + (R / 2 + 3 R^2 / 8) W`, which converges with order three. Since successive
    training steps move weights little, the weights themselves are the warm start.

    Args:
        matrices: (..., rows, columns), float32 or float64.
        iterations: number of steps; by default as many as it takes on the CPU, and a fixed number
            on other devices, where looking at the residual would stall.

    Returns:
        Matrices of the same shape whose nonzero singular values are close to 1. How close is for
        a certificate to say: nothing may rely on convergence. Zero directions stay zero.
    """
    rows, columns = matrices.shape[-2:]
    if rows > columns:
        return orthogonalize(matrices.mT, iterations=iterations).mT
    if iterations is None and matrices.device.type == "cpu":
        return _converge(matrices)
    current = _scale_into_reach(matrices)
    for _ in range(_BLIND_ITERATIONS if iterations is None else iterations):
        current = current + 0.5 * (_residual(current) @ current)
    return current


def _converge(matrices: Tensor) -> Tensor:
    """Step until the residual is at rounding level, or stops falling."""
    current, residual = matrices, _residual(matrices)
    size = _largest_norm(residual)
    if not size < 1:  # some singular value may lie beyond sqrt(2), or entries may be extreme
        current = _scale_into_reach(matrices)
        residual = _residual(current)
        size = _largest_norm(residual)
    floor = 1e-7 * matrices.shape[-2]
    for _ in range(_MOST_ITERATIONS):
        if size < floor:
            break
        correction = 0.5 * residual
        if size < 0.3:
            correction = correction + 0.375 * (residual @ residual)
        current = current + correction @ current
        if size < _NEARLY_THERE:
            break
        residual = _residual(current)
        previous, size = size, _largest_norm(residual)
        # Zero directions keep the residual at one each; it then stops falling.
        if not size < previous * (1 - 1e-6):
            break
    return current


def _residual(matrices: Tensor) -> Tensor:
    identity = torch.eye(matrices.shape[-2], dtype=matrices.dtype, device=matrices.device)
    return identity - matrices @ matrices.mT


def _largest_norm(residual: Tensor) -> float:
    return float(torch.linalg.vector_norm(residual, dim=(-2, -1)).max())


def _scale_into_reach(matrices: Tensor) -> Tensor:
    """Divide by a crude upper bound of the norm where the norm may exceed sqrt(3).

    Near-orthogonal weights are left as they are, which is what makes the warm start warm.
    """
    entry = matrices.abs().amax(dim=(-2, -1), keepdim=True)
    entry = torch.where(entry > 0, entry, torch.ones_like(entry))
    # Entries beyond this range would overflow or vanish when squared; others are untouched.
    extreme = (entry > 1e3) | (entry < 1e-6)
    matrices = torch.where(extreme, matrices / entry, matrices)
    gram = matrices @ matrices.mT
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    deviation = gram - identity
    square = torch.minimum(
        torch.linalg.vector_norm(gram @ gram, dim=(-2, -1), keepdim=True).sqrt(),
        1 + torch.linalg.vector_norm(deviation @ deviation, dim=(-2, -1), keepdim=True).sqrt(),
    )
    bound = torch.sqrt(square)
    # Tiny weights are enlarged: small singular values grow only by half a step.
    small = (bound < 0.5) & (bound > 0)
    factor = torch.where(small | (bound > _SAFE_NORM), _SAFE_NORM * 0.98 / bound, 1.0)
    factor = torch.where(bound > 0, factor, torch.ones_like(factor))
    return matrices * factor


def clip_singular_values(matrices: Tensor, *, radius: float = 1.0) -> Tensor:
    """Return the nearest matrices with singular values at most `radius` (up to rounding).

    This is the Euclidean projection onto the spectral ball, through the eigenvectors of the
    smaller Gram matrix in double precision.
    """
    rows, columns = matrices.shape[-2:]
    if rows > columns:
        return clip_singular_values(matrices.mT, radius=radius).mT
    wide = matrices.to(torch.float64)
    largest = wide.abs().amax(dim=(-2, -1), keepdim=True)
    finite = torch.isfinite(largest)
    # Far outside, scaling down first loses nothing that the clipping would have kept.
    reach = 1e6 * radius
    shrunk = torch.where(largest > reach, wide * (reach / largest), wide)
    shrunk = torch.where(finite, shrunk, torch.zeros_like(shrunk))
    eigenvalues, vectors = torch.linalg.eigh(shrunk @ shrunk.mT)
    singular = eigenvalues.clamp_min(0).sqrt()
    shrink = radius / singular.clamp_min(radius)
    # W - V diag(1 - shrink) V^T W: exact where nothing needs clipping.
    correction = (vectors * (1 - shrink)[..., None, :]) @ (vectors.mT @ shrunk)
    # What is not finite is left as it is, for its certificate to say so.
    return torch.where(finite, shrunk - correction, wide).to(matrices.dtype)
