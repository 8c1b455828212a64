"""The progress bar, and an epsilon for it that costs next to nothing."""

from __future__ import annotations

import math
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from clipless.common import DurationNote
from clipless.privacy import PrivacyEngine
from clipless.training._metrics import RunningMetrics

_POINTS = 16
_SHARE = 0.02


class EpsilonGauge:
    """An upper bound of the epsilon spent so far, from few questions to the accountant.

    The accountant may take a second. It is asked about 16 points along the run, each when it is
    reached, and only while all its answers together took 2% of the time; in between, and where
    there is no time, the answer is that of a later point, which is larger.
    """

    def __init__(self, engine: PrivacyEngine, *, steps: int) -> None:
        self._engine, self._steps = engine, steps
        self._known: dict[int, float] = {}
        self._begun, self._asking = time.monotonic(), 0.0
        target = engine.plan.target_epsilon
        self._ceiling = math.inf if target is None else target

    def at(self, step: int) -> float:
        """Return a bound of what the first `step` steps cost, and all that came before them."""
        point = min(self._steps, math.ceil(step * _POINTS / self._steps) * self._steps // _POINTS)
        point = max(point, step)
        if not any(step <= known <= point for known in self._known) and self._may_ask():
            before = time.monotonic()
            self._known[point] = self._engine.get_epsilon(further_steps=point - step)
            self._asking += time.monotonic() - before
        return min((v for known, v in self._known.items() if known >= step), default=self._ceiling)

    def _may_ask(self) -> bool:
        return self._asking <= _SHARE * (time.monotonic() - self._begun)


class ProgressBar:
    """Steps, epsilon, loss, accuracy and time left on a terminal; else a line if it is long."""

    def __init__(self, *, show: bool | None, steps: int, done: int) -> None:
        console = Console(stderr=True)
        self.shown = console.is_terminal if show is None else show
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._last = -math.inf
        quiet = self.shown or show is False
        self._note = None if quiet else DurationNote("Training", total=steps)
        if self.shown:
            self._progress = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}", markup=False),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._progress.add_task("", total=steps, completed=done, numbers="")
            self._progress.start()

    def update(self, step: int, *, metrics: RunningMetrics, gauge: EpsilonGauge) -> None:
        """Show where training is, at most ten times a second."""
        if self._note is not None:
            self._note.update(step)
        if self._progress is None or time.monotonic() - self._last < 0.1:
            return
        numbers = metrics.read()
        text = f"epsilon \u2264 {gauge.at(step):.3g}  loss {numbers['loss']:.4g}"
        if "accuracy" in numbers:
            text += f"  accuracy {numbers['accuracy']:.1%}"
        self._progress.update(self._task, completed=step, numbers=text)
        self._last = time.monotonic()

    def stop(self, step: int) -> None:
        """Leave the bar as it is."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)
            self._progress.stop()
            self._progress = None
