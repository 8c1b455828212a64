"""Gradients of weights used on many positions: each example's is measured, scaled and added up.

What the positions of an example add may cancel: its gradient is small then, and what is added up on
the way is not. A float32 sum over several examples rounds by the largest of these intermediate
sums, so that one example could move what others add by more than its threshold. So either each
example's own gradient is formed, some at a time, and exactly what was measured is added up in
float64; or, where that costs more, inner products measure it, and the sum is taken in float64: on a
GPU, of operands in bfloat16 or TF32, by a kernel that forms the products example by example.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from clipless.kernels._bounded_gradients import example_norm
from clipless.kernels._weight_sums import row_sum, rows_scaled
from clipless.kernels.enforced._norms import (
    CHUNK,
    Threshold,
    gram_norms,
    in_float32,
)

Operands = Callable[[slice], tuple[Tensor, Tensor]]
"""The cotangents (n, groups, T, out) and inputs (n, groups, T, in) of some examples."""

_IN_CACHE = 1 << 18
"""So many entries of the examples' own gradients are formed at a time on the CPU."""
_FEW_POSITIONS = 32
"""From here on, gradients of all examples cost less on the CPU than a sum in float64."""
_ROWS_AT_ONCE = 128
"""Of m examples, a float64 sum is off by `2 m^2 T 2^-53` times the largest `sum_t ||g_t|| ||x_t||`,
which is below 2,000 thresholds where inner products measure: see `gram_norms`."""


_HELD_ON_GPU = 1 << 26
"""So many entries of gradients, activations or patches are taken at a time on a GPU."""


def weight_sum(operands: Operands, rows: int, limit: Threshold) -> tuple[Tensor, Tensor]:
    """Return the sum of `rows` examples' gradients, each scaled to the limit: (groups out, in).

    In float64; and with it the norms that the examples were scaled by, (rows,), which are not
    counted yet. The operands of different parts of the batch are asked for one after the other.
    """
    operands = _on_this_device(operands)
    cotangent, x = operands(slice(0, 1))
    groups, positions, outputs = cotangent.shape[1:]
    inputs = x.shape[-1]
    total = x.new_zeros(groups * outputs, inputs, dtype=torch.float64)
    on_cpu = x.device.type == "cpu"
    few = positions * (outputs + inputs) <= outputs * inputs  # cheaper by inner products
    if few and not (on_cpu and positions >= _FEW_POSITIONS):
        held = groups * positions * (outputs + inputs)
        parts = _by_inner_products(operands, rows, limit, held)
    else:
        held = groups * max(outputs * inputs, positions * (outputs + inputs))
        at_once = max(1, (_IN_CACHE if on_cpu else _HELD_ON_GPU) // held)
        parts = _by_examples(operands, rows, limit, at_once)
    norms = []
    for part, own in parts:
        total += part
        norms.append(own)
    return total, torch.cat(norms) if norms else total.new_zeros(0, dtype=torch.float32)


def _on_this_device(operands: Operands) -> Operands:
    """The operands in float32 where products of bfloat16 would be rounded at their end."""

    def wide(part: slice) -> tuple[Tensor, Tensor]:
        cotangent, x = operands(part)
        return (cotangent, x) if x.is_cuda else (in_float32(cotangent), in_float32(x))

    return wide


def _by_examples(
    operands: Operands, rows: int, limit: Threshold, at_once: int
) -> Iterator[tuple[Tensor, Tensor]]:
    for part in _parts(rows, at_once):
        cotangent, x = operands(part)
        own = (cotangent.mT @ x).flatten(1, 2)
        norms = example_norm(own)
        own = in_float32(own)
        yield row_sum(rows_scaled(own, limit.factors_of_some(norms, part))), norms


def _by_inner_products(
    operands: Operands, rows: int, limit: Threshold, held: int
) -> Iterator[tuple[Tensor, Tensor]]:
    first = operands(slice(0, 1))[1]
    kernel = _kernel_for(first)
    at_once = _HELD_ON_GPU if kernel else min(_ROWS_AT_ONCE * held, CHUNK)
    for part in _parts(rows, max(1, at_once // held)):
        cotangent, x = operands(part)
        found = gram_norms(cotangent.flatten(0, 1), x.flatten(0, 1)).unflatten(0, (-1, x.shape[1]))
        norms = torch.linalg.vector_norm(found, dim=1)
        factors = limit.factors_of_some(norms, part)
        if kernel is not None:
            yield kernel(cotangent.squeeze(1), x.squeeze(1), factors), norms
            continue
        cotangent = rows_scaled(in_float32(cotangent), factors).double().movedim(1, 0)
        x = rows_scaled(x, (factors > 0).to(x.dtype)).double().movedim(1, 0)
        yield (cotangent.flatten(1, 2).mT @ x.flatten(1, 2)).flatten(0, 1), norms


def _kernel_for(x: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """The GPU's own sum of scaled products, (n, 1, T, in), of operands whose products are exact."""
    exact = x.dtype == torch.bfloat16 or (
        x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    )
    return _tried_kernel() if x.is_cuda and x.shape[1] == 1 and exact else None


@functools.cache
def _tried_kernel() -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """The kernel, if it computes what it should here."""
    try:
        module = importlib.import_module("clipless.kernels.enforced._triton_sums")
        g, x = (torch.randn(20, 33, size, dtype=torch.bfloat16, device="cuda") for size in (40, 70))
        factors = torch.rand(20, device="cuda")
        found = module.scaled_products(g, x, factors)
        expected = torch.einsum("b,bto,bti->oi", factors.double(), g.double(), x.double())
        if not torch.allclose(found, expected, rtol=1e-3, atol=1e-3):
            raise RuntimeError("a kernel computed something else than it should")
    except Exception as error:  # no Triton, no compiler, an old GPU: all are good reasons
        warnings.warn(
            f"sums of scaled gradients are taken in float64, slower: no GPU kernel ({error}).",
            stacklevel=2,
        )
        return None
    scaled: Callable[[Tensor, Tensor, Tensor], Tensor] = module.scaled_products
    return scaled


def _parts(rows: int, size: int) -> Iterator[slice]:
    for begin in range(0, rows, size):
        yield slice(begin, min(begin + size, rows))
