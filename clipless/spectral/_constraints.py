"""Constraint sets of weights, each with a projection and a certificate of membership.

Constraints are frozen values. Two layers with equal constraints and equal shapes are projected as
one batch (`clipless.nn.project`). Tensors here carry a leading batch axis: (batch, *shape).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from clipless.spectral._batched_projection import project_matrices
from clipless.spectral._bounds import spectral_norm_bound
from clipless.spectral._convolution import fourier_bound

# A certificate may exceed the radius by this factor and still count as inside. The bounds are
# multiplied by nothing for it: `project` aims far enough inside that it is never used up.
MEMBERSHIP_TOLERANCE = 1e-9
# The cubic step sends singular values in [0, sqrt(3)] into [0, 1] without changing their sign.
_SAFE_NORM = math.sqrt(3.0)
# Without a look at the values (on a GPU) this many steps restore a weight that a step has moved.
_BLIND_ITERATIONS = 8
_MOST_ITERATIONS = 60
# A residual below which one more step of order three ends at the rounding error of float32.
_NEARLY_THERE = 5e-3


@dataclass(frozen=True)
class Certificate:
    """A proved upper bound of a weight's norm, and the radius it is meant to respect."""

    bound: float
    radius: float
    method: str

    @property
    def holds(self) -> bool:
        """Whether the weight is proved to lie in its constraint set."""
        return self.bound <= self.radius * (1 + MEMBERSHIP_TOLERANCE)

    def __float__(self) -> float:
        return self.bound

    def __str__(self) -> str:
        return f"{self.bound:.7g} <= {self.radius:g} ({self.method})"


class Constraint(Protocol):
    """A set of weights of bounded norm, into which any weight can be mapped."""

    @property
    def radius(self) -> float:
        """The bound that every member respects."""

    @property
    def method(self) -> str:
        """How membership is proved, in a few words."""

    def project(self, weights: Tensor) -> Tensor:
        """Map (batch, *shape) into the set. The result is a member, rounding included."""

    def bound(self, weights: Tensor) -> Tensor:
        """Return certified upper bounds, one for each weight of the batch: (batch,) float64."""


def _shrink(weights: Tensor, bound: Tensor, radius: float, *, dtype: torch.dtype) -> Tensor:
    """Scale each weight so that `bound`, a norm's upper bound, is at most `radius` after rounding.

    Rounding the scaled entries moves a weight by at most `eps / 2 * ||W||_F` in any of the norms
    used here; twice that is taken off so that a later certificate, which rounds too, still holds.
    """
    axes = tuple(range(1, weights.ndim))
    frobenius = torch.linalg.vector_norm(weights.to(torch.float64), dim=axes)
    margin = 2 * torch.finfo(dtype).eps * frobenius
    needed = bound + margin > radius
    factor = torch.where(needed, radius / (bound + margin), torch.ones_like(bound))
    factor = factor.reshape(-1, *([1] * (weights.ndim - 1)))
    return (weights.to(torch.float64) * factor).to(dtype)


def _working_copy(weights: Tensor) -> Tensor:
    """Half precisions compute in float32; the others in their own."""
    return weights if weights.dtype == torch.float64 else weights.to(torch.float32)


@dataclass(frozen=True)
class _MatrixConstraint:
    """Weights (out, ...) seen as `groups` matrices (out / groups, the rest)."""

    radius: float
    groups: int = 1

    def _matrices(self, weights: Tensor) -> Tensor:
        batch, out = weights.shape[:2]
        return weights.reshape(batch * self.groups, out // self.groups, -1)

    def bound(self, weights: Tensor) -> Tensor:
        """The largest certified spectral norm among the groups of each weight."""
        bounds = spectral_norm_bound(self._matrices(weights))
        return bounds.reshape(-1, self.groups).amax(dim=1)

    def _finish(self, proposal: Tensor, weights: Tensor) -> Tensor:
        proposal = proposal.reshape(weights.shape)
        return _shrink(proposal, self.bound(proposal), self.radius, dtype=weights.dtype)


@dataclass(frozen=True)
class Orthogonal(_MatrixConstraint):
    """Spectral norm at most `radius`, with singular values pushed to `radius` by projection."""

    method = "Gram residual"

    def project(self, weights: Tensor) -> Tensor:
        """Orthogonalise, then shrink by the certificate."""
        if not may_look_at(weights):
            return project_batched([weights], [self])[0]
        matrices = _working_copy(self._matrices(weights))
        return self._finish(orthogonalize(matrices / self.radius) * self.radius, weights)


@dataclass(frozen=True)
class SpectralBall(_MatrixConstraint):
    """Spectral norm at most `radius`; projection clips singular values and changes nothing else."""

    method = "Gram iteration"

    def project(self, weights: Tensor) -> Tensor:
        """Clip singular values, then shrink by the certificate."""
        if not may_look_at(weights):
            return project_batched([weights], [self])[0]
        matrices = _working_copy(self._matrices(weights))
        return self._finish(clip_singular_values(matrices, radius=self.radius), weights)


@dataclass(frozen=True)
class ConvolutionBall:
    """Kernels whose convolution, times `scale`, has operator norm at most `radius`.

    The certificate is the smaller of the reshaped kernel's norm times `scale sqrt(multiplicity)`
    and of the Fourier bound on `input_size`.
    """

    radius: float
    groups: int
    scale: float
    multiplicity: int
    input_size: tuple[int, ...]
    dilation: tuple[int, ...]
    circular: bool
    orthogonal: bool

    method = "Fourier blocks"

    def bound(self, weights: Tensor) -> Tensor:
        """Certified operator norms of the scaled convolutions."""
        reshaped = _MatrixConstraint(self.radius, self.groups).bound(weights)
        fourier = torch.stack(
            [
                fourier_bound(
                    kernel,
                    input_size=self.input_size,
                    dilation=self.dilation,
                    groups=self.groups,
                    circular=self.circular,
                )
                for kernel in weights
            ]
        )
        return torch.minimum(reshaped * self.multiplicity**0.5, fourier) * self.scale

    def project(self, weights: Tensor) -> Tensor:
        """Orthogonalise the reshaped kernel if asked to, then fill the ball to its certificate."""
        proposal = _working_copy(weights)
        if self.orthogonal:
            matrices = _MatrixConstraint(self.radius, self.groups)._matrices(proposal)
            proposal = orthogonalize(matrices).reshape(weights.shape)
            bound = self.bound(proposal)
            fill = torch.where(bound > 0, self.radius / bound, torch.ones_like(bound))
            proposal = proposal * fill.to(proposal.dtype).reshape(-1, *([1] * (weights.ndim - 1)))
        return _shrink(proposal, self.bound(proposal), self.radius, dtype=weights.dtype)


@dataclass(frozen=True)
class EuclideanBall:
    """Euclidean (Frobenius) norm at most `radius`: biases and Frobenius-constrained matrices."""

    radius: float

    method = "Euclidean norm"

    def bound(self, weights: Tensor) -> Tensor:
        """The norm itself, computed in double precision and rounded up."""
        return _euclidean_norm(weights.flatten(1))

    def project(self, weights: Tensor) -> Tensor:
        """Scale into the ball."""
        return _shrink(weights, self.bound(weights), self.radius, dtype=weights.dtype)


@dataclass(frozen=True)
class RowBall:
    """Every row of a table (rows, width) has Euclidean norm at most `radius`."""

    radius: float

    method = "largest row norm"

    def bound(self, weights: Tensor) -> Tensor:
        """The largest row norm."""
        return _euclidean_norm(weights).amax(dim=-1)

    def project(self, weights: Tensor) -> Tensor:
        """Scale the rows that are too long."""
        rows = weights.reshape(-1, weights.shape[-1])
        return _shrink(rows, _euclidean_norm(rows), self.radius, dtype=weights.dtype).reshape(
            weights.shape
        )


def may_look_at(weights: Tensor) -> bool:
    """Whether code may depend on values: free on the CPU, a stall on a GPU, the end of a graph."""
    return weights.device.type == "cpu" and not torch.compiler.is_compiling()


def project_batched(weights: Sequence[Tensor], constraints: Sequence[Constraint]) -> list[Tensor]:
    """Project stacks (count, *shape) of weights, each into its own constraint.

    A pure function of the weights. On a GPU and in compiled code no value is looked at, and
    matrices of all shapes share their kernels.
    """
    projected = list(weights)
    shared: defaultdict[tuple[type, torch.device], list[int]] = defaultdict(list)
    for index, (weight, constraint) in enumerate(zip(weights, constraints, strict=True)):
        if type(constraint) in (Orthogonal, SpectralBall) and not may_look_at(weight):
            shared[type(constraint), weight.device].append(index)
        else:
            projected[index] = constraint.project(weight)
    for (kind, _), members in shared.items():
        matrices = [constraints[index]._matrices(weights[index]) for index in members]  # type: ignore[attr-defined]
        radii = [constraints[index].radius for index in members]
        results = project_matrices(matrices, radii, clip=kind is SpectralBall)
        for index, result in zip(members, results, strict=True):
            projected[index] = result.reshape(weights[index].shape)
    return projected


def _euclidean_norm(weights: Tensor) -> Tensor:
    """Norm over the last axis in float64, safe from overflow, rounded up; `inf` if not finite."""
    wide = weights.to(torch.float64)
    largest = wide.abs().amax(dim=-1)
    usable = torch.isfinite(largest) & (largest > 0)
    scale = torch.where(usable, largest, torch.ones_like(largest))
    norm = torch.linalg.vector_norm(wide / scale[..., None], dim=-1) * scale
    norm = norm * (1 + (weights.shape[-1] + 8) * 2.0**-52)
    return torch.where(torch.isfinite(largest), norm, torch.full_like(norm, torch.inf))


# --- projections of matrices: approximate, and checked by the certificates above ------------------


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
