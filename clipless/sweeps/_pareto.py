"""The Pareto front: runs that no other beats in everything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clipless.sweeps._records import TrialRecord
    from clipless.sweeps._result import SweepResult

_BLUE, _GREEN, _GREY = "#2563a8", "#3a9d5d", "#b8bcc2"


def pareto_front(points: Sequence[Sequence[float]]) -> list[int]:
    """Return which points no other one dominates, ordered by their first coordinate.

    The first coordinate, epsilon, is the better the smaller; the others the better the larger. Of
    equal points the first one counts.

    Example:
        >>> pareto_front([(1.0, 0.90), (2.0, 0.95), (3.0, 0.93), (2.0, 0.95)])
        [0, 1]
    """

    def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
        no_worse = one[0] <= other[0] and all(
            a >= b for a, b in zip(one[1:], other[1:], strict=True)
        )
        return no_worse and tuple(one) != tuple(other)

    unique = {tuple(point): index for index, point in reversed(list(enumerate(points)))}
    front = [
        index
        for point, index in unique.items()
        if not any(dominates(other, point) for other in unique)
    ]
    return sorted(front, key=lambda index: tuple(points[index]))


def plot_front(result: SweepResult, path: str | Path) -> Path:
    """Draw epsilon against the metric, and against certified accuracy where it was measured.

    Small dots are the epochs of the runs, larger ones their ends; the line is the front of those
    that were complete. Needs matplotlib. Nothing in it is covered by the guarantee of a single run.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the plot needs matplotlib: pip install 'clipless[plots]'") from error
    ended = [t for t in result.trials if t.epsilon is not None]
    panels: list[tuple[str, list[TrialRecord], str]] = [
        (result.sweep.metric, [t for t in ended if t.value is not None], "value")
    ]
    certified = [t for t in ended if t.robustness is not None]
    if certified:
        title = f"certified accuracy at radius {result.sweep.radius}"
        panels.append((title, certified, "robustness"))
    figure = Figure(figsize=(5.2 * len(panels), 3.8), layout="constrained")
    for number, (title, trials, name) in enumerate(panels):
        axes: Any = figure.add_subplot(1, len(panels), number + 1)
        if number == 0:
            epochs = [(e, v) for t in result.trials for _, v, e in t.points if e is not None]
            if epochs:
                axes.scatter(*zip(*epochs, strict=True), s=6, color=_GREY, label="epochs")
        pairs: list[Any] = [(t.epsilon, getattr(t, name)) for t in trials]
        if pairs:
            axes.scatter(*zip(*pairs, strict=True), s=22, color=_GREEN, label="runs")
        whole = [pair for pair, t in zip(pairs, trials, strict=True) if t.complete]
        if whole:
            front = [whole[index] for index in pareto_front(whole)]
            front.append((max(epsilon for epsilon, _ in pairs), front[-1][1]))
            axes.step(*zip(*front, strict=True), where="post", color=_BLUE, label="front")
        axes.legend(frameon=False)
        axes.set_xlabel("epsilon")
        axes.set_ylabel(title)
        axes.spines[["top", "right"]].set_visible(False)
    cost = result.selection.statement.partition(":")[0]
    figure.suptitle(f"{len(ended)} runs; selecting among them is {cost}", fontsize=10)
    figure.savefig(path, dpi=120)
    return Path(path)
