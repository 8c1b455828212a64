"""Consistency checks of a report: ledger, plan, checkpoint and metrics compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from clipless.accounting import filter_of_name
from clipless.errors import LedgerError
from clipless.folders import CheckpointFacts
from clipless.ledger import LedgerText, parse_ledger
from clipless.privacy import Plan
from clipless.report._format import relation_words, upper
from clipless.report._timeline import Timeline
from clipless.report.sections._spending import Spending

_SMALL = 1e-9

State = Literal["passed", "note", "failed"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison: what was compared, how it came out, and the figures.

    If one fails that `voids`, no guarantee is stated at all. What a `private` one found out comes
    from private data without noise.
    """

    name: str
    state: State
    detail: str
    voids: bool = True
    private: bool = False

    @property
    def failed(self) -> bool:
        """Whether it speaks against the figures of the report."""
        return self.state == "failed"


def checks(
    found: Timeline, spent: Spending, plan: Plan, *, dataset_size: int, relation: str
) -> list[Check]:
    """Compare the ledger with the plan."""
    done = [_same_data(plan, dataset_size, relation), _same_steps(found, plan)]
    if spent.target_epsilon is not None:
        within = spent.epsilon <= spent.target_epsilon * (1 + _SMALL)
        done.append(
            Check(
                name="The budget is kept",
                state="passed" if within else "failed",
                detail=f"epsilon {upper(spent.epsilon)} of {spent.target_epsilon:g} is spent.",
                voids=False,  # too much was spent, but what was spent is known
            )
        )
    return done


def _same_data(plan: Plan, dataset_size: int, relation: str) -> Check:
    same = (plan.sampling.dataset_size, plan.relation.value) == (dataset_size, relation)
    there, here = relation_words(relation), relation_words(plan.relation)
    return Check(
        name="Ledger and plan are about the same data",
        state="passed" if same else "failed",
        detail=f"{dataset_size} examples; neighbours differ by {there}"
        + ("." if same else f" in the ledger; {plan.sampling.dataset_size}, {here} in the "
           "plan. The ledger belongs to another run."),
    )  # fmt: skip


def _same_steps(found: Timeline, plan: Plan) -> Check:
    """Every step that counts is one of the plan; other noise is accounted for, but named."""
    name = "The steps are those of the plan"
    steps = [block for block in found.blocks if block.is_step]
    schedule = plan.schedule
    expected = schedule.planned(plan.steps)
    others = [block for block in steps if block.mechanism not in expected]
    unit = "steps" if schedule.period == 1 else f"passes of {schedule.period} steps"
    if not others:
        planned = plan.epsilon(steps=found.steps * schedule.period)
        detail = (
            f"{found.steps} {unit} count, each as planned; by the plan they cost {upper(planned)}."
        )
        return Check(name=name, state="passed", detail=detail)
    count = sum(block.count for block in others)
    noise = sorted({block.mechanism.noise_multiplier for block in others})
    shown = ", ".join(f"{each:.5g}" for each in noise[:4]) + (" ..." if len(noise) > 4 else "")
    resampled = any(block.mechanism.sampling != plan.sampling for block in others)
    detail = (
        f"{count} of {found.steps} {unit} were counted "
        + ("with another sampling than planned" if resampled else "with other noise than planned")
        + f" (noise multiplier {shown}, planned {plan.noise_multiplier:.5g}). "
    )
    if resampled or count == found.steps:
        detail += "Plan and ledger do not belong together, or one of them was edited."
        return Check(name=name, state="failed", detail=detail)
    detail += "Their cost is part of epsilon; the table of layers shows the noise of the plan."
    if filter_of_name(plan.accountant) is None:
        detail += " Epsilon holds if that change was fixed beforehand: no filter was declared."
    return Check(name=name, state="note", detail=detail)


def as_said(spent: Spending, said: object) -> list[Check]:
    """Compare the epsilon that training ended with; whatever it was, the recomputed one counts."""
    if not isinstance(said, int | float):
        return []
    same = abs(said - spent.epsilon) <= 1e-6 * spent.epsilon
    return [
        Check(
            name="Training ended with the same epsilon",
            state="passed" if same else "failed",
            detail=f"result.json says {said:.6g}, the ledger {spent.epsilon:.6g}.",
            voids=False,
        )
    ]


def nothing_lost(found: Timeline, plan: Plan, steps_seen: int, where: str) -> Check:
    """Return the check that the ledger counts all steps that left other traces."""
    needed = sum(count for _, count in plan.schedule.cost(0, steps_seen))
    enough = found.steps >= needed
    passes = plan.schedule.period > 1
    detail = f"It counts {found.steps} {'passes' if passes else 'steps'}; {where} knows of "
    detail += f"{steps_seen} steps, in {needed} of them." if passes else f"{steps_seen}."
    if not enough:
        detail += " Lines are missing: the ledger was replaced by an older one, or by another."
    elif found.steps > needed:
        detail += " The rest was reserved or drawn and not used, after a crash perhaps. It counts."
    return Check(
        name="The ledger counts every step that left a trace",
        state="passed" if enough else "failed",
        detail=detail,
    )


def same_ledger(text: LedgerText, facts: CheckpointFacts) -> Check:
    """Return the check that the checkpoint's copy of the ledger is a prefix of this ledger."""
    name = "The ledger is the one that the checkpoint was saved with"
    try:
        head: Sequence[str] = parse_ledger(facts.ledger_lines, name="the copy").digests
    except LedgerError as error:
        return Check(name=name, state="failed", detail=f"The copy is damaged: {error}.")
    same = text.digests[: len(head)] == tuple(head)
    detail = (
        f"All {len(head)} lines of the copy are here."
        if same
        else "The copy says something else: one of the two was replaced. Epsilon may be higher."
    )
    return Check(name=name, state="passed" if same else "failed", detail=detail)
