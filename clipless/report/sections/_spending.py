"""What a run has spent, recomputed from its ledger and compared with its plan."""

from __future__ import annotations

from dataclasses import dataclass

from clipless.accounting import meter_accountant
from clipless.privacy import Mechanism, Plan, describe_sampling, epsilon
from clipless.report._timeline import Timeline

_POINTS = 24


@dataclass(frozen=True, kw_only=True)
class SpendingPoint:
    """The epsilon of everything released up to a training step."""

    step: int
    epsilon: float


@dataclass(frozen=True, kw_only=True)
class SpendingItem:
    """What one kind of release costs."""

    label: str
    is_step: bool
    count: int
    noise_multipliers: tuple[float, ...]
    sampling: tuple[str, ...]
    epsilon_alone: float
    """If nothing else had been released."""
    epsilon_added: float
    """How much less everything would cost without it. Costs do not add up: these sum to less."""
    share: float | None
    """The part of the total that is added."""


@dataclass(frozen=True, kw_only=True)
class Spending:
    """Everything that the ledger counts, and its cost."""

    epsilon: float
    delta: float
    accountant: str
    target_epsilon: float | None
    planned_steps: int | None
    steps: int
    releases: int
    curve: tuple[SpendingPoint, ...]
    items: tuple[SpendingItem, ...]


def spending(found: Timeline, plan: Plan) -> Spending:
    """Ask the accountant about the ledger's history; nothing is taken over from elsewhere.

    Raises `PrivacyError` if no epsilon can be stated.
    """
    cost = Cost(plan)
    total = cost(found.history())
    return Spending(
        epsilon=epsilon(found.history(), plan.delta, accountant=plan.accountant),
        delta=plan.delta,
        accountant=plan.accountant,
        target_epsilon=plan.target_epsilon,
        planned_steps=plan.steps,
        steps=found.steps * plan.schedule.period,
        releases=found.releases,
        curve=_curve(found, cost, plan.schedule.period),
        items=_items(found, cost, total),
    )


class Cost:
    """The epsilon of a history at the delta of a plan; of a filter, the part that is used."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __call__(self, history: list[tuple[Mechanism, int]]) -> float:
        """Return an upper bound; infinite for a release without noise."""
        return epsilon(
            history, self._plan.delta, accountant=meter_accountant(self._plan.accountant)
        )


def _curve(found: Timeline, cost: Cost, period: int) -> tuple[SpendingPoint, ...]:
    """Return epsilon after some of the steps, or of the passes by which they are counted."""
    total = found.steps
    count = min(total, _POINTS)
    steps = sorted({round(total * index / count) for index in range(count + 1)} if count else {0})
    return tuple(
        SpendingPoint(step=step * period, epsilon=cost(found.up_to(step))) for step in steps
    )


def _items(found: Timeline, cost: Cost, total: float) -> tuple[SpendingItem, ...]:
    kinds = dict.fromkeys((block.label, block.is_step) for block in found.blocks)
    items = []
    for label, is_step in kinds:
        own = found.labelled(label, is_step=is_step)
        added = total - cost(found.except_labelled(label, is_step=is_step))
        items.append(
            SpendingItem(
                label=label,
                is_step=is_step,
                count=sum(count for _, count in own),
                noise_multipliers=tuple(sorted({each.noise_multiplier for each, _ in own})),
                sampling=tuple(dict.fromkeys(describe_sampling(each.sampling) for each, _ in own)),
                epsilon_alone=cost(own),
                epsilon_added=added,
                share=added / total if 0 < total < float("inf") else None,
            )
        )
    return tuple(items)
