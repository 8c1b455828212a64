"""How far a network computed in floating point can be from the network in exact arithmetic.

One more walk, with errors in place of norms: what an operation receives in error it hands on times
its Lipschitz constant, and it adds an error of its own. A sum of n products rounded in any order is
off by at most `n u / (1 - n u)` times the sum of their sizes (u the unit roundoff), so a linear map
W adds at most that times `||W||_F ||x||`. Sorting, reshaping and maxima round nothing. An operation
that is not known here, such as a user's own with a rule, is taken for a sum over all its inputs.
Convolutions by way of Fourier or Winograd transforms, TF32 and autocast are another arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import fx, nn

from clipless import nn as lip
from clipless.bounds import Rule, find_rule, walk
from clipless.bounds.rules import activation as _activation_rules
from clipless.bounds.rules import arithmetic as _arithmetic_rules
from clipless.bounds.rules import layers as _layer_rules
from clipless.bounds.rules import modules as _module_rules
from clipless.bounds.rules import reductions as _reduction_rules
from clipless.bounds.rules import shapes as _shape_rules
from clipless.nn import (
    AffineModule,
    GlobalAvgPoolBase,
    GlobalL2NormPoolBase,
    L2NormPoolBase,
    WindowPoolBase,
)

Shapes = Mapping[fx.Node, tuple[tuple[int, ...], ...]]

_EXACT: frozenset[Rule | None] = frozenset(
    {
        _activation_rules.relu,
        _activation_rules.absolute,
        _arithmetic_rules.negate,
        _reduction_rules.max_pool,
        _reduction_rules.extreme,
        _layer_rules.sort,
        _layer_rules.absolute,
        _layer_rules.clip_gradient,
        _module_rules.identity,
        _module_rules.flatten,
        _module_rules.unflatten,
        _module_rules.dropout,
        _module_rules.max_pooling,
        _module_rules.zero_padding,
        _module_rules.hard_clip,
    }
)
_ONE_OPERATION: frozenset[Rule | None] = frozenset(
    {
        _arithmetic_rules.add,
        _arithmetic_rules.subtract,
        _arithmetic_rules.multiply,
        _arithmetic_rules.divide,
    }
)
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
        own = walk.times(relative, _size_of_terms(step, arriving, handed_on))
        if isinstance(step.site.called, L2NormPoolBase | GlobalL2NormPoolBase):
            own += math.sqrt(_NEGLIGIBLE_ENERGY * step.site.output_size)  # what it takes for zero
        errors[step.node] = handed_on + own
    return errors


def _size_of_terms(step: walk.Step, arriving: Sequence[float], handed_on: float) -> float:
    """Bound the norm of the result if all that is summed up had the same sign."""
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
    return sum(map(walk.times, step.lipschitz, norms)) + step.bound.output + handed_on


def _roundings(step: walk.Step, shapes: Shapes) -> int:
    """How many roundings meet in one entry of the result: all entries, where nothing is known."""
    module = step.site.called
    rule = find_rule(step.site.target)
    rearranges = getattr(rule, "__module__", "") == _shape_rules.__name__
    if rule in _EXACT or rearranges or type(module) is nn.ReLU:
        return 0
    if rule in _ONE_OPERATION:
        return 2
    if isinstance(module, AffineModule):
        return math.prod(module.weight.shape[1:]) + _FEW
    if isinstance(module, WindowPoolBase):
        return module.window + _FEW
    sizes = [shape for source in step.sources for shape in shapes[source]]
    if isinstance(module, GlobalAvgPoolBase | GlobalL2NormPoolBase):
        sizes = [shape[1:] for shape in sizes]
    return max(map(math.prod, sizes), default=1) + _FEW
