"""Bounds of floating-point errors of a network, for its certificates.

One more walk, with errors in place of norms: what an operation receives in error it hands on times
its Lipschitz constant, and it adds an error of its own. A sum of n products rounded in any order is
off by at most `n u / (1 - n u)` times the sum of their sizes (u the unit roundoff), so a linear map
W adds at most that times `||W||_F ||x||`. How many roundings meet in an entry is stated by the
operation's rule (`clipless.bounds.Bound`): none for sorting, reshaping and maxima. An operation
whose rule states nothing is taken for a product with a matrix, that is, sums over all its inputs.
Convolutions by way of Fourier or Winograd transforms, TF32 and autocast are another arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from clipless import nn as lip
from clipless.bounds import Product, walk
from clipless.nn import AffineModule, GlobalL2NormPoolBase, L2NormPoolBase

Shapes = Mapping[fx.Node, tuple[tuple[int, ...], ...]]

# L2 pooling takes energies up to this for zero.
_NEGLIGIBLE_ENERGY = 1e-30
# Room for the handful of operations around a sum: a root, a scale, a constant.
_FEW = 8


def rounding_errors(
    passed: walk.ForwardPass,
    shapes: Shapes,
    dtype: torch.dtype,
    *,
    after: fx.Node | None = None,
) -> dict[fx.Node, float]:
    """Bound, for every node, the norm of its error when the network is computed in `dtype`.

    With `after`, what that node receives is taken to be exact.
    """
    unit = torch.finfo(dtype).eps / 2
    errors: dict[fx.Node, float] = dict.fromkeys(passed.inputs, 0.0)
    for step in passed.steps:
        arriving = [0.0 if step.node is after else errors[source] for source in step.sources]
        handed_on = sum(map(walk.times, arriving, step.lipschitz))
        roundings = _roundings(step, shapes) * unit
        relative = roundings / (1 - roundings) if roundings < 1 else math.inf
        own = walk.times(relative, _size_of_terms(step, shapes, arriving, handed_on))
        if isinstance(step.site.called, L2NormPoolBase | GlobalL2NormPoolBase):
            own += math.sqrt(_NEGLIGIBLE_ENERGY * step.site.output_size)  # what it takes for zero
        errors[step.node] = handed_on + own
    return errors


def _size_of_terms(
    step: walk.Step, shapes: Shapes, arriving: Sequence[float], handed_on: float
) -> float:
    """Bound the norm of the result if all that is summed up had the same sign.

    A matrix of rank r and norm l has a Frobenius norm of at most sqrt(r) l.
    """
    norms = [norm + error for norm, error in zip(step.input_norms, arriving, strict=True)]
    module = step.site.called
    if isinstance(module, lip.BoundedInput):
        return module.norm
    if isinstance(module, AffineModule):
        # |W| |x| + |b|; patches are counted in a convolution's scale.
        size = float(torch.linalg.vector_norm(module.weight.detach().double())) * norms[0]
        if module.bias is not None:
            size += math.sqrt(step.site.output_size / module.bias.numel()) * module.bias_norm
        return size * (1 + 1e-9)
    stated = step.bound.roundings
    if isinstance(stated, Product):
        rank = stated.rank
    else:
        rank = min(_entries(step, shapes), step.site.output_size) if stated is None else 1
    linear = math.sqrt(rank) * sum(map(walk.times, step.lipschitz, norms))
    return linear + step.bound.output + handed_on


def _roundings(step: walk.Step, shapes: Shapes) -> int:
    """Return how many roundings meet in one entry of the result, by the operation's own rule."""
    bound = step.bound
    if bound.forward_roundings is not None:
        return bound.forward_roundings
    if isinstance(bound.roundings, Product):
        return bound.roundings.terms + _FEW
    return 0 if bound.roundings == 0 else _entries(step, shapes) + _FEW


def _entries(step: walk.Step, shapes: Shapes) -> int:
    """Return how many entries the largest input of an operation has."""
    sizes = (math.prod(shape) for source in step.sources for shape in shapes[source])
    return max(sizes, default=1)
