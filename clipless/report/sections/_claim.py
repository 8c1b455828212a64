"""The claim of a run in words: what epsilon means, what is protected, from whom, what is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from clipless.accounting import TradeOff, trade_off
from clipless.errors import PrivacyError
from clipless.folders import RunFile
from clipless.privacy import (
    Mechanism,
    Plan,
    PrivacyReport,
    Relation,
    describe_accountant,
    describe_arithmetic,
    describe_sampling,
    describe_unit,
    neighbours_in_words,
)
from clipless.report._format import number, percent_upper, upper

_FALSE_ALARMS = (0.001, 0.01, 0.1)
_LARGEST_EXPONENT = 700.0

Standing = Literal["stated", "none", "void"]


@dataclass(frozen=True, kw_only=True)
class Detection:
    """How often a test of one example is right at most, if it is wrong that often otherwise.

    Both are probabilities over training, all other examples being fixed.
    """

    false_alarms: float
    found_bound: float


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The guarantee for people: figures, and sentences to read."""

    standing: Standing
    """`stated`; `none`, for a run without noise; `void`, if something speaks against it."""
    headline: str
    epsilon: float | None
    delta: float
    relation: str
    unit: Literal["example", "user"]
    """Who is protected; `dataset_size` counts them."""
    unit_in_words: str
    replaces: bool
    """Whether neighbouring data sets differ by a replaced example."""
    sampling: str
    accountant: str
    dataset_size: int
    releases: int | None
    odds_factor: float | None
    """e^epsilon."""
    guess_bound: float | None
    """`(e^epsilon + delta) / (1 + e^epsilon)`: how often a guess can be right at most."""
    guess_bound_exact: float | None
    """The same by the whole privacy curve, of which (epsilon, delta) is one point."""
    detection: tuple[Detection, ...]
    trade_off: dict[str, Any] | None
    """The whole curve, and what attacks reach at several base rates: see `TradeOff.to_dict`."""
    meaning: tuple[str, ...]
    protected: tuple[str, ...]
    from_whom: tuple[str, ...]
    not_protected: tuple[str, ...]
    caveats: tuple[str, ...]
    """The fine print: `PrivacyReport.caveats`."""
    arithmetic: str
    """Which arithmetic epsilon holds for."""
    arithmetic_caveats: tuple[str, ...]
    """Those of the caveats that are about rounding."""


def claim(
    plan: Plan, *, epsilon: float | None, history: Sequence[tuple[Mechanism, int]],
    releases: int | None, insecure: bool = False,
) -> Claim:  # fmt: skip
    """Put the guarantee into words; `epsilon` is None if no figure can be trusted.

    `insecure` says that noise or samples came from a seed, which protects nobody.
    """
    standing: Standing = "stated"
    if epsilon is None:
        standing = "void"
    elif math.isinf(epsilon) or insecure:
        standing = "none"
    stated = epsilon if standing == "stated" else None
    curve = None if stated is None else _curve(history, plan, stated)
    factor = None if stated is None else _exponential(stated)
    guess = None if factor is None else (factor + plan.delta) / (1 + factor)
    exact = None if curve is None or guess is None else min(guess, curve.attack_accuracy())
    detection = tuple(
        Detection(false_alarms=rate, found_bound=curve.detection(rate))
        for rate in _FALSE_ALARMS
        if curve is not None
    )
    said = _report(plan, releases, insecure=insecure)
    return Claim(
        standing=standing,
        headline=_headline(standing, stated, plan, insecure=insecure),
        epsilon=stated,
        delta=plan.delta,
        relation=neighbours_in_words(plan),
        unit=plan.unit,
        unit_in_words=describe_unit(plan),
        replaces=plan.relation is Relation.REPLACE_ONE,
        sampling=describe_sampling(plan.sampling, plan.unit),
        accountant=describe_accountant(plan.accountant),
        dataset_size=plan.sampling.dataset_size,
        releases=releases,
        odds_factor=factor,
        guess_bound=guess,
        guess_bound_exact=exact,
        detection=detection,
        trade_off=None if curve is None else curve.to_dict(tail=plan.delta),
        meaning=_meaning(standing, stated, plan, factor, guess, exact),
        protected=_protected(standing, plan),
        from_whom=_from_whom(standing),
        not_protected=_not_protected(plan),
        caveats=said.caveats,
        arithmetic=describe_arithmetic(plan),
        arithmetic_caveats=said.arithmetic_caveats,
    )


def _curve(history: Sequence[tuple[Mechanism, int]], plan: Plan, epsilon: float) -> TradeOff:
    """Return the trade-off function; of the stated pair alone if the accountant cannot say more."""
    try:
        return trade_off(history, accountant=plan.accountant)
    except PrivacyError:
        return TradeOff.of_pair(epsilon, plan.delta)


def _exponential(epsilon: float) -> float:
    return math.exp(min(epsilon, _LARGEST_EXPONENT))


def _headline(standing: Standing, epsilon: float | None, plan: Plan, *, insecure: bool) -> str:
    if standing == "void":
        return "No guarantee can be stated for this run: see what speaks against it, above."
    if insecure:
        return "This run is not private: its noise or its samples came from an insecure seed."
    if epsilon is None:
        return "There is no guarantee: noise was left out of at least one release."
    return (
        f"This run was ({upper(epsilon)}, {number(plan.delta)})-differentially private with "
        f"respect to {neighbours_in_words(plan)}."
    )


def _meaning(
    standing: Standing,
    epsilon: float | None,
    plan: Plan,
    factor: float | None,
    guess: float | None,
    exact: float | None,
) -> tuple[str, ...]:
    if standing == "void":
        return ("Nothing is promised as long as that is not cleared up.",)
    if epsilon is None or factor is None or guess is None or exact is None:
        return ("Nothing is promised to anybody whose data were used.",)
    replaced, users = plan.relation is Relation.REPLACE_ONE, plan.unit == "user"
    it, was = ("they", "were") if users else ("it", "was")
    otherwise = f"had {it} not been there"
    if replaced:
        otherwise = f"had there been {'others in their' if users else 'another in its'} place"
    yours = "all your records together" if users else "your example"
    question = f"which of two versions of {yours}" if replaced else f"whether {yours}"
    odds, sure = upper(factor), percent_upper(guess)
    return (
        f"Take {'all records of any one user' if users else 'any one example'}, yours for "
        "instance. Training gave nearly the result that it would "
        f"have given {otherwise}. Nearly means: whatever can be read off the result is at most "
        f"e^{upper(epsilon)} = {odds} times as likely in one case as in the other, but for rare "
        f"events of probability {number(plan.delta)} ({_one_in(plan.delta)}).",
        f"So the odds of any suspicion about {yours} change by a factor of at most {odds}. "
        f"Somebody who first finds it a toss-up {question} {was} used is at most {sure} sure in "
        "the end, but for the same rare events.",
        f"Whoever has to guess {question} {was} used, after a fair coin has decided, is right at "
        f"most {sure} of the time by epsilon alone, and at most {percent_upper(exact)} by the "
        "whole privacy curve of this run. Blind guesses are right 50% of the time.",
        f"{_strength(epsilon, plan)} (Epsilon up to 1 is commonly called strong, up to 10 "
        "reasonable, beyond that weak.)",
    )


def _strength(epsilon: float, plan: Plan) -> str:
    if plan.delta > 0.1 / plan.sampling.dataset_size * (1 + 1e-9):
        return (
            "As guarantees go, this is a weak one, whatever its epsilon: delta is so large that "
            "publishing an example now and then would keep it."
        )
    if epsilon <= 1:
        return "As guarantees go, this is a strong one."
    if epsilon <= 10:
        return "As guarantees go, this is a reasonable one."
    return (
        "As guarantees go, this is a weak one: it does not rule out that single examples can be "
        "told from the model."
    )


def _one_in(probability: float) -> str:
    return f"one in {round(1 / probability):,}"


def _protected(standing: Standing, plan: Plan) -> tuple[str, ...]:
    if standing != "stated":
        return ("Nothing that could be stated.",)
    fact = (
        "what is in it, input and label"
        if plan.relation is Relation.REPLACE_ONE
        else "whether it was there at all, and what is in it, input and label"
    )
    if plan.unit == "user":
        fact = fact.replace("it was there at all", "they were there at all").replace("it,", "them,")
        return (
            f"Each of the {plan.sampling.dataset_size:,} users whose records the model was trained "
            f"on, with all their records, however many: {fact}.",
        )
    return (
        f"Each single one of the {plan.sampling.dataset_size:,} examples that the model was "
        f"trained on: {fact}.",
    )


def _from_whom(standing: Standing) -> tuple[str, ...]:
    if standing != "stated":
        return ("From nobody.",)
    return (
        "From anybody who gets the trained model, or uses it, even with the weights after every "
        "step and every noisy gradient.",
        "Even if they know the program, the settings and all other examples. Nothing done to the "
        "model afterwards weakens this.",
        "As long as they cannot predict the random generator. Samples and noise are pseudo-random, "
        "from keys of the operating system, and not true chance: the guarantee supposes that "
        "nobody can tell them apart with the computing power there is.",
    )


def _not_protected(plan: Plan) -> tuple[str, ...]:
    several = (
        "People with several examples, as if they had one: with k examples, epsilon is k times as "
        "large at a delta that grows as well, and more than that at the same delta."
    )
    if plan.unit == "user":
        several = (
            "People with several user ids, as if they had one, and people who are in somebody "
            "else's records. Which records are one user's, and how many users there are."
        )
    return (
        several,
        "What the data say as a whole. The model is there to learn it, and it may tell something "
        "about you even if you were not in the data.",
        "From those who hold the data themselves, or this run's checkpoints, which contain the "
        "state of the random generators. Keep both secret.",
        "Figures measured on the private data without noise, such as losses and accuracies on the "
        "training data. This page shows none; those on the private page are not to be passed on.",
        "Validation and test data. They were not trained on, and are not accounted for.",
    )


def _report(plan: Plan, releases: int | None, *, insecure: bool) -> PrivacyReport:
    return PrivacyReport(
        epsilon=math.nan,
        delta=plan.delta,
        steps_taken=0,
        releases=releases or 0,
        plan=plan,
        ledger=RunFile.LEDGER.value,
        insecure=insecure,
    )
