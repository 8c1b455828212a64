"""Loss, accuracy and epsilon by epoch, and the Pareto front of the epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clipless.report._timeline import Timeline
from clipless.report.sections._spending import Cost

_MOST_QUESTIONS = 64
_UTILITIES = (  # the first one that is there tells good epochs from bad ones
    ("validation_accuracy", True),
    ("validation_loss", False),
    ("accuracy", True),
    ("loss", False),
)


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """What was measured in, or after, an epoch."""

    epoch: int
    step: int
    loss: float | None
    accuracy: float | None
    validation_loss: float | None
    validation_accuracy: float | None
    epsilon: float | None
    """What the run would have cost, had it ended there; None if the ledger cannot be trusted."""
    on_front: bool = False
    """Whether no epoch is at least as good at a smaller epsilon."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The epochs of a run."""

    epochs: tuple[Epoch, ...]
    utility: str
    """The column that the front is about."""
    higher_is_better: bool


def training(
    lines: Sequence[Mapping[str, Any]], found: Timeline | None, cost: Cost
) -> Training | None:
    """Join the metrics of a run with its ledger; None if no epoch was completed."""
    by_step = {int(line["step"]): line for line in lines}  # a repeated epoch replaces itself
    steps = sorted(by_step)
    if not steps:
        return None
    costs = {} if found is None else _costs(steps, found, cost)
    epochs = tuple(
        Epoch(
            epoch=int(by_step[step]["epoch"]),
            step=step,
            loss=_number(by_step[step], "loss"),
            accuracy=_number(by_step[step], "accuracy"),
            validation_loss=_number(by_step[step], "validation_loss"),
            validation_accuracy=_number(by_step[step], "validation_accuracy"),
            epsilon=costs.get(step),
        )
        for step in steps
    )
    for name, higher in _UTILITIES:
        if any(getattr(each, name) is not None for each in epochs):
            return Training(
                epochs=mark_front(epochs, name, higher), utility=name, higher_is_better=higher
            )
    return Training(epochs=epochs, utility="loss", higher_is_better=False)


def _number(line: Mapping[str, Any], name: str) -> float | None:
    value = line.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} after step {line['step']} is {value!r}, not a number")
    return float(value)


def _costs(steps: Sequence[int], found: Timeline, cost: Cost) -> dict[int, float]:
    """What the run would have cost, had it ended after each of `steps`.

    The weights after a step depend on the steps before it alone. Of those that the ledger counts,
    the last ones are left out, as many as were to follow; whatever it counts beyond the steps that
    were taken (after a crash, say), and every statistic, stays in. With very many epochs, the
    accountant is asked about some of them, and the others get the answer of the next one, which
    is larger.
    """
    asked = set(steps[:: -max(1, math.ceil(len(steps) / _MOST_QUESTIONS))])  # the last included
    answers: dict[int, float] = {}
    latest = math.inf
    for step in reversed(steps):
        if step in asked:
            latest = cost(found.without_last(steps[-1] - step))
        answers[step] = latest
    return answers


def mark_front(epochs: Sequence[Epoch], utility: str, higher: bool) -> tuple[Epoch, ...]:
    """Mark the Pareto front: epochs that no other one matches at a smaller epsilon.

    Example:
        >>> def epoch(number, accuracy, epsilon):
        ...     return Epoch(epoch=number, step=number, loss=None, accuracy=accuracy,
        ...                  validation_loss=None, validation_accuracy=None, epsilon=epsilon)
        >>> found = mark_front([epoch(1, 0.5, 1.0), epoch(2, 0.4, 1.5), epoch(3, 0.6, 2.0)],
        ...                    "accuracy", True)
        >>> [each.on_front for each in found]
        [True, False, True]
    """
    sign = 1.0 if higher else -1.0
    best = -math.inf
    front: set[int] = set()
    ordered = sorted(
        (
            (each.epsilon, -sign * value, index)
            for index, each in enumerate(epochs)
            if each.epsilon is not None and (value := getattr(each, utility)) is not None
        ),
    )
    for _, negated, index in ordered:
        if -negated > best:
            best = -negated
            front.add(index)
    return tuple(replace(each, on_front=index in front) for index, each in enumerate(epochs))
