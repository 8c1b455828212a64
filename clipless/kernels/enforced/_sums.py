"""Gradients of weights used on many positions: each example's is measured, scaled and added up.

What the positions of an example add may cancel: its gradient is small then, and what is added up on
the way is not. A float32 sum over several examples rounds by the largest of these intermediate
sums, so that one example could move what others add by more than its threshold. So either each
example's own gradient is formed, some at a time, and exactly what was measured is added up in
float64; or, where that costs more, inner products measure it, and the sum is taken in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from clipless.kernels._bounded_gradients import example_norm
from clipless.kernels._weight_sums import row_sum, rows_scaled
from clipless.kernels.enforced._norms import CHUNK, Threshold, gram_norms

Operands = Callable[[slice], tuple[Tensor, Tensor]]
"""The cotangents (n, groups, T, out) and inputs (n, groups, T, in) of some examples."""

_IN_CACHE = 1 << 18
"""So many entries of the examples' own gradients are formed at a time on the CPU."""
_FEW_POSITIONS = 32
"""From here on, gradients of all examples cost less on the CPU than a sum in float64."""
_ROWS_AT_ONCE = 128
"""Of m examples, a float64 sum is off by `2 m^2 T 2^-53` times the largest `sum_t ||g_t|| ||x_t||`,
which is below 2,000 thresholds where inner products measure: see `gram_norms`."""


def weight_sum(operands: Operands, rows: int, limit: Threshold) -> Tensor:
    """Return the sum of `rows` examples' gradients, each scaled to the limit: (groups out, in).

    In float64. The operands of different parts of the batch are asked for one after the other.
    """
    cotangent, x = operands(slice(0, 1))
    groups, positions, outputs = cotangent.shape[1:]
    inputs = x.shape[-1]
    total = x.new_zeros(groups * outputs, inputs, dtype=torch.float64)
    on_cpu = x.device.type == "cpu"
    few = positions * (outputs + inputs) <= outputs * inputs  # cheaper by inner products
    if few and not (on_cpu and positions >= _FEW_POSITIONS):
        parts = _by_inner_products(operands, rows, limit, groups * positions * (outputs + inputs))
    else:
        held = groups * max(outputs * inputs, positions * (outputs + inputs))
        at_once = max(1, (_IN_CACHE if on_cpu else CHUNK) // held)
        parts = _by_examples(operands, rows, limit, at_once)
    for part in parts:
        total += part
    return total


def _by_examples(operands: Operands, rows: int, limit: Threshold, at_once: int) -> Iterator[Tensor]:
    norms = []
    for part in _parts(rows, at_once):
        cotangent, x = operands(part)
        own = (cotangent.mT @ x).flatten(1, 2)
        norms.append(example_norm(own))
        yield row_sum(rows_scaled(own, limit.factors_of_some(norms[-1])))
    limit.counted(torch.cat(norms) if norms else torch.zeros(0))


def _by_inner_products(
    operands: Operands, rows: int, limit: Threshold, held: int
) -> Iterator[Tensor]:
    norms = []
    for part in _parts(rows, min(_ROWS_AT_ONCE, max(1, CHUNK // held))):
        cotangent, x = operands(part)
        found = gram_norms(cotangent.flatten(0, 1), x.flatten(0, 1)).unflatten(0, (-1, x.shape[1]))
        norms.append(torch.linalg.vector_norm(found, dim=1))
        factors = limit.factors_of_some(norms[-1])
        cotangent = rows_scaled(cotangent, factors).double().movedim(1, 0).flatten(1, 2)
        x = rows_scaled(x, (factors > 0).to(x.dtype)).double().movedim(1, 0).flatten(1, 2)
        yield (cotangent.mT @ x).flatten(0, 1)
    limit.counted(torch.cat(norms) if norms else torch.zeros(0))


def _parts(rows: int, size: int) -> Iterator[slice]:
    for begin in range(0, rows, size):
        yield slice(begin, min(begin + size, rows))
