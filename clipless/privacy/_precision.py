"""How much rounding can add to one example's gradient, in every precision a step may use.

The bounds are proved for exact arithmetic. What a step computes is the gradient of a slightly
different network, in which every operation rounds; here its bounds are related to the proved ones.

Rounding of operands is bounded without exception. With u the unit of the format (half the spacing
of numbers just above one), the entries of a vector x move by u |x_i| each, so its norm grows by the
factor 1 + u at most. The entries of a weight W move by u |W_ij| each, hence

    ||rounded W|| <= ||W|| + u ||W||_F <= (1 + u sqrt(rank)) c

for a spectral norm of c; in bfloat16 this is too much, and the rounded weights are certified
themselves instead (`RoundedWeights`). Forward and backward pass are chains of such operations, and
the rule of each states what it rounds (`clipless.bounds.Bound.roundings`). An operation lies before
a weight, where its forward pass matters, or behind it, where its backward pass does, so that each
counts once, with the worse of the two; so does each branch of a sum. What happens inside one kernel
is computed in float32, and rounded once, at its end.

Sums are accumulated in float32. Their error could reach n units in theory and grows like the root
of n in practice, since roundings go either way: that part is an estimate with a margin, and the
only one (see docs/speed.md).
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from clipless.bounds import NodeBound, Product, SensitivityReport
from clipless.errors import PrivacyError

Precision = Literal["float32", "tf32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bfloat16")

UNITS: dict[str, float] = {"tf32": 2.0**-11, "bfloat16": 2.0**-8}
"""The units of the formats. (Where hardware cuts numbers off for TF32 instead of rounding them,
norms only shrink, and of the error of a weight one half is a multiple of the weight.)"""

WEIGHT_ROOM = 2.0**-8
"""By how much a weight rounded to bfloat16 may exceed its constraint: see `RoundedWeights`."""

# The slack of float32: roundings of the forward and backward pass and of the sum over the batch.
_SLACK = {torch.float64: 1e-9, torch.float32: 1e-3}
# Two root mean squares of the error of a sum of n terms, u sqrt(n) of their Euclidean norm.
_ACCUMULATION = 2 * 2.0**-24


def arithmetic_slack(
    dtype: torch.dtype,
    *,
    precision: Precision = "float32",
    report: SensitivityReport | None = None,
) -> float:
    """Return what rounding may add to a gradient bound, relative to it.

    Args:
        dtype: that of the parameters.
        precision: what products of activations and weights are rounded to.
        report: the bounds of the model; without them, float32 and a model of moderate size are
            taken for granted.
    """
    if dtype not in _SLACK:
        raise ValueError(
            f"parameters of {dtype} are not supported: rounding in {dtype} is too coarse to be "
            "covered by the default slack. Keep parameters in float32."
        )
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if precision != "float32" and dtype != torch.float32:
        raise ValueError(f"precision={precision!r} is for parameters in float32, not {dtype}")
    slack = _SLACK[dtype]
    if report is None:
        return slack
    if dtype == torch.float32:
        slack = max(slack, sum(map(_accumulation, report.nodes)))
    if precision == "float32":
        return slack
    # The input of the network and the cotangent of its output are rounded too.
    growth = (1 + UNITS[precision]) ** 2
    for node in report.nodes:
        growth *= _growth(node, precision)
    return (1 + slack) * growth - 1


def _growth(node: NodeBound, precision: Precision) -> float:
    """Return the factor by which rounding in one operation can enlarge what flows through it."""
    unit, stated = UNITS[precision], node.roundings
    unbounded = math.isinf(node.output_bound)
    uncounted = precision == "bfloat16" and stated == math.inf and not unbounded
    if stated is None or uncounted:
        raise PrivacyError(
            f"{node.name} ({node.operation}): how much rounding adds to its result in {precision} "
            "is not known. Train in float32 (precision='float32', and TF32 off on a GPU), compute "
            "this part beforehand, or state `roundings` in its rule (clipless.bounds.Bound)."
        )
    if unbounded:
        return 1.0  # nothing is claimed of it: the input guard comes later
    if isinstance(stated, Product):
        certified = stated.certified and precision == "bfloat16"
        return (1 + (WEIGHT_ROOM if certified else unit * math.sqrt(stated.rank))) / (1 - unit)
    if precision == "tf32":
        return 1.0  # only products round
    return float((1 - unit) ** -stated)


def _accumulation(node: NodeBound) -> float:
    """Return the error of a product's sums, relative to l X: `2 u sqrt(n r)` for n terms each."""
    stated = node.roundings
    if not isinstance(stated, Product) or math.isinf(node.output_bound):
        return 0.0
    return _ACCUMULATION * math.sqrt(stated.terms * stated.rank)
