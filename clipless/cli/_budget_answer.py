"""Answers of `clipless budget`: the cost of steps, computed or read from a run folder."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.text import Text

from clipless import privacy
from clipless.accounting import (
    Accountant,
    Sampling,
    TradeOff,
    noise_multiplier_for_accuracy,
    steps_paid_together,
    trade_off,
)
from clipless.cli._epsilon_meaning import meaning, summary
from clipless.common import not_set_error
from clipless.errors import BudgetExhaustedError
from clipless.folders import RunFile, RunFolder, RunFolderError
from clipless.privacy import (
    RELATIONS,
    Mechanism,
    describe_accountant,
    describe_sampling,
    named_sampling,
    relation_for,
    steps_of_one_pass,
    validate_sampling,
)
from clipless.runs import ConfigError

_POINTS = 10


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Releases of one mechanism, and what they cost on top of what was spent before."""

    mechanism: Mechanism
    steps: int
    epsilon: float
    delta: float
    accountant: Accountant
    asked_for: str
    history: tuple[tuple[Mechanism, int], ...] = ()

    def curve(self) -> list[tuple[int, float]]:
        """Return epsilon after several numbers of steps, the last one included."""
        counts = sorted({max(1, round(self.steps * k / _POINTS)) for k in range(1, _POINTS + 1)})
        found = privacy.epsilon_curve(
            mechanism=self.mechanism,
            steps=counts if self.steps else [],
            delta=self.delta,
            history=self.history,
            accountant=self.accountant,
        )
        return list(zip(counts, found, strict=False))

    @cached_property
    def trade_off(self) -> TradeOff:
        """What attacks can reach at most, after all steps."""
        return trade_off((*self.history, (self.mechanism, self.steps)), accountant=self.accountant)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        mechanism = self.mechanism.to_dict()
        return {
            "asked_for": self.asked_for,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "steps": self.steps,
            **mechanism,
            "accountant": self.accountant,
            "trade_off": self.trade_off.to_dict(tail=self.delta),
            "meaning": {**summary(self.epsilon, self.delta), "words": self.words()},
        }

    @property
    def unit(self) -> str:
        """Return what is counted: steps, or the passes that epochs are paid for by."""
        return "steps" if steps_paid_together(self.mechanism.sampling) == 1 else "passes"

    def claim(self) -> Text:
        """Return the guarantee in two lines."""
        mechanism = self.mechanism
        return Text.assemble(
            (f"({self.epsilon:.4g}, {self.delta:g})-differential privacy", "bold"),
            f" for {self.steps} {self.unit} with noise multiplier ",
            (f"{mechanism.noise_multiplier:.5g}", "bold"),
            f".\n{describe_sampling(mechanism.sampling)}; neighbours by "
            f"{RELATIONS[mechanism.relation]} ({mechanism.relation}). Accountant: "
            f"{describe_accountant(self.accountant)}.",
        )

    def risk(self) -> str:
        """Return what the whole curve says, of which (epsilon, delta) is one point."""
        curve = self.trade_off
        replaced = self.mechanism.relation is privacy.Relation.REPLACE_ONE
        question = "which of two examples was used" if replaced else "whether an example was used"
        mu = curve.gaussian_fit(tail=self.delta)
        fit = f"Covered by a Gaussian of mu {mu:.3g}. " if math.isfinite(mu) else ""
        right, ahead = _upper(curve.attack_accuracy()), _upper(curve.advantage)
        return (
            f"By the whole curve: whoever has to say {question}, knowing all the others, is right "
            f"at most {right} of the time (coin flips: 50%), an advantage of {ahead}; a secret "
            "that is guessed blindly 1% of the time is guessed at most "
            f"{_upper(curve.attack_success(0.01))} of the time. {fit}"
        ).rstrip()

    def words(self) -> str:
        """Return what the guarantee means."""
        replaced = self.mechanism.relation is privacy.Relation.REPLACE_ONE
        return meaning(self.epsilon, self.delta, replaced=replaced)


def _upper(share: float) -> str:
    return f"{math.ceil(1000 * share - 1e-9) / 10:.1f}%"


def answer_of_numbers(
    *,
    epsilon: float | None,
    delta: float | None,
    noise_multiplier: float | None,
    epochs: float | None,
    steps: int | None,
    examples: int,
    batch_size: int,
    sampling: str,
    accountant: Accountant,
    max_attack_accuracy: float | None = None,
    base_rate: float = 0.5,
) -> Answer:
    """Find the one of noise, epsilon and steps that is not given."""
    drawn = _sampling(sampling, examples, batch_size)
    relation = relation_for(None, drawn)
    count = _steps(epochs, steps, drawn)
    asked = "noise_multiplier" if noise_multiplier is None else "epsilon"
    try:
        chosen = privacy.chosen_delta(
            None if delta is None else privacy.LargeDelta(delta), examples
        )
        if max_attack_accuracy is not None and count is not None:
            noise_multiplier = noise_multiplier_for_accuracy(
                max_attack_accuracy=max_attack_accuracy,
                base_rate=base_rate,
                steps=count,
                sampling=drawn,
                relation=relation,
                accountant=accountant,
            )
        if noise_multiplier is None:
            if epsilon is None:
                raise not_set_error("epsilon")
            if count is None:
                raise not_set_error("count")
            noise_multiplier = privacy.noise_multiplier_for(
                target_epsilon=epsilon,
                target_delta=chosen,
                steps=count,
                sampling=drawn,
                relation=relation,
                accountant=accountant,
            )
        mechanism = Mechanism(noise_multiplier=noise_multiplier, sampling=drawn, relation=relation)
        if count is None:
            if epsilon is None:
                raise not_set_error("epsilon")
            asked = "steps"
            count = privacy.steps_for(
                target_epsilon=epsilon,
                target_delta=chosen,
                mechanism=mechanism,
                accountant=accountant,
            )
            if count == 0:
                raise BudgetExhaustedError(
                    f"not even one step with noise multiplier {noise_multiplier:g} costs as little "
                    f"as epsilon {epsilon:g} at delta {chosen:g}"
                )
        cost = privacy.epsilon([(mechanism, count)], chosen, accountant=accountant)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return Answer(
        mechanism=mechanism,
        steps=count,
        epsilon=cost,
        delta=chosen,
        accountant=accountant,
        asked_for=asked,
    )


def answer_of_run(folder: Path) -> Answer:
    """Read what a run has spent."""
    run = RunFolder.open(folder)
    plan = run.read_plan().plan
    if not run.has(RunFile.LEDGER):
        raise RunFolderError(f"{folder} has no {RunFile.LEDGER}: what it has spent is not known")
    counts = run.read_ledger().counts()
    history = tuple(counts.items())
    cost = privacy.epsilon(history, plan.delta, accountant=plan.accountant)
    mechanism = plan.mechanism
    if plan.strategy is None:
        steps = counts.pop(mechanism, 0)
    else:
        # Passes of different costs, together what as many equal ones cost.
        passes = [each for each in counts if each.sampling == plan.sampling]
        steps = sum(counts[each] for each in passes)
        square = sum(counts.pop(each) * each.noise_multiplier**-2 for each in passes)
        if steps:
            mechanism = replace(mechanism, noise_multiplier=(square / steps) ** -0.5)
    return Answer(
        mechanism=mechanism,
        steps=steps,
        epsilon=cost,
        delta=plan.delta,
        accountant=plan.accountant,
        asked_for="spent",
        history=tuple(counts.items()),
    )


def _sampling(name: str, examples: int, batch_size: int) -> Sampling:
    if not 1 <= batch_size <= examples:
        raise ConfigError(f"--batch-size must lie between 1 and --examples, got {batch_size}")
    try:
        drawn = named_sampling(name, examples, batch_size)
    except ValueError as error:
        raise ConfigError(f"--{error}") from error
    validate_sampling(drawn)
    return drawn


def _steps(epochs: float | None, steps: int | None, sampling: Sampling) -> int | None:
    count = steps
    if epochs is not None:
        count = round(epochs * steps_of_one_pass(sampling))
    if count is not None and count < 1:
        raise ConfigError("training must last at least one step")
    return None if count is None else -(-count // steps_paid_together(sampling))
