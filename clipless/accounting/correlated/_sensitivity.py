"""Sensitivities of strategies, exactly, when one record takes part in several steps.

With a strategy C, what is released is as good as `C G + z`, where row t of G is the sum of step t.
A record that takes part in the steps S, with a contribution u_t of norm at most 1 in each, moves
that by `sum_t C[:, t] u_t`. The sensitivity is the largest norm of it over all S that may occur. It
holds for contributions that depend on earlier releases as well: every choice of them is covered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

_ROUNDING = 1e-12
"""Relative, for float64 sums of a few thousand squares; sensitivities are enlarged by it."""


def banded_sensitivity(squares: Sequence[float], *, participations: int, separation: int) -> float:
    """Return the sensitivity of a strategy with at most `separation` bands.

    Columns that are `separation` or more steps apart have no row in common, so that the square of
    the sensitivity is the largest sum of at most `participations` of the columns' `squares`
    (squared norms), all at least `separation` apart: found by dynamic programming.

    Example:
        >>> round(banded_sensitivity([1.0, 3.0, 1.0, 1.0], participations=2, separation=2) ** 2, 6)
        4.0
    """
    _require(participations, separation)
    steps = len(squares)
    best = [0.0] * (steps + 1)  # best[t]: with so many participations, all before step t
    for _ in range(min(participations, -(-steps // separation))):
        longer = [0.0] * (steps + 1)
        for step in range(steps):
            before = best[max(0, step + 1 - separation)]
            longer[step + 1] = max(longer[step], squares[step] + before)
        best = longer
    return float(best[steps] ** 0.5 * (1.0 + _ROUNDING))


def pass_costs(squares: Sequence[float], *, steps_per_pass: int) -> tuple[float, ...]:
    """Return what each pass over data in one fixed order adds to the squared sensitivity.

    A record takes part in steps j, j + n, j + 2n and so on, for one j. After p passes the squared
    sensitivity of a strategy with at most n bands is the largest sum, over j, of the squared
    norms of columns j, j + n, ..., j + (p - 1) n; the costs are the differences. A pass that has
    begun counts as a whole.

    Example:
        >>> [round(cost, 6) for cost in pass_costs([1.0, 2.0, 1.5, 0.25], steps_per_pass=2)]
        [2.0, 0.5]
    """
    import numpy as np

    _require(1, steps_per_pass)
    missing = -len(squares) % steps_per_pass
    table = np.append(np.asarray(squares, dtype=float), np.zeros(missing))
    totals = table.reshape(-1, steps_per_pass).cumsum(axis=0).max(axis=1) * (1.0 + 2 * _ROUNDING)
    return tuple(float(cost) for cost in np.diff(totals, prepend=0.0))


def toeplitz_sensitivity(
    coefficients: Sequence[float], *, steps: int, participations: int, separation: int
) -> float:
    """Return the sensitivity of a Toeplitz strategy that does not increase and is not negative.

    Any number of bands, so that participations may meet the same noise. The worst pattern is the
    earliest and densest: steps 0, s, 2s, ... (Kalinin and Lampert 2024). Inner products of columns
    are not negative, so that equal contributions add up; moving a participation to an earlier step
    lengthens its column, and moving two together raises their inner product.

    Example:
        >>> sensitivity = toeplitz_sensitivity(
        ...     [1.0, 0.5], steps=4, participations=2, separation=1)
        >>> round(sensitivity**2, 6)
        3.5
    """
    import numpy as np

    _require(participations, separation)
    column = np.zeros(steps)
    given = np.asarray(coefficients, dtype=float)[:steps]
    column[: len(given)] = given
    if not (np.all(column >= 0) and np.all(np.diff(column) <= 0)):
        raise ValueError(
            "the worst pattern is known for coefficients that are not negative and do not increase"
        )
    total = np.zeros(steps)
    for start in range(0, min(steps, participations * separation), separation):
        total[start:] += column[: steps - start]
    return float(np.sqrt(total @ total) * (1.0 + _ROUNDING))


def _require(participations: int, separation: int) -> None:
    if participations < 1 or separation < 1:
        raise ValueError(
            f"participations={participations}, separation={separation}: both must be at least 1"
        )
