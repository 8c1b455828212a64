"""`SweepResult`: the runs of a sweep, their Pareto front, and the cost of selection."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna

from clipless.runs import merge_config_layers
from clipless.sweeps._definition import Sweep
from clipless.sweeps._pareto import pareto_front
from clipless.sweeps._records import PlainHistory, State, TrialRecord
from clipless.sweeps._space import nested
from clipless.sweeps._storage import DECLARED, DEFINITION, SLOTS

if TYPE_CHECKING:
    from rich.table import Table

    from clipless.sweeps.selection._cost import SelectionCost

SLOT, SETTINGS, OUTCOME, POINTS = "slot", "settings", "outcome", "points"
SPENT, LOST, ERROR, UNWANTED = "spent", "lost_attempts", "error", "unwanted"

_STATES: dict[optuna.trial.TrialState, State] = {
    optuna.trial.TrialState.COMPLETE: "complete",
    optuna.trial.TrialState.PRUNED: "pruned",
    optuna.trial.TrialState.FAIL: "failed",
    optuna.trial.TrialState.RUNNING: "running",
    optuna.trial.TrialState.WAITING: "waiting",
}


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """The present state of a sweep.

    Guarantee: none by itself. `selection` says whether showing the best run is covered, and at
    what epsilon; showing more than that (the table, the front, how many runs there were) costs
    `selection.composition`.
    """

    sweep: Sweep
    trials: tuple[TrialRecord, ...]
    folder: Path
    declared: tuple[PlainHistory, ...] | None = field(default=None, repr=False)
    """Under repetitions, what any run that the space allows may release."""

    @classmethod
    def of(cls, study: optuna.Study, folder: Path) -> SweepResult:
        """Read a study."""
        slots: dict[int, list[optuna.trial.FrozenTrial]] = {
            slot: [] for slot in range(int(study.user_attrs[SLOTS]))
        }
        for trial in study.get_trials(deepcopy=False):
            if not trial.user_attrs.get(UNWANTED) and SLOT in trial.user_attrs:
                slots.setdefault(trial.user_attrs[SLOT], []).append(trial)
        declared = study.user_attrs.get(DECLARED)
        return cls(
            sweep=Sweep.from_dict(study.user_attrs[DEFINITION]),
            trials=tuple(_record(slot, attempts, folder) for slot, attempts in slots.items()),
            folder=folder,
            declared=None if declared is None else tuple(declared),
        )

    @property
    def finished(self) -> bool:
        """Whether no run is waiting or running."""
        return all(trial.state not in ("waiting", "running") for trial in self.trials)

    @property
    def best(self) -> TrialRecord | None:
        """The complete run with the largest metric, or None if there is none."""
        complete = [trial for trial in self.trials if trial.complete]
        return max(complete, key=lambda trial: (trial.value, -trial.slot), default=None)

    @property
    def front(self) -> tuple[TrialRecord, ...]:
        """The complete runs that no other beats in epsilon, metric and certified accuracy."""
        ended = [t for t in self.trials if t.complete and t.epsilon is not None]
        if not ended:
            return ()
        robust = all(t.robustness is not None for t in ended)
        points: list[Any] = [
            (t.epsilon, t.value, t.robustness) if robust else (t.epsilon, t.value) for t in ended
        ]
        return tuple(ended[index] for index in pareto_front(points))

    @cached_property
    def selection(self) -> SelectionCost:
        """What selecting the best of these runs costs."""
        from clipless.sweeps.selection._assessment import assess_selection

        return assess_selection(self)

    def best_config(self) -> dict[str, Any] | None:
        """Return the configuration of the best run, at full scale: for `clipless train`."""
        return None if self.best is None else self.config_of(self.best)

    def config_of(self, trial: TrialRecord) -> dict[str, Any]:
        """Return the nested settings of a run, at full scale."""
        return merge_config_layers(self.sweep.base, nested(trial.settings))

    def table(self) -> Table:
        """Return the runs as a `rich` table, those of the front marked."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        front = {trial.slot for trial in self.front}
        names = list(dict.fromkeys(name for trial in self.trials for name in trial.settings))
        table = Table(title="Runs", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in ("run", "state", self.sweep.metric, "certified", "epsilon", "front"):
            table.add_column(Text(heading), overflow="fold")
        for name in names:
            short = name.partition(".")[2] if "name" not in name else name
            table.add_column(Text(short), overflow="fold")  # broken on narrow screens, never cut
        for trial in sorted(self.trials, key=lambda each: -(each.value or float("-inf"))):
            numbers = (trial.value, trial.robustness, trial.epsilon)
            table.add_row(
                str(trial.slot),
                trial.state,
                *("" if number is None else f"{number:.4g}" for number in numbers),
                "*" if trial.slot in front else "",
                *(Text(_shown(trial.settings.get(name))) for name in names),
            )
        return table

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        best = self.best
        return {
            "sweep": self.sweep.to_dict(),
            "finished": self.finished,
            "selection": self.selection.to_dict(),
            "best": None if best is None else best.slot,
            "front": [trial.slot for trial in self.front],
            "trials": [trial.to_dict() for trial in self.trials],
        }


def place_of(folder: Path, slot: int) -> Path:
    """Return the folder of a run of a sweep."""
    return folder / "trials" / f"{slot:05d}"


def _record(slot: int, attempts: list[optuna.trial.FrozenTrial], folder: Path) -> TrialRecord:
    """What the last attempt at a slot came to."""
    if not attempts:
        return TrialRecord(slot=slot, state="waiting", settings={})
    trial = max(attempts, key=lambda each: each.number)
    known = trial.user_attrs
    outcome = known.get(OUTCOME, {})
    history = outcome.get("history", known.get(SPENT))
    return TrialRecord(
        slot=slot,
        state=_STATES[trial.state],
        settings=known.get(SETTINGS, {}),
        **{
            name: outcome.get(name)
            for name in ("value", "epsilon", "delta", "robustness", "steps", "seconds")
        },
        metrics=outcome.get("metrics", {}),
        points=tuple((epoch, value, spent) for epoch, value, spent in known.get(POINTS, ())),
        history=None if history is None else [(each, count) for each, count in history],
        lost_attempts=int(known.get(LOST, 0)),
        attempts=sum(each.state != optuna.trial.TrialState.WAITING for each in attempts),
        folder=str(place) if (place := place_of(folder, slot)).exists() else None,
        error=known.get(ERROR),
    )


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
