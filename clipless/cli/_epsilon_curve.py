"""Epsilon over steps: in the terminal, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clipless.runs import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from clipless.accounting import TradeOff

_BAR = 40
Curve = Sequence[tuple[int, float]]
"""Pairs of steps and epsilon."""


def chart(curve: Curve) -> Table:
    """Return the curve as bars of text."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), title="Epsilon over steps", title_justify="left")
    table.add_column("steps", justify="right")
    table.add_column("epsilon", justify="right")
    table.add_column("", style="blue")
    largest = max((epsilon for _, epsilon in curve), default=0.0) or 1.0
    for steps, epsilon in curve:
        bar = "█" * max(1, round(_BAR * epsilon / largest))
        table.add_row(str(steps), f"{epsilon:.3g}", bar)
    return table


def draw(curve: Curve, path: Path, *, delta: float, title: str, trade_off: TradeOff) -> None:
    """Draw epsilon over steps, and beside it the trade-off, into a .png, .svg or .pdf file."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'clipless[plots]'") from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes, beside = figure.subplots(1, 2)
    axes.plot([steps for steps, _ in curve], [epsilon for _, epsilon in curve], marker=".")
    axes.set(xlabel="steps", ylabel=f"epsilon at delta {delta:g}", title=title, xlim=0, ylim=0)
    axes.grid(alpha=0.3)
    alarms = [k / 200 for k in range(201)]
    beside.plot(alarms, [trade_off.misses(each) for each in alarms], label="best attack")
    beside.plot([0, 1], [1, 0], linestyle="--", label="blind guesses")
    beside.set(xlabel="false alarms", ylabel="misses", title="what attacks can reach",
               xlim=(0, 1), ylim=(0, 1))  # fmt: skip
    beside.grid(alpha=0.3)
    beside.legend()
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--plot {path}: {error}") from error
