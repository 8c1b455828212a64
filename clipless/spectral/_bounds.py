"""Certified upper bounds of the spectral norm of matrices.

All of them work on batches of real or complex matrices (..., rows, columns), compute in double
precision and add the rounding error of their own arithmetic, so the true norm is never larger.
Power iteration is absent on purpose: it converges from below.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Unit roundoff of float64, doubled: complex products and reordered sums stay inside.
UNIT_ROUNDOFF = 2.0**-52
# Inflation of the last few scalar operations (square roots, sums, the final rescaling).
_SCALAR_SLACK = 1.0 + 64 * UNIT_ROUNDOFF


def spectral_norm_bound(matrices: Tensor, *, iterations: int = 10) -> Tensor:
    """Return a certified upper bound of each matrix's spectral norm, the tighter of two proofs.

    Args:
        matrices: (..., rows, columns), any floating or complex dtype.
        iterations: squarings of the Gram iteration. The bound exceeds the norm by at most the
            factor `rank ** (0.5 ** (iterations + 1))`.

    Returns:
        (...) float64. A matrix with a non-finite entry gets `inf`; a zero matrix gets 0.

    Example:
        >>> spectral_norm_bound(torch.diag(torch.tensor([3.0, 1.0]))).item() >= 3.0
        True
    """
    scaled, scale = _normalise(matrices)
    gram, error = _gram(scaled)
    residual = _residual(gram) + error
    # Near-orthogonal matrices, the common case after a projection, need no squaring at all. The
    # look at the values is free on the CPU and would stall a GPU.
    if gram.device.type == "cpu" and bool((residual <= _mean_eigenvalue(gram) * 1.0001).all()):
        return _finish(residual, scale)
    squared = gram_iteration(gram, iterations) + error
    return _finish(torch.minimum(residual, squared), scale)


def gram_bound(matrices: Tensor, *, iterations: int = 10) -> Tensor:
    """Bound the spectral norm by Gram iteration: ||W|| <= ||(W* W)^(2^k)||_F^(1 / 2^(k+1)).

    Valid for every number of iterations k; it decreases to the norm as k grows.
    """
    scaled, scale = _normalise(matrices)
    gram, error = _gram(scaled)
    return _finish(gram_iteration(gram, iterations) + error, scale)


def residual_bound(matrices: Tensor) -> Tensor:
    """Bound the spectral norm by the distance of the Gram matrix from a multiple of the identity.

    With G the Gram matrix on the smaller side, m its size and mu its mean eigenvalue, the largest
    eigenvalue of G is at most `mu + sqrt((m - 1) / m) ||G - mu I||_F` (the largest of m numbers
    with given mean and variance). For orthogonalised weights this is tight, costs one product,
    and unlike `sqrt(1 + ||G - I||_F)`, which it always improves on, it scales with the weights.
    """
    scaled, scale = _normalise(matrices)
    gram, error = _gram(scaled)
    return _finish(_residual(gram) + error, scale)


def _normalise(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Scale every matrix to a largest entry in [1/2, 1], by a power of two: this is exact.

    The scale of a matrix with non-finite entries is infinite, and the scaled matrix meaningless.
    """
    wide = matrices.to(torch.complex128 if matrices.is_complex() else torch.float64)
    # Complex numbers as pairs: complex division would lose the smallest of them.
    parts = torch.view_as_real(wide) if matrices.is_complex() else wide[..., None]
    low, high = torch.aminmax(parts.flatten(-3), dim=-1)
    largest = torch.maximum(-low, high)
    _, exponent = torch.frexp(largest)
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    scale = torch.where(largest == 0, torch.ones_like(scale), scale)
    scale = torch.where(torch.isfinite(largest), scale, torch.full_like(scale, torch.inf))
    scaled = parts / scale[..., None, None, None]
    if matrices.is_complex():
        return torch.view_as_complex(scaled), scale
    return scaled.squeeze(-1), scale


def _gram(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Gram matrix on the smaller side, and a bound of its error in Frobenius norm.

    A computed product of matrices with inner dimension n is off by at most
    `n u ||A||_F ||B||_F`, whatever the order of summation; ||A||_F^2 is the trace of the product.
    """
    rows, columns = scaled.shape[-2:]
    gram = scaled @ scaled.mH if rows <= columns else scaled.mH @ scaled
    energy = _mean_eigenvalue(gram) * gram.shape[-1] * (1 + 1e-9)
    return gram, (max(rows, columns) + 4) * UNIT_ROUNDOFF * energy


def gram_iteration(gram: Tensor, iterations: int) -> Tensor:
    """Return an upper bound of the largest eigenvalue of a computed Gram matrix.

    For any A, ||A|| <= sqrt(||A A*|| ), so a bound of each square bounds its root; the rounding
    of each square enters before the root is taken.
    """
    size = gram.shape[-1]
    norms = []
    current = gram
    for _ in range(iterations):
        norm = _frobenius(current)
        norms.append(norm)
        current = current / torch.where(norm == 0, torch.ones_like(norm), norm)[..., None, None]
        current = current @ current.mH
    bound = _frobenius(current)
    # Each square was taken of a matrix of Frobenius norm one.
    error = (size + 4) * UNIT_ROUNDOFF
    for norm in reversed(norms):
        bound = torch.sqrt(bound + error) * norm * (1 + 8 * UNIT_ROUNDOFF)
    return bound * (1 + size * size * UNIT_ROUNDOFF)


def trace_bound(gram: Tensor, identity: Tensor, size: Tensor | int) -> Tensor:
    """Return `mu + sqrt((m - 1) / m) ||G - mu I||_F`, which bounds the largest eigenvalue of G.

    G may be padded with zeros: `size` is m, and `identity` has ones as far as the matrix goes.
    """
    mean = torch.diagonal(gram, dim1=-2, dim2=-1).real.sum(dim=-1) / size
    deviation = _frobenius(gram - mean[..., None, None] * identity)
    # `mean` is itself rounded; any number in its place leaves a valid bound up to that rounding.
    rounding = (size * size + 8) * UNIT_ROUNDOFF * (mean.abs() + deviation)
    return mean + deviation * ((size - 1) / size) ** 0.5 + rounding


def _residual(gram: Tensor) -> Tensor:
    size = gram.shape[-1]
    return trace_bound(gram, torch.eye(size, dtype=gram.dtype, device=gram.device), size)


def _mean_eigenvalue(gram: Tensor) -> Tensor:
    return torch.diagonal(gram, dim1=-2, dim2=-1).real.mean(dim=-1)


def _frobenius(matrices: Tensor) -> Tensor:
    return torch.linalg.vector_norm(matrices, dim=(-2, -1)).real


def _finish(squared_norm: Tensor, scale: Tensor) -> Tensor:
    """Turn a bound of the largest Gram eigenvalue into one of the norm, in the original scale."""
    bound = torch.sqrt(squared_norm) * _SCALAR_SLACK * scale
    return torch.where(torch.isfinite(scale), bound, scale)
