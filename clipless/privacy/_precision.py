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

All this only says how large a gradient may honestly be: bounds are enforced on what was computed.
What enforcement does not see is the rounding of the sum over the batch, by which one example could
move what others add. It is bounded for the worst case (`sum_rounding`, docs/arithmetic.md).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch

from clipless.bounds import NodeBound, Product, SensitivityReport
from clipless.errors import PrivacyError
from clipless.kernels import SUM_SLACK, prepare_integer_sums, sum_slack

Precision = Literal["float32", "tf32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bfloat16")

UNITS: dict[str, float] = {"tf32": 2.0**-11, "bfloat16": 2.0**-8}
"""The units of the formats. (Where hardware cuts numbers off for TF32 instead of rounding them,
norms only shrink, and of the error of a weight one half is a multiple of the weight.)"""

WEIGHT_ROOM = 2.0**-8
"""By how much a weight rounded to bfloat16 may exceed its constraint: see `RoundedWeights`."""

_OWN = {torch.float64: 1e-9, torch.float32: 5e-4}
"""Room for the float32 roundings of one example's own forward and backward pass."""
_DEFAULT = {torch.float64: 1e-9, torch.float32: 1e-3}
"""The slack of full precision, unless the sums of a model need more."""


@dataclass(frozen=True)
class SumRounding:
    """What rounding in the sum over a batch adds to one example's part of it, for its bound."""

    slack: float = 0.0
    """Proved, for the worst case, and part of the sensitivities."""
    uncovered: float = 0.0
    """The worst case of sums that are not exact on this device, which no noise pays for."""


NO_ROUNDING = SumRounding()
_USUAL_POSITIONS = 1024
"""How many positions are taken to be in an image whose size is not known, for `uncovered`."""
_USUAL = SumRounding(SUM_SLACK)


def sum_rounding(
    report: SensitivityReport,
    *,
    rows: int,
    records: int = 1,
    dtype: torch.dtype,
    device: str,
    processes: int = 1,
) -> SumRounding:
    """Return what the rounding of a model's gradient sums over at most `rows` rows adds.

    With `records`, there may be so many times more, whose bounds are parts of one. `processes`: how
    many hold a shard of every parameter each, if more than one do.

    On the CPU all sums are covered, and on an accelerator that adds up integers. Where it does not,
    gradients of convolutions are float32 sums of the library's. So are those of convolutions in
    three dimensions whose examples are not measured exactly (`exact_norms=False`).
    """
    shapes = {each.name: each.shape for each in report.parameters}
    slack, uncovered = 0.0, 0.0
    integers = dtype == torch.float32 and prepare_integer_sums(device) is not None
    # Of float64 sums of rows, and of integers, which round where they become float64.
    alone = records * rows * (rows + 2) * 2.0**-52
    if not report.nodes:  # enforced bounds, of examples with any number of positions
        slack = sum_slack(positions=None, rows=rows, records=records)
        library = device != "cpu" and not sums_examples(report)
        most = 4 if integers else 2
        if library and any(len(each) > most for each in shapes.values()):
            uncovered = 2 * records * rows**2 * _USUAL_POSITIONS * 2.0**-24
    for node in report.nodes:
        entries = math.prod(node.output_shape)
        for name in node.gradient_bounds:
            shape = shapes[name]
            positions = entries // max(1, shape[0]) if len(shape) > 1 else 1
            if dtype == torch.float64:
                slack = max(slack, records * rows**2 * max(1, positions) * 2.0**-52)
            elif device == "cpu":
                slack = max(slack, sum_slack(positions=positions, rows=rows, records=records))
            elif integers and len(shape) <= 4:
                slack = max(slack, alone)
            elif len(shape) > 2:
                uncovered = max(uncovered, 2 * records * rows**2 * positions * 2.0**-24)
            else:
                slack = max(slack, records * rows**2 * max(1, positions) * 2.0**-52)
    if processes > 1:
        # Sums are rounded to float32, added up over the uses of a parameter, and over processes:
        # each addition rounds a sum of some rows.
        uses = Counter(name for node in report.nodes for name in node.gradient_bounds)
        additions = processes + max(uses.values(), default=1) - 1
        slack += 2 * additions * rows * 2.0**-24 * 1.001
    return SumRounding(slack, uncovered)


def sums_examples(report: SensitivityReport) -> bool:
    """Whether convolutions with thresholds add up examples whose gradients were measured exactly.

    That is done in float64, on every device.
    """
    return getattr(getattr(report, "settings", None), "exact_norms", False) is not False


def arithmetic_slack(
    dtype: torch.dtype,
    *,
    precision: Precision = "float32",
    report: SensitivityReport | None = None,
    sums: SumRounding = _USUAL,
) -> float:
    """Return what rounding may add to a gradient bound, relative to it.

    Args:
        dtype: that of the parameters.
        precision: what products of activations and weights are rounded to.
        report: the bounds of the model, which lower precisions need.
        sums: what the rounding of sums over the batch adds.
    """
    if dtype not in _OWN:
        raise ValueError(
            f"parameters of {dtype} are not supported: rounding in {dtype} is too coarse to be "
            "covered by the default slack. Keep parameters in float32."
        )
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if precision != "float32" and dtype != torch.float32:
        raise ValueError(f"precision={precision!r} is for parameters in float32, not {dtype}")
    slack = max(_DEFAULT[dtype], (1 + sums.slack) * (1 + _OWN[dtype]) - 1)
    if report is None or precision == "float32":
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
