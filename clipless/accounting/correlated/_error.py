"""The error that noise of a strategy leaves in what an optimizer computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from clipless.accounting.correlated._banded import BandedStrategy
    from clipless.accounting.correlated._buffered import BufferedStrategy

    Array = NDArray[Any]
    Strategy = BandedStrategy | BufferedStrategy


def error_by_step(workload: Array, strategy: Strategy) -> Array:
    """Return the standard deviation of each row of `A C^-1 z`, for z of variance 1.

    Example:
        >>> import numpy as np
        >>> from clipless.accounting.correlated import BandedStrategy
        >>> sums = np.tril(np.ones((4, 4)))
        >>> error_by_step(sums, BandedStrategy.independent(steps=4)) ** 2
        array([1., 2., 3., 4.])
    """
    import numpy as np

    found: Array = np.linalg.norm(strategy.through(workload), axis=1)
    return found


def mean_error(workload: Array, strategy: Strategy) -> float:
    """Return the root mean square of `error_by_step`."""
    by_row = error_by_step(workload, strategy)
    return float((by_row @ by_row / len(by_row)) ** 0.5)


def largest_error(workload: Array, strategy: Strategy) -> float:
    """Return the largest of `error_by_step`."""
    return float(error_by_step(workload, strategy).max())
