"""Projection of matrices of many shapes at once, by a fixed sequence of products.

Made for GPUs, compilers and CUDA graphs: nothing looks at a value, so nothing waits for one, and
all matrices go through the same few kernels. Only Gram matrices on the smaller side are iterated
on, in double precision, padded with zeros to a common size; the weights are cut into pieces of one
size, read for their Gram matrices, and multiplied once by the factor that was found.

Soundness does not rest on convergence. Whatever the factor Z is, the norm of Z W is certified from
`Z (W W^T) Z^T`, with the rounding errors of all products added, and divided by.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from clipless.spectral._bounds import UNIT_ROUNDOFF, gram_iteration, trace_bound

# Odd polynomials a x + b x^3 + c x^5, applied one after the other: each is the best approximation
# of 1 on the interval into which the ones before it map [0.001, 1]. All together map it to 1, up
# to 1e-9; from the third on, they do so with [0.036, 1.96].
_STEPS = (
    (8.470329, -25.108075, 18.629276),
    (4.182834, -3.108701, 0.580607),
    (3.961857, -2.954064, 0.562976),
    (3.286586, -2.464720, 0.507358),
    (2.273750, -1.644660, 0.416191),
    (1.888716, -1.265157, 0.376519),
    (1.875, -1.25, 0.375),
)
_SHORT_STEPS, _SHORT_REACH = _STEPS[2:], 1.96
# Matrices whose smaller side is at most this share one stack; larger ones, one for each octave.
_SMALL_SIDE = 128
_SQUARINGS = 10
# How many columns are multiplied at a time, at least.
_PIECE = 320
# Matrices of less than this are as good as zero.
_SMALLEST_ENERGY = 1e-280


def project_matrices(
    stacks: Sequence[Tensor], radii: Sequence[float], *, clip: bool
) -> list[Tensor]:
    """Return matrices of spectral norm at most their radius, rounding included.

    Args:
        stacks: (count, rows, columns) each, of any floating dtypes, all on one device.
        radii: one for each stack.
        clip: clip singular values at the radius, instead of moving all of them there.

    Returns:
        Stacks of the same shapes and dtypes. Singular values end at the radius if they lay within
        a factor of 30 of each other, as they do after a step of training.

    Example:
        >>> tall, wide = torch.randn(2, 8, 3), torch.randn(1, 4, 9)
        >>> tall, wide = project_matrices([tall, wide], [1.0, 2.0], clip=False)
        >>> torch.linalg.svdvals(wide.double()).max().item() <= 2
        True
    """
    buckets: defaultdict[int, list[int]] = defaultdict(list)
    for index, stack in enumerate(stacks):
        side = min(stack.shape[-2:])
        buckets[0 if side <= _SMALL_SIDE else (side - 1).bit_length()].append(index)
    projected = list(stacks)
    for members in buckets.values():
        results = _project([stacks[i] for i in members], [radii[i] for i in members], clip)
        for index, result in zip(members, results, strict=True):
            projected[index] = result
    return projected


def _project(stacks: list[Tensor], radii: list[float], clip: bool) -> list[Tensor]:
    tall = [stack.shape[-2] > stack.shape[-1] for stack in stacks]
    wide = [stack.mT if turned else stack for stack, turned in zip(stacks, tall, strict=True)]
    known = _known(
        tuple(
            (*matrices.shape, radius, torch.finfo(stack.dtype).eps)
            for matrices, radius, stack in zip(wide, radii, stacks, strict=True)
        ),
        stacks[0].device,
    )
    size = known.identity.shape[-1]
    length = max(_PIECE, size)
    cut = [_pieces(matrices, size, length) for matrices in wide]
    pieces = torch.cat([each.flatten(0, 1) for each in cut])
    shares = (pieces @ pieces.mT).split([each.shape[0] * each.shape[1] for each in cut])
    gram = torch.cat(
        [share.unflatten(0, each.shape[:2]).sum(1) for share, each in zip(shares, cut, strict=True)]
    )
    factor = _factor(gram, known, clip)
    products = (factor.index_select(0, known.owner) @ pieces).split(
        [each.shape[0] * each.shape[1] for each in cut]
    )
    projected = []
    for product, each, stack, turned in zip(products, cut, stacks, tall, strict=True):
        side, inner = sorted(stack.shape[-2:])
        joined = product.unflatten(0, each.shape[:2]).transpose(1, 2).flatten(2)
        result = joined[:, :side, :inner].to(stack.dtype)
        projected.append(result.mT if turned else result)
    return projected


def _pieces(matrices: Tensor, size: int, length: int) -> Tensor:
    """Cut matrices into pieces of `length` columns: (count, pieces, size, length), filled up.

    All matrices are multiplied as one stack of pieces: by one kernel, on the whole device at once.
    """
    _, side, inner = matrices.shape
    filled = F.pad(matrices.to(torch.float64), (0, -inner % length, 0, size - side))
    return filled.unflatten(2, (-1, length)).transpose(1, 2)


def _factor(gram: Tensor, known: _Known, clip: bool) -> Tensor:
    """Return what the matrices are to be multiplied by, given their Gram matrices."""
    energy = _trace(gram)
    energy = torch.where(energy > _SMALLEST_ENERGY, energy, torch.ones_like(energy))
    gram = gram / energy[:, None, None]  # of trace one, so that no product overflows or vanishes
    radius = known.radius / energy.sqrt()
    if clip:
        factor, target = _clipping_factor(gram, radius, known), radius
    else:
        factor, target = _orthogonal_factor(gram, known), torch.ones_like(radius)
    bound = _certified_bound(factor, gram, known, clip)
    shrinkage = torch.where(bound > target, target / bound, torch.ones_like(bound))
    return factor * (shrinkage * (radius / target))[:, None, None]


@dataclass(frozen=True)
class _Known:
    """What is known of a stack before its values: one entry for each matrix."""

    identity: Tensor
    """Ones on the diagonal as far as the matrix goes: (matrices, size, size)."""
    side: Tensor
    inner: Tensor
    radius: Tensor
    precision: Tensor
    """The rounding unit of the dtype that the result has."""
    owner: Tensor
    """Which matrix each of the pieces belongs to."""


def _known(parts: tuple[tuple[int, int, int, float, float], ...], device: torch.device) -> _Known:
    return _Known(*_constants(parts, device))


def _constants(
    parts: tuple[tuple[int, int, int, float, float], ...], device: torch.device
) -> tuple[Tensor, ...]:
    return _remembered(parts, device)


# What `torch.compiler.assume_constant_result` does, which would import the compiler to do it.
_constants._dynamo_marked_constant = True  # type: ignore[attr-defined]


# Sending numbers to a device waits for it, so it is done once.
@functools.lru_cache(maxsize=64)
def _remembered(
    parts: tuple[tuple[int, int, int, float, float], ...], device: torch.device
) -> tuple[Tensor, ...]:
    rows = [row[1:] for row in parts for _ in range(row[0])]
    table = torch.tensor(rows, dtype=torch.float64, device=device)
    side, inner, radius, precision = table.T.contiguous().unbind()
    size = max(row[1] for row in parts)
    diagonal = (torch.arange(size, device=device) < side[:, None]).to(torch.float64)
    counts = torch.tensor([-(-int(row[1]) // max(_PIECE, size)) for row in rows])
    owner = torch.arange(len(rows)).repeat_interleave(counts).to(device)
    return torch.diag_embed(diagonal), side, inner, radius, precision, owner


def _orthogonal_factor(gram: Tensor, known: _Known) -> Tensor:
    """Return Z, with the singular values of Z W near one."""
    reach = (_SHORT_REACH**2 / _crude_bound(gram, known))[:, None, None]
    current = gram * reach
    factor = step = _even_step(current, known, *_SHORT_STEPS[0])
    for coefficients in _SHORT_STEPS[1:]:
        current = step @ current @ step
        step = _even_step(current, known, *coefficients)
        factor = step @ factor
    return factor * reach.sqrt()


def _clipping_factor(gram: Tensor, radius: Tensor, known: _Known) -> Tensor:
    """Return Z, with singular values s of W becoming `min(s, r)` in Z W.

    With S the sign of `r^2 I - W W^T`: S = 1 where s < r, where Z is to be 1, and S = -1 where
    s > r, where Z is to be r / s, which is what orthogonalisation gives.
    """
    radius = radius[:, None, None]
    span = torch.maximum(_crude_bound(gram, known)[:, None, None], radius**2)
    sign = (radius**2 / span) * known.identity - gram / span
    for coefficients in _STEPS:
        sign = sign @ _even_step(sign @ sign, known, *coefficients)
    outside = _orthogonal_factor(gram, known) * radius
    return 0.5 * (known.identity + sign + torch.baddbmm(outside, sign, outside, alpha=-1))


def _even_step(square: Tensor, known: _Known, a: float, b: float, c: float) -> Tensor:
    """Return `a I + b X^2 + c X^4`, given X^2."""
    if torch.compiler.is_compiling():  # everything but the product becomes one kernel
        return (square @ square) * c + (square * b + known.identity * a)
    step = torch.baddbmm(square, square, square, beta=b, alpha=c)
    return step.add_(known.identity, alpha=a)


def _crude_bound(gram: Tensor, known: _Known) -> Tensor:
    """About the largest eigenvalue, from above; one for a matrix of zeros."""
    bound = torch.minimum(
        trace_bound(gram, known.identity, known.side),
        torch.linalg.vector_norm(gram @ gram, dim=(-2, -1)).sqrt(),
    )
    return torch.where(bound > 0, bound, torch.ones_like(bound))


def _certified_bound(factor: Tensor, gram: Tensor, known: _Known, clip: bool) -> Tensor:
    """Return a bound of the norm of Z W, with room for the rounding of that product.

    With u the rounding unit, the computed Gram matrix is off by `n u ||W||_F^2` and each product
    with Z by `m u` times the norms of its factors; ||W||_F^2 is the trace of the Gram matrix, one.
    """
    size = gram.shape[-1]
    image = factor @ gram @ factor.mT
    length = torch.linalg.vector_norm(factor, dim=(-2, -1))
    error = (2 * size + known.inner + 32) * UNIT_ROUNDOFF * length**2 * (1 + 1e-6)
    square = trace_bound(image, known.identity, known.side)
    if clip:
        square = torch.minimum(square, gram_iteration(image, _SQUARINGS))
    bound = torch.sqrt(square + error) * (1 + 64 * UNIT_ROUNDOFF)
    # Rounding to the final dtype moves Z W by eps / 2 of its Frobenius norm; twice eps is taken
    # off, so that a later certificate, which rounds too, still holds.
    frobenius = torch.sqrt(_trace(image) + size * error)
    return bound + 2 * known.precision * frobenius + (size + 16) * UNIT_ROUNDOFF * length


def _trace(matrices: Tensor) -> Tensor:
    return torch.diagonal(matrices, dim1=-2, dim2=-1).sum(dim=-1)
