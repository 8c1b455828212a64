"""`clipless budget`: what epsilon costs, and what it means."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from clipless.cli._options import Debug, Json
from clipless.cli._output import emit, note, working
from clipless.common import not_set_error
from clipless.runs import ConfigError


class SamplingKind(StrEnum):
    """How batches are drawn."""

    POISSON = "poisson"
    FIXED_SIZE = "fixed_size"
    FULL_BATCH = "full_batch"
    EPOCHS = "epochs"


class AccountantKind(StrEnum):
    """The accountants."""

    PLD = "pld"
    RDP = "rdp"


def budget(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="A run folder: what it has spent.")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="The budget.")] = None,
    delta: Annotated[float | None, typer.Option(help="By default 0.1/N, rounded down.")] = None,
    examples: Annotated[int | None, typer.Option(help="How many training examples, N.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples in a batch, on average.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps, instead of epochs.")] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise over sensitivity of one step.")
    ] = None,
    sampling: Annotated[
        SamplingKind, typer.Option(help="How batches are drawn.")
    ] = SamplingKind.POISSON,
    accountant: Annotated[
        AccountantKind, typer.Option(help="Who computes epsilon.")
    ] = AccountantKind.PLD,
    max_attack_accuracy: Annotated[
        float | None,
        typer.Option(help="Instead of --epsilon: how often an attack may be right, e.g. 0.6."),
    ] = None,
    base_rate: Annotated[
        float, typer.Option(help="The share of members among those whom that attack asks about.")
    ] = 0.5,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw epsilon over steps, and the trade-off, into a .png, .svg or .pdf."),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what a budget costs: noise for an epsilon, epsilon for a noise, or steps for both.

    clipless budget --epsilon 3 --examples 60000 --batch-size 4096 --steps 450
    clipless budget --noise-multiplier 1.1 --examples 60000 --batch-size 600 --epochs 20
    clipless budget --epsilon 1 --noise-multiplier 2 --examples 60000 --batch-size 600
    clipless budget --max-attack-accuracy 0.6 --examples 60000 --batch-size 600 --epochs 20
    clipless budget runs/mnist
    """
    numbers = (epsilon, delta, examples, batch_size, epochs, steps, noise_multiplier,
               max_attack_accuracy)  # fmt: skip
    if run is not None and any(value is not None for value in numbers):
        raise ConfigError("a run folder has its own numbers: give a folder, or numbers")
    if run is None:
        _check_risk(max_attack_accuracy, base_rate, epsilon)
        _check(
            max_attack_accuracy or epsilon,
            noise_multiplier,
            epochs,
            steps,
            examples,
            batch_size,
            sampling,
        )
    from clipless.cli._budget_answer import answer_of_numbers, answer_of_run
    from clipless.cli._epsilon_curve import chart, draw

    with working("asking the accountant"):
        if run is not None:
            answer = answer_of_run(run)
        else:
            if examples is None:
                raise not_set_error("examples")
            answer = answer_of_numbers(
                epsilon=epsilon,
                delta=delta,
                noise_multiplier=noise_multiplier,
                epochs=epochs,
                steps=steps,
                examples=examples,
                batch_size=batch_size or examples,
                sampling=sampling.value,
                accountant=accountant.value,
                max_attack_accuracy=max_attack_accuracy,
                base_rate=base_rate,
            )
        curve = answer.curve()
    if plot is not None:
        title = f"noise multiplier {answer.mechanism.noise_multiplier:.4g}"
        draw(curve, plot, delta=answer.delta, title=title, trade_off=answer.trade_off)
        note(f"drawn: {plot}")
    points = [{"steps": count, "epsilon": cost} for count, cost in curve]
    fields = {**answer.to_dict(), "curve": points}
    emit(fields, answer.claim(), chart(curve), answer.words(), answer.risk(), json=json)


def _check_risk(accuracy: float | None, base_rate: float, epsilon: float | None) -> None:
    """Refuse risks that blind guesses already run, and two budgets at once."""
    if accuracy is None:
        return
    if epsilon is not None:
        raise ConfigError("give --epsilon or --max-attack-accuracy, not both")
    if not 0 < base_rate < 1:
        raise ConfigError(f"--base-rate must lie between 0 and 1, got {base_rate}")
    blind = max(base_rate, 1 - base_rate)
    if not blind < accuracy < 1:
        raise ConfigError(
            f"--max-attack-accuracy must lie between {blind:g}, which blind guesses reach, and 1, "
            f"got {accuracy}"
        )


def _check(
    epsilon: float | None, noise: float | None, epochs: float | None, steps: int | None,
    examples: int | None, batch_size: int | None, sampling: str,
) -> None:  # fmt: skip
    """Refuse what has no answer, before anything heavy is loaded."""
    if epochs is not None and steps is not None:
        raise ConfigError("give --epochs or --steps, not both")
    missing = (epsilon is None) + (noise is None) + (epochs is None and steps is None)
    if missing != 1:
        raise ConfigError(
            "give two of the three, and the third is found: --epsilon, --noise-multiplier, and "
            "how long (--steps or --epochs); or a run folder"
        )
    if examples is None or (batch_size is None and sampling != "full_batch"):
        raise ConfigError("say how many --examples there are, and the --batch-size")
    for name, value in (("epsilon", epsilon), ("noise-multiplier", noise), ("examples", examples)):
        if value is not None and not value > 0:
            raise ConfigError(f"--{name} must be above 0, got {value}")
