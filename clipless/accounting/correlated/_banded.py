"""`BandedStrategy`: noise that takes back part of the noise of the last few steps."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from clipless.accounting.correlated._sensitivity import banded_sensitivity, pass_costs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

FRACTION_BITS = 10
"""Coefficients are whole multiples of 2^-10: sums of them with noise on a grid are exact."""
_ROWS_AT_ONCE = 256
_LARGEST = 2**10 * 2**FRACTION_BITS


@dataclass(frozen=True, kw_only=True)
class BandedStrategy:
    """A lower triangular matrix C with `bands` diagonals: noise of a run is `C^-1 z`.

    With z independent of variance 1, the noise of step t is
    `n_t = (z_t - sum_{j=1}^{bands-1} C[t, t-j] n_{t-j}) / C[t, t]`, a recursion over the noises of
    the last `bands - 1` steps. What is released is post-processing of the Gaussian mechanism
    `C G + z`. It is so exactly if z and the coefficients lie on grids, if the division is rounded
    to the grid of the sums, and if the n that enter are those that were added.

    One band with all entries 1 is independent noise. Entries are kept as whole multiples of 2^-10,
    a table of (steps, bands) of them, packed, and everything is computed from these.

    Example:
        >>> strategy = BandedStrategy.square_root(steps=4, bands=2)
        >>> strategy.matrix().round(3)
        array([[0.895, 0.   , 0.   , 0.   ],
               [0.447, 0.895, 0.   , 0.   ],
               [0.   , 0.447, 0.895, 0.   ],
               [0.   , 0.   , 0.447, 1.   ]])
    """

    steps: int
    bands: int
    packed: bytes
    """Row t holds C[t, t], C[t, t - 1], ... as big-endian int32, multiplied by 2^10."""

    def __post_init__(self) -> None:
        """Refuse tables that are no strategy."""
        if not 1 <= self.bands <= self.steps:
            raise ValueError(f"bands must lie in [1, steps={self.steps}], got {self.bands}")
        if len(self.packed) != 4 * self.steps * self.bands:
            raise ValueError(f"{len(self.packed)} bytes are no table of {self.steps}x{self.bands}")
        table = self.table
        if not (table[:, 0] > 0).all():
            raise ValueError("the diagonal of a strategy must be positive")
        if (abs(table) > _LARGEST).any():
            raise ValueError("entries of a strategy must not exceed 1024")
        if any(table[row, row + 1 :].any() for row in range(self.bands - 1)):
            raise ValueError("a strategy cannot look back to steps before the first")

    @classmethod
    def from_matrix(cls, matrix: Array, *, bands: int) -> BandedStrategy:
        """Return the strategy nearest to a matrix, (steps, steps), whose other entries are 0."""
        import numpy as np

        steps = len(matrix)
        outside = np.tril(matrix, -1) - np.triu(np.tril(matrix, -1), -(bands - 1))
        if np.triu(matrix, 1).any() or outside.any():
            raise ValueError(f"the matrix has entries outside of its {bands} lower bands")
        table = np.zeros((steps, bands))
        for back in range(bands):
            table[back:, back] = np.diagonal(matrix, -back)
        return cls.from_table(table)

    @classmethod
    def from_table(cls, table: Array) -> BandedStrategy:
        """Return the strategy nearest to a table whose row t holds C[t, t], C[t, t - 1], ..."""
        import numpy as np

        whole = np.rint(np.asarray(table, dtype=float) * 2**FRACTION_BITS)
        if not np.isfinite(whole).all() or (abs(whole) > _LARGEST).any():
            raise ValueError("entries of a strategy must be finite, and at most 1024")
        steps, bands = whole.shape
        return cls(steps=steps, bands=bands, packed=whole.astype(">i4").tobytes())

    @classmethod
    def toeplitz(cls, coefficients: Array, *, steps: int) -> BandedStrategy:
        """Return a Toeplitz strategy whose columns are scaled to norm 1."""
        import numpy as np

        given = np.asarray(coefficients, dtype=float)[:steps]
        column_norms = np.sqrt(
            np.cumsum(given**2)[np.minimum(len(given), steps - np.arange(steps)) - 1]
        )
        table = np.zeros((steps, len(given)))
        for back, value in enumerate(given):
            table[back:, back] = value / column_norms[: steps - back]
        return cls.from_table(table)

    @classmethod
    def square_root(cls, *, steps: int, bands: int) -> BandedStrategy:
        """Return the banded square root of prefix sums, columns scaled to norm 1; not optimised."""
        return cls.toeplitz(square_root_coefficients(bands), steps=steps)

    @classmethod
    def independent(cls, *, steps: int) -> BandedStrategy:
        """Return independent noise, one band of ones."""
        return cls.square_root(steps=steps, bands=1)

    @cached_property
    def table(self) -> Array:
        """The entries times 2^10, int64 of shape (steps, bands): C[t, t], C[t, t - 1], ..."""
        import numpy as np

        found = np.frombuffer(self.packed, dtype=">i4").astype(np.int64)
        return found.reshape(self.steps, self.bands)

    def matrix(self) -> Array:
        """Return C, (steps, steps)."""
        import numpy as np

        found = np.zeros((self.steps, self.steps))
        for back in range(self.bands):
            rows = np.arange(back, self.steps)
            found[rows, rows - back] = self.table[back:, back] / 2**FRACTION_BITS
        return found

    def through(self, workload: Array) -> Array:
        """Return `A C^-1` for rows A of a workload, (rows, steps)."""
        import numpy as np
        from scipy.linalg import solve_banded

        upper = self.table.T[::-1] / 2**FRACTION_BITS  # the diagonals of C^T, as LAPACK wants them
        found: Array = np.asarray(solve_banded((0, self.bands - 1), upper, workload.T)).T
        return found

    @cached_property
    def gains(self) -> Array:
        """The deviation of each step's noise over that of z: the norms of rows of C^-1."""
        import numpy as np

        found = np.zeros(self.steps)
        for first in range(0, self.steps, _ROWS_AT_ONCE):
            rows = np.arange(first, min(first + _ROWS_AT_ONCE, self.steps))
            picked = np.zeros((len(rows), self.steps))
            picked[np.arange(len(rows)), rows] = 1.0
            found[rows] = np.linalg.norm(self.through(picked), axis=1)
        return found

    def column_squares(self) -> Array:
        """Return the squared norms of the columns, (steps,)."""
        import numpy as np

        found = np.zeros(self.steps)
        for back in range(self.bands):
            entries = self.table[back:, back] / 2**FRACTION_BITS
            found[: self.steps - back] += entries**2
        return found

    def sensitivity(self, *, participations: int, separation: int) -> float:
        """Return the sensitivity where a record comes again after `separation` steps or more."""
        if separation < min(self.bands, self.steps):
            raise ValueError(
                f"{self.bands} bands, but a record may come again after {separation} steps and "
                f"meet its own noise: use at most {separation} bands"
            )
        return banded_sensitivity(
            self.column_squares().tolist(), participations=participations, separation=separation
        )

    def pass_costs(self, *, steps_per_pass: int) -> tuple[float, ...]:
        """Return what each pass in a fixed order adds to the squared sensitivity."""
        if self.bands > steps_per_pass and self.steps > steps_per_pass:
            raise ValueError(
                f"{self.bands} bands, but a record comes again after {steps_per_pass} steps: use "
                f"at most {steps_per_pass} bands"
            )
        return pass_costs(self.column_squares().tolist(), steps_per_pass=steps_per_pass)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON holds without loss."""
        text = base64.b64encode(zlib.compress(self.packed, 9)).decode("ascii")
        return {"steps": self.steps, "bands": self.bands, "table": text}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BandedStrategy:
        """Restore what `to_dict` wrote; anything else raises `ValueError`."""
        if set(data) != {"steps", "bands", "table"}:
            raise ValueError(f"a strategy has steps, bands and table, got {sorted(data)}")
        try:
            packed = zlib.decompress(base64.b64decode(data["table"], validate=True))
        except zlib.error as error:
            raise ValueError(f"the table of a strategy is damaged: {error}") from error
        return cls(steps=int(data["steps"]), bands=int(data["bands"]), packed=packed)

    def __repr__(self) -> str:
        return f"BandedStrategy(steps={self.steps}, bands={self.bands})"


def square_root_coefficients(bands: int) -> Array:
    """Return the first coefficients of `(1 - x)^(-1/2)`: 1, 1/2, 3/8, ..."""
    import numpy as np

    back = np.arange(1, bands)
    return np.concatenate([[1.0], np.cumprod((2 * back - 1) / (2 * back))])
