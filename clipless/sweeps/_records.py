"""Outcomes and records of trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

State = Literal["complete", "pruned", "failed", "running", "waiting"]
PlainHistory = list[tuple[dict[str, Any], int]]
"""Releases as plain data: `Mechanism.to_dict()` and how often."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run went: what a training function returns.

    Args:
        value: the metric on public data, the larger the better.
        epsilon, delta: what the run cost, by its own ledger.
        history: everything that it released: pairs of `Mechanism.to_dict()` and a count. Without
            it nothing can be said about the cost of the sweep.
        robustness: the accuracy that is certified at the sweep's radius.
        pruned: the run was stopped early, by the `TrialPruned` that a report raised.
    """

    value: float | None
    epsilon: float
    delta: float
    history: Sequence[tuple[Mapping[str, Any], int]] | None = None
    robustness: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    steps: int | None = None
    seconds: float | None = None
    pruned: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


class Report(Protocol):
    """Told the metric after every epoch; raises `optuna.TrialPruned` if the run should end."""

    def __call__(
        self, epoch: int, value: float, *, epsilon: float | None = None, last: bool = False
    ) -> None:
        """Note the metric, and the epsilon if it is known; nothing is gained by stopping `last`."""


Train = Callable[[dict[str, Any], Path, Report], Outcome]
"""A training function: the nested settings, the folder of the run, and whom to report to. The
folder holds an earlier attempt if the run was killed."""


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """One run of a sweep: its settings and what came of them."""

    slot: int
    """Its place in the sweep, from 0. A run that was killed and tried again keeps it."""
    state: State
    settings: Mapping[str, Any]
    """What the sampler chose, by dotted names."""
    value: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    robustness: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    steps: int | None = None
    seconds: float | None = None
    points: tuple[tuple[int, float, float | None], ...] = ()
    """Epoch, metric and epsilon along the way."""
    history: PlainHistory | None = None
    lost_attempts: int = 0
    """Attempts whose ledger is not at hand: each counts as a whole run."""
    attempts: int = 0
    folder: str | None = None
    """Where the run is, if it is on this machine."""
    error: str | None = None

    @property
    def complete(self) -> bool:
        """Whether the run reached its end, and has a metric."""
        return self.state == "complete" and self.value is not None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)
