"""Results of audits of epsilon."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """A lower bound on epsilon that holds with the stated confidence, beside the claim.

    If training were (epsilon, delta)-differentially private with an epsilon below `lower_bound`,
    an audit would have gone as well as it did with probability at most `1 - confidence`.
    A bound below the claim proves nothing: a better attack may exist.
    """

    lower_bound: float
    confidence: float
    delta: float
    claimed_epsilon: float | None
    """What training claims at the same delta; None if nothing was said."""

    @property
    def proved(self) -> str:
        """One line: what an attacker could prove, beside what is promised."""
        promised = "nothing" if self.claimed_epsilon is None else f"{self.claimed_epsilon:.3g}"
        return f"epsilon an attacker could prove: {self.lower_bound:.3g}; promised: {promised}"

    @property
    def exposed(self) -> bool:
        """Whether the audit contradicts the claim."""
        return self.claimed_epsilon is not None and self.lower_bound > self.claimed_epsilon

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON holds; a number that is infinite becomes None."""
        fields = {**asdict(self), "kind": type(self).__name__, "exposed": self.exposed}
        return {
            name: None if isinstance(value, float) and math.isinf(value) else value
            for name, value in fields.items()
        }

    def __str__(self) -> str:
        text = (
            f"{self._evidence()}: epsilon >= {self.lower_bound:.3f} at {self.confidence:.0%} "
            f"confidence, delta {self.delta:g}"
        )
        if self.claimed_epsilon is None:
            return text
        verdict = "CONTRADICTED" if self.exposed else "not contradicted"
        return f"{text}. Claimed {self.claimed_epsilon:.3f}: {verdict}"

    def _evidence(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class OneRunResult(AuditResult):
    """The outcome of one training run with canaries."""

    canaries: int
    included: int
    guesses_in: int
    guesses_out: int
    correct: int
    choices: int
    """How many numbers of guesses were tried; the confidence is corrected for it."""
    p_value: float | None
    """At most how likely as many right guesses are if the claim is true."""

    def _evidence(self) -> str:
        guesses = self.guesses_in + self.guesses_out
        return f"one run, {self.canaries} canaries, {self.correct} of {guesses} guesses right"


@dataclass(frozen=True, kw_only=True)
class CurveResult(AuditResult):
    """The outcome of one training run with canaries, held against its whole trade-off curve."""

    canaries: int
    included: int
    noise_factor: float | None
    """Runs with at least so many times the claimed noise are ruled out; None if none are."""
    independent: bool
    """Whether canaries were taken for independent trials."""
    contradicted: bool
    """Whether the trade-off function that the run claims is ruled out itself."""

    @property
    def exposed(self) -> bool:
        """Whether the audit contradicts the claim."""
        return self.contradicted

    def _evidence(self) -> str:
        kind = "independent canaries" if self.independent else "canaries"
        if self.noise_factor is None:
            return f"one run, {self.canaries} {kind}, whole curve, nothing found"
        return (
            f"one run, {self.canaries} {kind}, whole curve, as if noise were less than "
            f"{self.noise_factor:.3g} times what is claimed"
        )


@dataclass(frozen=True, kw_only=True)
class RepeatedResult(AuditResult):
    """The outcome of many runs on two neighbouring data sets."""

    runs: int
    """Runs on which the bound rests, both data sets together; as many chose the threshold."""
    true_positive_rate: float
    true_positive_rate_low: float
    false_positive_rate: float
    false_positive_rate_high: float

    def _evidence(self) -> str:
        return (
            f"{self.runs} runs, true positive rate {self.true_positive_rate:.3f} (at least "
            f"{self.true_positive_rate_low:.3f}), false positive rate "
            f"{self.false_positive_rate:.3f} (at most {self.false_positive_rate_high:.3f})"
        )
