"""Axes: where values lie on the paper, and which of them get a tick."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from clipless.report._format import number

_SMALLEST_ROOM = 1e-250
"""Below it a lone value is drawn as 0 would be: its ticks would leave the range of floats."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A linear or logarithmic axis from `low` to `high`, with a label that names the unit."""

    label: str
    low: float
    high: float
    log: bool = False
    percent: bool = False
    whole: bool = False
    """Whether only whole numbers get a tick."""

    def __post_init__(self) -> None:
        """Refuse an axis on which nothing has a place."""
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"an axis needs low < high, got {self.low!r} and {self.high!r}")
        if self.log and self.low <= 0:
            raise ValueError(f"a logarithmic axis begins above 0, got {self.low!r}")

    def place(self, value: float) -> float:
        """Return where a value lies, 0 at the low end and 1 at the high one; never beyond."""
        if self.log:
            value = max(value, self.low)
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return min(max(part, 0.0), 1.0)

    def ticks(self, most: int = 6) -> list[float]:
        """Return round values, at most about `most` of them.

        Example:
            >>> Axis(label="steps", low=0, high=300).ticks()
            [0.0, 50.0, 100.0, 150.0, 200.0, 250.0, 300.0]
            >>> Axis(label="ratio", low=1e-4, high=1, log=True).ticks()
            [0.0001, 0.001, 0.01, 0.1, 1.0]
        """
        if self.log:
            return self._decades(most)
        step = _round_step((self.high - self.low) / most)
        if self.whole and not step.is_integer():
            step = max(1.0, math.ceil(step))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        # Twelve digits of the step, however small it is: 3 * 0.1 is a tick at 0.3.
        digits = 12 - math.floor(math.log10(step))
        return [round(index * step, digits) for index in range(first, last + 1)]

    def _decades(self, most: int) -> list[float]:
        first = math.ceil(math.log10(self.low) - 1e-9)
        last = math.floor(math.log10(self.high) + 1e-9)
        every = max(1, math.ceil((last - first + 1) / most))
        found = [10.0**power for power in range(first, last + 1, every)]
        if len(found) >= 2:
            return found
        finer = (
            factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5)
        )
        return [value for value in finer if self.low * 0.999 <= value <= self.high * 1.001]

    def text(self, value: float) -> str:
        """Return a tick's label."""
        return f"{100 * value:g}%" if self.percent else number(value, 6)


def _round_step(rough: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(f * power for f in (1.0, 2.0, 2.5, 5.0, 10.0) if f * power >= rough * (1 - 1e-9))


def around(
    values: Iterable[float | None], *, label: str, zero: bool = False, percent: bool = False
) -> Axis:
    """Return a linear axis that holds all values, with a little room, and ends at round ones."""
    found = [value for value in values if value is not None and math.isfinite(value)] or [0.0]
    low, high = min(found), max(found)
    if zero:
        low = min(low, 0.0)
    if high - low < 1e-12 * max(1.0, abs(high)):
        room = 0.5 * max(abs(low), abs(high))
        room = room if room > _SMALLEST_ROOM else 0.5
        low, high = low - room * (not zero), high + room
    step = _round_step((high - low) / 6)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    if percent:
        low, high = max(low, 0.0), min(high, 1.0)
    return Axis(label=label, low=low, high=high, percent=percent)


def whole_numbers(last: float, *, label: str, first: float = 0) -> Axis:
    """Return a linear axis over counts."""
    return Axis(label=label, low=first, high=max(last, first + 1), whole=True)


def decades(values: Iterable[float | None], *, label: str, include: float | None = None) -> Axis:
    """Return a logarithmic axis of whole decades that holds all positive values."""
    found = [value for value in values if value is not None and 0 < value < math.inf]
    found += [] if include is None else [include]
    low = math.floor(math.log10(min(found, default=0.1)) + 1e-9)
    high = math.ceil(math.log10(max(found, default=1.0)) - 1e-9)
    return Axis(label=label, low=10.0**low, high=10.0 ** max(high, low + 1), log=True)
