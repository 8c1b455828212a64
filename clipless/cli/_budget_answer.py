"""Answers of `clipless budget`: the cost of steps, computed or read from a run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from clipless import privacy
from clipless.accounting import Accountant, Sampling
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
            "meaning": {**summary(self.epsilon, self.delta), "words": self.words()},
        }

    def claim(self) -> Text:
        """Return the guarantee in two lines."""
        mechanism = self.mechanism
        return Text.assemble(
            (f"({self.epsilon:.4g}, {self.delta:g})-differential privacy", "bold"),
            f" for {self.steps} steps with noise multiplier ",
            (f"{mechanism.noise_multiplier:.5g}", "bold"),
            f".\n{describe_sampling(mechanism.sampling)}; neighbours by "
            f"{RELATIONS[mechanism.relation]} ({mechanism.relation}). Accountant: "
            f"{describe_accountant(self.accountant)}.",
        )

    def words(self) -> str:
        """Return what the guarantee means."""
        replaced = self.mechanism.relation is privacy.Relation.REPLACE_ONE
        return meaning(self.epsilon, self.delta, replaced=replaced)


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
    steps = counts.pop(plan.mechanism, 0)
    return Answer(
        mechanism=plan.mechanism,
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
    return count
