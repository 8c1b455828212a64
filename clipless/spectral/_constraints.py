"""Constraint sets of weights, each with a projection and a certificate of membership.

Constraints are frozen values. Two layers with equal constraints and equal shapes are projected as
one batch (`clipless.nn.project`). Tensors here carry a leading batch axis: (batch, *shape).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from clipless.spectral._bounds import spectral_norm_bound
from clipless.spectral._convolution import fourier_bound
from clipless.spectral._projection import (
    orthogonalize,
    project_batched,
    project_orthogonal,
    stacks_of,
)

# A certificate may exceed the radius by this factor and still count as inside. The bounds are
# multiplied by nothing for it: `project` aims far enough inside that it is never used up.
MEMBERSHIP_TOLERANCE = 1e-9


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

    clips: ClassVar[bool | None]
    """Whether singular values are clipped, or all moved to the radius; None for other sets."""

    @property
    def radius(self) -> float:
        """The bound that every member respects."""

    @property
    def method(self) -> str:
        """How membership is proved, in a few words."""

    def project(self, weights: Tensor) -> Tensor:
        """Map (batch, *shape) into the set. The result is a member, rounding included."""

    def by_values(self) -> Callable[[Tensor], Tensor]:
        """Return `project` where code may depend on values, with all else resolved."""

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


class _Alone:
    """What the sets have in common whose weights are projected alone, and not as matrices."""

    clips: ClassVar[bool | None] = None

    def by_values(self) -> Callable[[Tensor], Tensor]:
        """`project` itself."""
        return self.project

    def project(self, weights: Tensor) -> Tensor:
        """Map (batch, *shape) into the set."""
        raise NotImplementedError


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

    def project(self, weights: Tensor) -> Tensor:
        """Map (batch, *shape) into the set, without a look at values where that would stall."""
        return project_batched([weights], [self])[0]  # type: ignore[list-item]

    def _finish(self, proposal: Tensor, weights: Tensor) -> Tensor:
        proposal = proposal.reshape(weights.shape)
        return _shrink(proposal, self.bound(proposal), self.radius, dtype=weights.dtype)


@dataclass(frozen=True)
class Orthogonal(_MatrixConstraint):
    """Spectral norm at most `radius`, with singular values pushed to `radius` by projection."""

    method = "Gram residual"
    clips: ClassVar[bool | None] = False

    def by_values(self) -> Callable[[Tensor], Tensor]:
        """Orthogonalise, then shrink by the certificate."""
        return partial(
            project_orthogonal, radius=self.radius, groups=self.groups, otherwise=self._finish
        )


@dataclass(frozen=True)
class SpectralBall(_MatrixConstraint):
    """Spectral norm at most `radius`; projection clips singular values and changes nothing else."""

    method = "Gram iteration"
    clips: ClassVar[bool | None] = True

    def by_values(self) -> Callable[[Tensor], Tensor]:
        """Clip singular values, then shrink by the certificate."""
        return self._clipped

    def _clipped(self, weights: Tensor) -> Tensor:
        matrices = _working_copy(self._matrices(weights))
        return self._finish(clip_singular_values(matrices, radius=self.radius), weights)


@dataclass(frozen=True)
class ConvolutionBall(_Alone):
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
class EuclideanBall(_Alone):
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
class RowBall(_Alone):
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


@torch.no_grad()
def certificates_of(pairs: Sequence[tuple[nn.Parameter, Constraint]]) -> list[Certificate]:
    """Return a proved bound of every weight's norm."""
    bounds = [0.0] * len(pairs)
    parameters = [parameter for parameter, _ in pairs]
    for constraint, members in stacks_of(parameters, [constraint for _, constraint in pairs]):
        stacked = torch.stack([parameters[index].detach() for index in members])
        for index, bound in zip(members, constraint.bound(stacked).tolist(), strict=True):
            bounds[index] = bound
    return [
        Certificate(bound=bound, radius=constraint.radius, method=constraint.method)
        for bound, (_, constraint) in zip(bounds, pairs, strict=True)
    ]


def _euclidean_norm(weights: Tensor) -> Tensor:
    """Norm over the last axis in float64, safe from overflow, rounded up; `inf` if not finite."""
    wide = weights.to(torch.float64)
    largest = wide.abs().amax(dim=-1)
    usable = torch.isfinite(largest) & (largest > 0)
    scale = torch.where(usable, largest, torch.ones_like(largest))
    norm = torch.linalg.vector_norm(wide / scale[..., None], dim=-1) * scale
    norm = norm * (1 + (weights.shape[-1] + 8) * 2.0**-52)
    return torch.where(torch.isfinite(largest), norm, torch.full_like(norm, torch.inf))


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
