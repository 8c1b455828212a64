"""Projection of many weights as one prepared plan, and of matrices to orthogonal ones.

Weights of one shape and constraint are one stack. What a step of training has to do is resolved
when the plan is made; on the CPU it depends on values, elsewhere it is a fixed sequence of products
(`_batched_projection`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from clipless.kernels import LazyCudaGraph
from clipless.spectral._batched_projection import project_matrices
from clipless.spectral._bounds import UNIT_ROUNDOFF

if TYPE_CHECKING:
    from clipless.spectral._constraints import Constraint

# The cubic step sends singular values in [0, sqrt(3)] into [0, 1] without changing their sign.
_SAFE_NORM = math.sqrt(3.0)
# Without a look at the values (on a GPU) this many steps restore a weight that a step has moved.
_BLIND_ITERATIONS = 8
_MOST_ITERATIONS = 60
# A residual below which one more step of order three ends at the rounding error of float32.
_NEARLY_THERE = 5e-3
_NEAR, _MOST = 1e-4, 1e6
"""What counts as near: deviation over mean eigenvalue; and the energy in squared radii."""


class Projection:
    """The projection of a model's weights, prepared once for many steps.

    Called with weights, it is a pure function of tensors of known shapes, which on a GPU waits for
    nothing: a compiler or a CUDA graph can take it in. `apply` projects the model itself; on a GPU
    the third and later times are the replay of a graph. `prepare_projection` makes one.
    """

    parameters: list[nn.Parameter]
    """The constrained parameters, each once; what a call takes and returns is in this order."""

    def __init__(self, pairs: Sequence[tuple[nn.Parameter, Constraint]]) -> None:
        self._signature = _signature(pairs)
        # Layers that share a weight share its constraint: it is projected once.
        once = {id(parameter): (parameter, constraint) for parameter, constraint in pairs}
        self.parameters = [parameter for parameter, _ in once.values()]
        groups = stacks_of(self.parameters, [constraint for _, constraint in once.values()])
        self._constraints = [constraint for constraint, _ in groups]
        self._by_values = [constraint.by_values() for constraint in self._constraints]
        self._members = [members for _, members in groups]
        self._habit = LazyCudaGraph()
        self._function: Callable[..., Sequence[Tensor]] = self._plain

    def compute_by(self, function: Callable[..., Sequence[Tensor]]) -> None:
        """Make `apply` use `function(*weights)`, which must return what a call returns."""
        self._function, self._habit = function, LazyCudaGraph()

    @property
    def computes_itself(self) -> bool:
        """Whether no function was set by `compute_by`."""
        return self._function == self._plain

    def _plain(self, *weights: Tensor) -> list[Tensor]:
        return self(weights)

    def fits(self, pairs: Sequence[tuple[nn.Parameter, Constraint]]) -> bool:
        """Whether this is the projection of these parameters into these constraints."""
        return self._signature == _signature(pairs)

    @torch.no_grad()
    def __call__(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the projected weights; nothing is changed in place."""
        current = list(weights)
        stacks = [_stack([current[index] for index in members]) for members in self._members]
        if not torch.compiler.is_compiling() and all(map(may_look_at, stacks)):
            both = zip(self._by_values, stacks, strict=True)
            projected = [project(stack) for project, stack in both]
        else:
            projected = project_batched(stacks, self._constraints)
        for members, stack in zip(self._members, projected, strict=True):
            for index, weight in zip(members, stack.unbind(), strict=True):
                current[index] = weight
        return current

    def apply(self) -> None:
        """Project the parameters, in place."""
        if not self.parameters:
            return
        parameters = [parameter.detach() for parameter in self.parameters]
        if parameters[0].is_cuda:
            self._habit.run(self._write, parameters)
        else:
            self._write(parameters)

    def _write(self, parameters: list[Tensor]) -> None:
        torch._foreach_copy_(parameters, list(self._function(*parameters)))


def may_look_at(weights: Tensor) -> bool:
    """Whether code may depend on values: free on the CPU, a stall on a GPU, the end of a graph."""
    return weights.device.type == "cpu" and not torch.compiler.is_compiling()


def project_batched(weights: Sequence[Tensor], constraints: Sequence[Constraint]) -> list[Tensor]:
    """Project stacks (count, *shape) of weights, each into its own constraint.

    A pure function of the weights. On a GPU and in compiled code no value is looked at, and
    matrices of all shapes share their kernels.
    """
    projected = list(weights)
    shared: defaultdict[tuple[bool, torch.device], list[int]] = defaultdict(list)
    for index, (weight, constraint) in enumerate(zip(weights, constraints, strict=True)):
        if constraint.clips is None or may_look_at(weight):
            projected[index] = constraint.by_values()(weight)
        else:
            shared[constraint.clips, weight.device].append(index)
    for (clip, _), members in shared.items():
        matrices = [constraints[index]._matrices(weights[index]) for index in members]  # type: ignore[attr-defined]
        radii = [constraints[index].radius for index in members]
        results = project_matrices(matrices, radii, clip=clip)
        for index, result in zip(members, results, strict=True):
            projected[index] = result.reshape(weights[index].shape)
    return projected


def _signature(pairs: Sequence[tuple[nn.Parameter, Constraint]]) -> list[Any]:
    return [
        (id(parameter), parameter.shape, parameter.dtype, parameter.device, constraint)
        for parameter, constraint in pairs
    ]


def _stack(weights: list[Tensor]) -> Tensor:
    return weights[0].unsqueeze(0) if len(weights) == 1 else torch.stack(weights)


def stacks_of(
    parameters: Sequence[nn.Parameter], constraints: Sequence[Constraint]
) -> list[tuple[Constraint, list[int]]]:
    """Group parameters by constraint, shape, dtype and device: each group is one stack."""
    groups: defaultdict[Any, list[int]] = defaultdict(list)
    for index, (parameter, constraint) in enumerate(zip(parameters, constraints, strict=True)):
        groups[constraint, parameter.shape, parameter.dtype, parameter.device].append(index)
    return [(key[0], members) for key, members in groups.items()]


def project_orthogonal(
    weights: Tensor, *, radius: float, groups: int, otherwise: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return weights (batch, out, ...) with all singular values near `radius`, none above it.

    That none is above is certified, rounding included: with G the Gram matrix on the smaller side
    and mu its mean eigenvalue, the largest is at most `mu + ||G - mu I||_F`. Matrices that have not
    come near orthogonal ones are left to `otherwise`, whose certificate is tighter for them.
    """
    batch, out = weights.shape[:2]
    matrices = weights.reshape(batch * groups, out // groups, -1)
    working = matrices if weights.dtype == torch.float64 else matrices.to(torch.float32)
    proposal = orthogonalize(working / radius) * radius
    wide = proposal.to(torch.float64)
    rows, columns = wide.shape[-2:]
    side = min(rows, columns)
    gram = wide @ wide.mT if rows <= columns else wide.mT @ wide
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    energy = diagonal.sum(dim=-1) * (1 + 1e-9)  # the squared Frobenius norm, from above
    diagonal.sub_((energy / side)[:, None])
    deviation = torch.linalg.vector_norm(gram, dim=(-2, -1))
    near = (deviation <= _NEAR / side * energy) & (energy < _MOST * radius**2)
    if not bool(near.all()):
        return otherwise(proposal, weights)
    # A computed product with inner dimension n is off by at most n u ||A||_F ||B||_F, whatever the
    # order of its sums; what follows it, by a few u of a sum over all entries.
    error = (max(rows, columns) + side * side + 16) * UNIT_ROUNDOFF * energy
    bound = (energy / side + deviation + error).sqrt() * (1 + 64 * UNIT_ROUNDOFF)
    # Rounding the scaled entries moves a matrix by at most eps / 2 of its Frobenius norm. Twice eps
    # is taken off, so that a later certificate, which rounds too, still holds.
    bound = bound + 2 * torch.finfo(weights.dtype).eps * energy.sqrt()
    factor = (radius / bound).clamp(max=1.0).reshape(batch, groups).amin(dim=1)
    scaled = wide.reshape(batch, -1) * factor[:, None]
    return scaled.to(weights.dtype).reshape(weights.shape)


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
    residual = (matrices @ matrices.mT).neg_()
    residual.diagonal(dim1=-2, dim2=-1).add_(1)
    return residual


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
