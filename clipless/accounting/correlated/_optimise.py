"""Strategies with the least expected error for a workload, at a sensitivity that is given.

Whatever the search finds, its sensitivity is computed from the result: a search that goes wrong
costs accuracy, never privacy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clipless.accounting.correlated._banded import BandedStrategy, square_root_coefficients

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

_LEAST_DIAGONAL = 2.0**-5
LARGEST_DENSE = 600
"""Longer runs have Toeplitz strategies: a move of a search over all entries takes steps^3."""


def optimised_strategy(
    workload: Array, *, bands: int, steps_per_pass: int | None = None, moves: int = 60
) -> BandedStrategy:
    """Return a strategy of so many bands with a small mean squared error in rows of a workload.

    With `steps_per_pass`, for data in a fixed order: the squared norms of the columns of the steps
    in which a record takes part add up to their number, so that early and late passes may count
    differently. Without, every column has norm 1, as cyclic Poisson sampling needs.

    Example:
        >>> import numpy as np
        >>> from clipless.accounting.correlated import mean_error
        >>> sums = np.tril(np.ones((100, 100)))
        >>> found = optimised_strategy(sums, bands=10, steps_per_pass=10)
        >>> plain = BandedStrategy.square_root(steps=100, bands=10)
        >>> [round(sum(each.pass_costs(steps_per_pass=10)), 1) for each in (found, plain)]
        [10.0, 10.0]
        >>> bool(mean_error(sums, found) < 0.93 * mean_error(sums, plain))
        True
    """
    steps = workload.shape[1]
    if not 1 <= bands <= steps:
        raise ValueError(f"bands must lie in [1, steps={steps}], got {bands}")
    if steps_per_pass is not None and steps > steps_per_pass and bands > steps_per_pass:
        raise ValueError(f"{bands} bands, but a record comes again after {steps_per_pass} steps")
    if bands == 1 and (steps_per_pass is None or steps <= steps_per_pass):
        return BandedStrategy.independent(steps=steps)
    if steps > LARGEST_DENSE:
        return BandedStrategy.toeplitz(_best_toeplitz(workload, bands, moves), steps=steps)
    return _best_table(workload, bands, steps_per_pass, moves)


def _best_table(workload: Array, bands: int, period: int | None, moves: int) -> BandedStrategy:
    """Search over all entries of the bands."""
    import numpy as np
    from scipy.linalg import solve_triangular, toeplitz
    from scipy.optimize import minimize

    steps = workload.shape[1]
    inside = np.tril(np.ones((steps, steps), dtype=bool))
    inside &= ~np.tril(inside, -bands)
    start = toeplitz(square_root_coefficients(steps)) * inside
    group = np.arange(steps) if period is None else np.arange(steps) % period
    wanted = np.bincount(group).astype(float)

    def norms(matrix: Array) -> Array:
        """Return, for each column, the root of its group's sum of squares over their number."""
        squares = np.bincount(group, weights=(matrix**2).sum(axis=0))
        return np.sqrt(squares / wanted)[group]

    def loss(entries: Array) -> tuple[float, Array]:
        matrix = np.zeros((steps, steps))
        matrix[inside] = entries
        scale = norms(matrix)
        scaled = matrix / scale
        left = solve_triangular(scaled, workload.T, lower=True, trans="T").T
        error = float((left**2).sum())
        # d(A C^-1) = -(A C^-1) dC C^-1, hence the gradient -2 M^T M C^-T; then through the scaling.
        slope = -2.0 * solve_triangular(scaled, left.T @ left, lower=True).T
        along = np.bincount(group, weights=(slope * scaled).sum(axis=0)) / wanted
        slope = (slope - scaled * along[group]) / scale
        return 0.5 * float(np.log(error)), (slope / (2.0 * error))[inside]

    found = minimize(loss, start[inside], jac=True, method="L-BFGS-B", options={"maxiter": moves})
    matrix = np.zeros((steps, steps))
    matrix[inside] = found.x
    matrix /= norms(matrix)
    # Steps that the optimizer hardly uses get a diagonal that rounding would make 0.
    np.fill_diagonal(matrix, np.maximum(np.diagonal(matrix), _LEAST_DIAGONAL))
    return BandedStrategy.from_matrix(matrix, bands=bands)


def _best_toeplitz(workload: Array, bands: int, moves: int) -> Array:
    """Search over the coefficients of a Toeplitz matrix whose columns are scaled to norm 1."""
    import numpy as np
    from scipy.fft import irfft, next_fast_len, rfft
    from scipy.optimize import minimize

    steps = workload.shape[1]
    size = next_fast_len(2 * steps)
    ends = np.minimum(bands, steps - np.arange(steps))  # so many coefficients are in a column

    def convolved(left: Array, right: Array, *, turned: bool) -> Array:
        spectrum = rfft(right, size)
        product = rfft(left, size) * (spectrum.conj() if turned else spectrum)
        found: Array = irfft(product, size)[..., :steps]
        return found

    def loss(free: Array) -> tuple[float, Array]:
        coefficients = np.concatenate([[1.0], free])
        inverse = np.zeros(steps)
        inverse[0] = 1.0
        for step in range(1, steps):
            back = min(step, bands - 1)
            inverse[step] = -coefficients[1 : back + 1] @ inverse[step - back : step][::-1]
        norms = np.sqrt(np.cumsum(coefficients**2))[ends - 1]
        scaled = workload * norms
        left = convolved(scaled, inverse, turned=True)  # A C^-1
        error = float((left**2).sum())
        # To the inverse series d: sum over r, i of M[r, i] B[r, i + j]; to c = 1 / d: -d * d * it.
        products = rfft(scaled, size) * rfft(left, size).conj()
        to_inverse = 2.0 * irfft(products.sum(axis=0), size)[:steps]
        squared = convolved(inverse, inverse, turned=False)
        slope = -convolved(to_inverse, squared, turned=True)[:bands]
        # To the scaling of columns, whose norms hold the first `ends` coefficients.
        to_norms = 2.0 * (workload * convolved(left, inverse, turned=False)).sum(axis=0) / norms
        of_ends = np.bincount(ends, weights=to_norms, minlength=bands + 1)
        slope = slope + coefficients * of_ends[::-1].cumsum()[::-1][1:]
        return 0.5 * float(np.log(error)), (slope / (2.0 * error))[1:]

    start = square_root_coefficients(bands)[1:]
    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": moves})
    return np.concatenate([[1.0], found.x])
