"""The cost of selecting the best run of a given sweep, or why there is no number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clipless.accounting import History, merge_releases
from clipless.common import not_set_error
from clipless.errors import PrivacyError
from clipless.privacy import Mechanism
from clipless.sweeps._records import PlainHistory, TrialRecord
from clipless.sweeps._training import spent_in
from clipless.sweeps.selection._cost import (
    SelectionCost,
    composition_epsilon,
    most_epsilon,
    selection_epsilon,
)

if TYPE_CHECKING:
    from clipless.sweeps._result import SweepResult


def assess_selection(result: SweepResult) -> SelectionCost:
    """Return what selecting the best run costs, or why no number can be given."""
    deltas = [trial.delta for trial in result.trials if trial.delta is not None]
    delta = min(deltas, default=None)
    composition, together = _composition(result, delta)
    statement, epsilon = _selection(result, delta)
    return SelectionCost(
        statement=statement,
        epsilon=epsilon,
        composition=composition,
        composition_statement=together,
        delta=delta,
    )


def _selection(result: SweepResult, delta: float | None) -> tuple[str, float | None]:
    sweep, best = result.sweep, result.best
    if sweep.public_data:
        return "free: the training data were declared public", None
    if sweep.repetitions is not None:
        return _repeated(result, delta)
    if len(result.trials) == 1 and best is not None and best.lost_attempts == 0:
        return "covered: there was one run and nothing to select", best.epsilon
    if sweep.sampler != "random":
        return (
            f"not covered: the {sweep.sampler} sampler chooses runs by the scores of earlier ones, "
            "for which no bound but composition is known",
            None,
        )
    if sweep.pruner != "none":
        return "not covered: pruning compares private runs with each other", None
    return (
        "not covered: the number of runs was fixed; drawn at random (repetitions), it would be",
        None,
    )


def _repeated(result: SweepResult, delta: float | None) -> tuple[str, float | None]:
    repetitions = result.sweep.repetitions
    if repetitions is None:
        raise not_set_error("repetitions")
    if not result.finished:
        return "not covered: some of the runs that were drawn are not done", None
    if not result.declared:
        return "not covered: what a run may release was not declared", None
    if not result.trials:
        return (
            "covered: no run was drawn, and there is nothing to show; to draw again is another "
            "selection, with its own cost",
            None,
        )
    if delta is None:
        return "not covered: no run has been completed", None
    declared = [_history(each) for each in result.declared]
    for trial in result.trials:
        spent = _spent(trial)
        if spent is None:
            return f"not covered: run {trial.slot} left no account of what it released", None
        if not any(_within(spent, each) for each in declared):
            return (
                f"not covered: run {trial.slot} released more than was declared for any run",
                None,
            )
    try:
        epsilon = selection_epsilon(declared, delta=delta, repetitions=repetitions)
    except PrivacyError as error:
        return f"not covered: {error}", None
    return (
        f"covered: independent runs, their number drawn from the {repetitions.describe()}; holds "
        "if the best run is all that is shown, and neither the others nor how many there were",
        epsilon,
    )


def _composition(result: SweepResult, delta: float | None) -> tuple[float | None, str]:
    histories: list[History] = []
    for trial in result.trials:
        spent = _spent(trial)
        if spent is None:
            return None, f"not known: run {trial.slot} left no account of what it released"
        histories += [spent] * (1 + trial.lost_attempts)
    if delta is None:
        return None, "not known: no run has been completed"
    if result.sweep.looks_at_scores and len(result.trials) > 1:
        return _chosen_by_scores(result, histories, delta)
    try:
        found = composition_epsilon(histories, delta=delta)
    except PrivacyError as error:
        return None, f"not known: {error}"
    return found, "all runs together, whatever was shown of them"


def _chosen_by_scores(
    result: SweepResult, histories: Sequence[History], delta: float
) -> tuple[float | None, str]:
    """Every run counts as the most that was declared: scores chose its settings or its end."""
    if not result.declared:
        return None, (
            "not known: scores chose what later runs released, and the most that a run may "
            "release was not declared. Give lists instead of ranges for what decides on it "
            "(batch size, steps, epsilon), or search at random without pruning"
        )
    declared = [_history(each) for each in result.declared]
    if not all(any(_within(spent, each) for each in declared) for spent in histories):
        return None, "not known: a run released more than was declared for any run"
    try:
        found = most_epsilon(declared, runs=len(histories), delta=delta)
    except PrivacyError as error:
        return None, f"not known: {error}"
    return found, (
        "all runs together, each at the most that it may release: scores chose settings or ends"
    )


def _spent(trial: TrialRecord) -> History | None:
    """What a run released: by what it handed back, else by its ledger if that is here."""
    found = trial.history
    if found is None and trial.folder is not None:
        found = spent_in(Path(trial.folder))
    if found is None:
        # One that waits for its first attempt has released nothing; of any other, who knows.
        return [] if trial.state == "waiting" and trial.attempts == 0 else None
    return _history(found)


def _history(plain: PlainHistory) -> History:
    return [(Mechanism.from_dict(mechanism), count) for mechanism, count in plain]


def _within(spent: History, declared: History) -> bool:
    """Whether nothing was released more often than declared."""
    allowed: Counter[Mechanism] = Counter(dict(merge_releases(declared)))
    return all(count <= allowed[mechanism] for mechanism, count in merge_releases(spent))
