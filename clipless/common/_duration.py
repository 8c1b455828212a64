"""`DurationNote`: says once, and only of long work, how long it will take."""

from __future__ import annotations

import sys
import time

_MEASURED_SECONDS = 3.0
_LONG_SECONDS = 60.0


class DurationNote:
    """Writes one line to the standard error once it is clear that work will take minutes.

    Call `update` with how much is done. The first part is not measured, because it may compile or
    read; from then on three seconds of work tell how long the rest will take.
    """

    def __init__(self, what: str, *, total: int, hint: str = "") -> None:
        self._what, self._total, self._hint = what, total, hint
        self._begun: tuple[float, int] | None = None
        self._said = False

    def update(self, done: int) -> None:
        """Take note of progress, and say how long the rest will take if that is long."""
        if self._said:
            return
        now = time.monotonic()
        if self._begun is None:
            self._begun = (now, done)
            return
        seconds, parts = now - self._begun[0], done - self._begun[1]
        if parts <= 0 or seconds < _MEASURED_SECONDS:
            return
        self._said = True
        left = seconds / parts * (self._total - done)
        if left > _LONG_SECONDS:
            minutes = max(1, round(left / 60))
            print(f"{self._what} will take about {minutes} more minutes here.{self._hint}",
                  file=sys.stderr, flush=True)  # fmt: skip
