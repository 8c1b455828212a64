"""Count of the private fits in this process, and the warning that their costs add up."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field


class RepeatedFitWarning(UserWarning):
    """Several models were fitted privately; if they saw the same people, the costs add up."""


@dataclass
class _Fits:
    count: int = 0
    epsilon: float = 0.0
    delta: float = 0.0
    announced: int = field(default=1)


_fits = _Fits()


def count_fit(epsilon: float, delta: float) -> None:
    """Note a fit that released something; warn at the second and whenever their number doubles."""
    _fits.count += 1
    _fits.epsilon += epsilon
    _fits.delta += delta
    if _fits.count >= 2 * _fits.announced:
        _fits.announced = _fits.count
        warnings.warn(
            f"{_fits.count} private models were fitted in this process. Each keeps its own "
            "promise; people who are in the data of all of them are promised, by adding up, "
            f"epsilon {_fits.epsilon:.3g} at delta {_fits.delta:.3g}. So cost cross-validation "
            "and searches as well, and choosing by scores on private data is not covered at all. "
            "Choose on public data, or pass one `ledger` to stay within one budget.",
            RepeatedFitWarning,
            stacklevel=4,
        )
