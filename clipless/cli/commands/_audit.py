"""`clipless audit`: attacks on what a run claims."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from clipless.cli._epsilon_meaning import membership_limit
from clipless.cli._exits import CheckFailedError
from clipless.cli._options import Debug, Json, Root, RunArgument, require_run
from clipless.cli._output import emit, note, working
from clipless.folders import RunFile, RunFolder
from clipless.runs import ConfigError

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from clipless.audit import AttackResult, MembershipResult, ReplayResult
    from clipless.cli._replay_run import Replays
    from clipless.runs import Run, RunData


def audit(
    run: RunArgument,
    examples: Annotated[
        int, typer.Option(help="At most so many members, and others; drawn at random.")
    ] = 10_000,
    confidence: Annotated[float, typer.Option(help="Of intervals and bounds.")] = 0.95,
    bounds: Annotated[
        bool, typer.Option(help="Search for gradients larger than their bounds.")
    ] = True,
    restarts: Annotated[int, typer.Option(help="Starts of that search, a parameter.")] = 2,
    attack_steps: Annotated[int, typer.Option(help="Steps of that search.")] = 30,
    canaries: Annotated[
        int | None, typer.Option(help="Train anew with so many canaries, and bound epsilon.")
    ] = None,
    canary_steps: Annotated[
        int | None, typer.Option(help="Steps of that training; by default those of the run.")
    ] = None,
    replay: Annotated[
        int | None, typer.Option(help="Replay a short training with so many records changed.")
    ] = None,
    replay_steps: Annotated[int, typer.Option(help="Steps of that training.")] = 5,
    root: Root = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Attack a run: who was in the data, are the bounds right, does the claimed epsilon hold?

    Membership inference tells training examples from test examples by the model's outputs. The
    search for large gradients tries inputs, labels and weights. With --canaries, a model is trained
    anew with the settings of the run, on canaries and as many test examples (which are public): how
    many canaries are found bounds epsilon from below. With --replay, a short training by the
    settings of the run is recorded on its data, and replayed with the same noisy results on
    neighbours, in which one record is emptied or replaced: no query may move by more than its
    sensitivity, and nothing else that is public may move at all. Everything is kept as audit.json
    in the run folder; it describes private examples, and is not covered by the guarantee. If an
    attack contradicts what is claimed, the exit code is 1.

        clipless audit runs/mnist --canaries 500
    """
    if not 0 < confidence < 1 or examples < 8:
        raise ConfigError("--confidence must lie between 0 and 1, and --examples be at least 8")
    if canaries is not None and canaries < 2:
        raise ConfigError(f"--canaries must be at least 2, got {canaries}")
    if replay is not None and (replay < 1 or replay_steps < 1):
        raise ConfigError("--replay and --replay-steps must be at least 1")
    require_run(run)
    from rich.text import Text

    from clipless.runs import open_run

    opened = open_run(run)
    if canaries is not None and opened.kind != "network":
        raise ConfigError(
            f"runs of the model {opened.kind} follow a rule and cannot be trained anew with "
            "canaries: leave --canaries out"
        )
    data = opened.data(root=root)
    with working("asking who was in the data"):
        membership = _membership(opened, data, examples, confidence)
        limit = membership_limit(
            opened.epsilon(),
            opened.plan.delta,
            replaced=opened.plan.relation.value == "replace_one",
        )
    fields: dict[str, Any] = {"membership": {**membership.to_dict(), "advantage_limit": limit}}
    shown: list[Any] = [
        _membership_table(membership),
        f"{membership.members} members, {membership.non_members} others. Guessing has an AUROC of "
        f"0.5; the guarantee allows an advantage of at most {limit:.3f}. Last column: members "
        "found if 1% of the others are accused.",
    ]
    against = [
        f"the {each.name} attack has an advantage of at least {each.advantage.low:.3f}, more than "
        f"the guarantee allows ({limit:.3f})"
        for each in membership.attacks
        if each.advantage.low > limit
    ]
    if bounds:
        with working("searching for large gradients"):
            found = _attack_bounds(opened, data, restarts, attack_steps)
        fields["bounds"] = {"found": found.found, "bounds": found.bounds, "ratios": found.ratios}
        shown += [Text("\nLargest gradients found, over their bounds", "bold")]
        shown += [f"{name:<24} {ratio:.4f}" for name, ratio in found.ratios.items()]
        against += [
            f"a gradient of {name} is {ratio:.4g} times its bound"
            for name, ratio in found.violations().items()
        ]
    if canaries is not None:
        from clipless.cli._canary_run import canary_audit

        result = canary_audit(opened, data, canaries, canary_steps, confidence)
        fields["canaries"] = {
            **result.to_dict(),
            "proved": result.proved,
            "trained_on": "test examples and canaries",
        }
        shown += [Text("\nCanaries", "bold"), f"{result}.", Text(result.proved, "bold")]
        against += [f"the canaries contradict epsilon {result.claimed_epsilon:.3g}"] * (
            result.exposed
        )
    if replay is not None:
        from clipless.cli._replay_run import replay_run

        with working("replaying a short training"):
            replays = replay_run(opened, data, records=replay, steps=replay_steps)
        fields["replay"] = {name: each.to_dict() for name, each in replays}
        shown += ["", _replay_table(replays)]
        shown += [f"{name}: {each.differences[0]}" for name, each in replays if each.differences]
        against += [f"with {name}, {_why(each)}" for name, each in replays if not each.passed]
    path = RunFolder(opened.folder).write_json(RunFile.AUDIT, {**fields, "exposed": against})
    emit({**fields, "exposed": against}, *shown, json=json)
    note(f"kept: {path}; clipless report {run} puts it on the page")
    if against:
        raise CheckFailedError(f"The audit speaks against the claim: {'; '.join(against)}.")


def draw_rows(data: tuple[Tensor, Tensor], count: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Return so many rows of inputs and targets, or all, drawn at random without replacement."""
    import torch

    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(seed))[:count]
    return data[0][order], data[1][order]


def _membership(run: Run, data: RunData, examples: int, confidence: float) -> MembershipResult:
    from clipless.audit import membership_inference

    (x, y), (x_other, y_other) = run.tensors(data.train), run.tensors(data.test)
    # Drawn at random: the first rows of a file may be of another kind than the rest.
    return membership_inference(
        run.model,
        draw_rows((x, y), examples, seed=0),
        draw_rows((x_other, y_other), examples, seed=1),
        loss=run.criterion,
        confidence=confidence,
    )


def _membership_table(result: MembershipResult) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title="Membership inference", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for heading in ("attack", "AUROC", "advantage", "found at 1%"):
        table.add_column(heading)
    for each in result.attacks:
        low = next(rate for rate in each.low_rates if rate.aimed_at == 0.01)
        numbers = str(each.auroc), str(each.advantage), f"{low.true_positive_rate.value:.2%}"
        table.add_row(each.name, *numbers)
    return table


def _replay_table(replays: Replays) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title="Replays", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("neighbour", "queries", "largest move", "other differences"):
        table.add_column(heading)
    for name, each in replays:
        largest = max(each.largest.values(), default=0.0)
        numbers = str(len(each.queries)), f"{largest:.4g}", str(len(each.differences))
        table.add_row(name, *numbers)
    return table


def _why(result: ReplayResult) -> str:
    """What speaks against a run in one replay, in a few words."""
    if result.violations:
        worst = max(result.violations, key=lambda query: query.ratio)
        return f"{worst.name} moved by {worst.ratio:.3g} times what is declared"
    return f"{len(result.differences)} public thing(s) differ"


def _attack_bounds(run: Run, data: RunData, restarts: int, steps: int) -> AttackResult:
    from clipless.audit import attack_bounds, class_labels, gaussian_targets
    from clipless.losses import Huber

    _, targets = run.tensors((data.test[0][:8], data.test[1][:8]))
    if isinstance(run.criterion, Huber):
        draw = gaussian_targets(*targets.shape[1:])
    else:
        draw = class_labels(2 if targets.is_floating_point() else _outputs(run))
    return attack_bounds(
        run.model, loss=run.criterion, input_shape=run.input_shape, targets=draw,
        restarts=restarts, steps=steps,
    )  # fmt: skip


def _outputs(run: Run) -> int:
    """How many logits the model has."""
    import torch

    with torch.no_grad():
        return int(run.model(torch.zeros(1, *run.input_shape)).shape[-1])
