"""`PrivacyReport`: the guarantee of a run, its assumptions, and what it does not cover."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clipless.accounting import (
    CyclicPoissonSampling,
    FixedOrder,
    FixedSizeSampling,
    PoissonSampling,
    Relation,
    Sampling,
    filter_of_name,
)
from clipless.kernels import GRID_STEPS
from clipless.privacy._precision import NO_ROUNDING
from clipless.privacy.noise._correlated_options import describe_correlation

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

    from clipless.privacy._plan import Plan

RELATIONS = {
    Relation.ZERO_OUT: "replacing one example by an empty one",
    Relation.ADD_REMOVE: "adding or removing one example",
    Relation.REPLACE_ONE: "replacing one example by another",
}


_USER_RELATIONS = {
    Relation.ZERO_OUT: "replacing all records of one user by empty ones",
    Relation.REPLACE_ONE: "replacing all records of one user by others",
}


def neighbours_in_words(plan: Plan) -> str:
    """Return what neighbouring data sets of a plan differ by.

    A ledger of an earlier version can only be about examples.
    """
    if plan.unit == "user":
        return _USER_RELATIONS.get(plan.relation, "adding or removing one user")
    return RELATIONS[plan.relation]


def guarantee_in_words(epsilon: float, delta: float) -> str:
    """Return (epsilon, delta) in words; without noise, or with an insecure seed, none."""
    if math.isinf(epsilon):
        return "not private"
    return f"({epsilon:.4g}, {delta:g})-differentially private"


@dataclass(frozen=True, kw_only=True)
class PrivacyReport:
    """The guarantee of a run so far, for people and for machines."""

    epsilon: float
    delta: float
    steps_taken: int
    releases: int
    plan: Plan
    ledger: str | None
    insecure: bool = False
    """Whether noise or samples came from a seed that somebody chose: then nothing is private."""
    notes: tuple[str, ...] = ()
    """Further caveats, of whoever used the engine."""

    @property
    def caveats(self) -> tuple[str, ...]:
        """What the guarantee does not cover, in plain words."""
        found = [
            "The number of examples, their shape, and the schedule are treated as public."
            if self.plan.unit == "example"
            else "The number of users, which records are one user's, how many they are, their "
            "shape, and the schedule are treated as public. That all records of a person have one "
            "id, and no other, is taken for granted.",
            "Losses and accuracies printed during training are not covered; neither is choosing "
            "among several runs.",
            "Noise and samples come from ChaCha20, keyed by the operating system: that its output "
            "cannot be told from chance is an assumption about computing power.",
            "Data sets and collate functions that mix examples (mixup, batch statistics, padding "
            "to the longest of a batch) cannot be noticed, augmentations that do so not always; "
            "nor can values read off the private loss, outputs or activations.",
            "Gradients that are not taken through the private criterion, of the model in "
            "evaluation mode or of a copy of it, have no noise: what is done with them is not "
            "covered.",
        ]
        leaked = self.delta * self.plan.sampling.dataset_size
        if leaked > 0.1 * (1 + 1e-9):
            found.append(
                f"delta is {self.delta:g}, {leaked:.2g}/N: that would permit publishing a randomly "
                f"chosen {self.plan.unit} with probability {min(leaked, 1):.0%}. Choose a "
                "smaller one."
            )
        if filter_of_name(self.plan.accountant) is None:
            found.append(
                "Noise, sampling rate and number of steps, of all runs in the ledger, are taken to "
                "be fixed beforehand, or chosen without looking at results. If results decided on "
                "one of them, epsilon does not cover it: declare a filter (accountant='filter'). "
                "A run that results have stopped early costs what its plan costs."
            )
        found += self.arithmetic_caveats
        if self.insecure:
            found.insert(
                0,
                "Nothing: noise or samples came from an insecure_seed, which is for tests. Whoever "
                "knows it, or guesses it, can remove the noise.",
            )
        if self.ledger is None:
            found.append("The ledger is kept in memory only: a new process would not know of it.")
        return (*found, *self.notes)

    @property
    def arithmetic_caveats(self) -> tuple[str, ...]:
        """What rounding can do that epsilon does not cover: those of the caveats."""
        found = []
        if isinstance(self.plan.sampling, PoissonSampling | CyclicPoissonSampling):
            found.append(
                "Amplification by sampling takes for granted that an example which is not drawn "
                "leaves what the others add as it was. In floating-point arithmetic it moves by "
                "rounding, as other rows meet in a sum: by 3e-5 of a bound or less where it was "
                "measured, which is not proved."
            )
        uncovered = self.plan.sums.uncovered
        if self.plan.sums == NO_ROUNDING:
            found.append("What rounding adds to sums is not stated by this plan.")
        if uncovered > 0:
            found.append(
                "Gradients of convolutions are summed in float32 on this device. In the worst case "
                f"of rounding, one example could move such a sum by {uncovered:.2g} times its "
                "bound more than the bound; epsilon does not cover it. All sums are covered on a "
                "CPU, and on a GPU with Triton."
            )
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "epsilon": None if self.insecure else self.epsilon,
            "delta": self.delta,
            "steps_taken": self.steps_taken,
            "releases": self.releases,
            "ledger": self.ledger,
            "insecure": self.insecure,
            "caveats": list(self.caveats),
            "notes": list(self.notes),
            "plan": self.plan.to_dict(),
        }

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        kept = f"({self.epsilon:.4g}, {self.delta:g})-differential privacy"
        claim = Text.assemble(
            ("not private" if math.isinf(self.epsilon) else kept, "bold"),
            f" for {neighbours_in_words(self.plan)}, after {self.releases} private releases "
            f"({self.steps_taken} steps of this process).",
        )
        return Group(
            claim,
            plan_table(self.plan),
            noise_table(self.plan),
            "Not covered:",
            *(Text(f"- {caveat}") for caveat in self.caveats),
        )

    def __str__(self) -> str:
        return render(self)


def plan_table(plan: Plan) -> Table:
    """The plan, a line for each thing that the guarantee rests on."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    target = "none" if plan.target_epsilon is None else f"epsilon {plan.target_epsilon:g}"
    rows = {
        "privacy unit": describe_unit(plan),
        "sampling": describe_sampling(plan.sampling, plan.unit),
        "neighbours": neighbours_in_words(plan),
        "accountant": describe_accountant(plan.accountant),
        "noise multiplier": f"{plan.noise_multiplier:.5g}, shared out by '{plan.noise}'",
        "budget": f"{target}, delta {plan.delta:g}",
        "planned steps": "open" if plan.steps is None else str(plan.steps),
        "loss": f"{plan.loss}, {plan.loss_lipschitz:.4g}-Lipschitz",
        "precision": plan.precision,
        "arithmetic": describe_arithmetic(plan),
        "arithmetic slack": f"{plan.arithmetic_slack:.3g} (in the sensitivities)",
    }
    if plan.strategy is not None:
        rows["correlated noise"] = describe_correlation(plan.strategy, plan.strategy_error)
    if plan.views > 1:
        rows["augmentation"] = f"{plan.views} views of every example, averaged"
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def noise_table(plan: Plan) -> Table:
    """Sensitivity and noise of every parameter."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("parameter", overflow="fold")
    for heading in ("entries", "gradient", "sensitivity", "noise std"):
        table.add_column(heading, justify="right")
    deviations, sensitivities = plan.noise_deviations, plan.sensitivities
    for parameter in plan.parameters:
        name = parameter.name
        table.add_row(
            Text(name),
            str(parameter.size),
            f"{parameter.gradient_bound:.4g}",
            f"{sensitivities[name]:.4g}",
            f"{deviations[name]:.4g}",
        )
    return table


def describe_accountant(accountant: str) -> str:
    """One line on how epsilon was computed, and for what kind of schedule it holds."""
    declared = filter_of_name(accountant)
    if declared is not None:
        return (
            f"Rényi filter of order {declared.order:g}, declared as ({declared.epsilon:g}, "
            f"{declared.delta:g}): noise, sampling and steps may follow from results"
        )
    name = {"pld": "privacy loss distributions (pld)", "rdp": "Rényi divergences (rdp)"}
    return f"{name.get(accountant, accountant)}, noise, sampling and steps fixed beforehand"


def describe_arithmetic(plan: Plan) -> str:
    """One line on which arithmetic epsilon holds for: the program's own, or that of real numbers.

    A plan of an earlier version does not say what its sums round.
    """
    if plan.sums.slack == 0 and plan.sums.uncovered == 0:
        return "real numbers: this plan does not state what rounding adds to sums"
    holds_for = f"this program's own: sums round by {plan.sums.slack:.2g} of a bound at most"
    if plan.sums.uncovered > 0:
        times = 1 + plan.sums.uncovered
        holds_for = f"real numbers: in sums, one example can weigh {times:.2g} times its bound"
    return f"{holds_for}; noise: ChaCha20, grid of 2^-{GRID_STEPS.bit_length() - 1} deviations"


def describe_unit(plan: Plan) -> str:
    """One line on who is protected, and by how many records they take part in a step."""
    if plan.user_records is None:
        return "one example"
    each = "one record" if plan.user_records == 1 else f"at most {plan.user_records} records"
    return f"one user with all records; a step takes the average of {each} of each user"


def describe_sampling(sampling: Sampling, unit: str = "example") -> str:
    """One line on how batches are drawn."""
    size, batch = sampling.dataset_size, sampling.expected_batch_size
    whom = "" if unit == "example" else f" {unit}s"
    if isinstance(sampling, PoissonSampling):
        cut = "" if sampling.max_batch_size is None else f", cut at {sampling.max_batch_size}"
        return f"Poisson, {batch:g} of {size}{whom} expected (rate {sampling.rate:.4g}){cut}"
    if isinstance(sampling, CyclicPoissonSampling):
        return (
            f"Poisson, {batch:g} of {size}{whom} expected, from one of {sampling.groups} groups "
            f"in turn (rate {sampling.round.rate:.4g} of a group)"
        )
    if isinstance(sampling, FixedSizeSampling):
        return f"{batch:g} of {size}{whom} without replacement, anew for every step"
    if isinstance(sampling, FixedOrder):
        left = " (what is left over is not used)" if sampling.drop_last else ""
        return f"{batch:g} of {size} in one order, {sampling.steps_per_pass} steps a pass{left}"
    return f"all {size} {unit}s in every step"


def render(renderable: RenderableType) -> str:
    """Return what a terminal of 100 columns would show."""
    from rich.console import Console

    buffer = io.StringIO()
    Console(file=buffer, width=100).print(renderable)
    return buffer.getvalue()
