"""Membership inference attacks on a trained model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from clipless.audit._canaries import Examples
from clipless.audit._logistic import fit_logistic
from clipless.audit._statistics import Estimate, auroc, clopper_pearson, require_confidence
from clipless.audit.membership._features import Features, attack_features
from clipless.audit.membership._result import AttackOutcome, LowRate, MembershipResult
from clipless.losses import Loss

Shadow = tuple[nn.Module, Examples, Examples]
"""A model of the same kind, the examples it was trained on, and others it was not."""

_FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)


def membership_inference(
    model: nn.Module,
    members: Examples,
    non_members: Examples,
    *,
    loss: Loss,
    shadows: Sequence[Shadow] = (),
    confidence: float = 0.95,
    seed: int = 0,
) -> MembershipResult:
    """Attack a model: tell the examples it was trained on from others of the same kind.

    Threshold attacks (Yeom et al. 2018, Song and Mittal 2021) on the loss and, for classifiers,
    on confidence, margin and entropies; and a logistic regression on all of these together. The
    regression learns from `shadows` (Shokri et al. 2017); without them, from one half of the
    members and non-members themselves, an attacker who knows who was in that half.

    One random half of the examples chooses every threshold and the other half is judged by it, so
    that advantage and rates are not optimistic; `advantage_in_sample`, the largest difference of
    rates over all thresholds as papers report it, is. Intervals: AUROC by DeLong, rates by
    Clopper-Pearson, the advantage from the Clopper-Pearson intervals of its two rates, each at
    half the error. They hold for one attack at a time, not for the best of several.

    Args:
        members: inputs and targets that the model was trained on.
        non_members: as many as possible, from the same distribution: differences of another kind
            would be mistaken for membership. Below 2,000, a rate of 0.1% cannot be measured.
        loss: as in training; its temperature is that of the probabilities.

    Example:
        >>> model = torch.nn.Sequential(
        ...     clipless.nn.BoundedInput(1.0), clipless.nn.SpectralLinear(4, 2))
        >>> x, y = torch.randn(400, 4), torch.randint(2, (400,))
        >>> result = membership_inference(
        ...     model, (x[:200], y[:200]), (x[200:], y[200:]), loss=clipless.losses.CrossEntropy())
        >>> result.best_auroc.low < 0.6
        True
    """
    require_confidence(confidence)
    features = [attack_features(model, *part, loss=loss) for part in (members, non_members)]
    if min(map(len, features)) < 8:
        raise ValueError("at least 8 members and 8 non-members are needed")
    generator = torch.Generator().manual_seed(seed)
    halves = [_halves(len(each), generator) for each in features]
    outcomes = [
        _outcome(
            name,
            [each.scores[name] for each in features],
            halves,
            confidence=confidence,
            learned_from_half=False,
        )
        for name in features[0].scores
    ]
    if shadows:
        learned = [
            [attack_features(shadow, *part, loss=loss) for part in parts]
            for shadow, *parts in shadows
        ]
        tables = [torch.cat([pair[side].table for pair in learned]) for side in (0, 1)]
    else:
        tables = [each.table[half[0]] for each, half in zip(features, halves, strict=True)]
    outcomes.append(
        _outcome(
            "logistic regression",
            _logistic_scores(tables, features),
            halves,
            confidence=confidence,
            learned_from_half=not shadows,
        )
    )
    return MembershipResult(
        attacks=tuple(outcomes),
        confidence=confidence,
        members=len(features[0]),
        non_members=len(features[1]),
        shadows=len(shadows),
    )


def _halves(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    order = torch.randperm(count, generator=generator)
    return order[: count // 2], order[count // 2 :]


def _logistic_scores(tables: list[Tensor], features: list[Features]) -> list[Tensor]:
    member = torch.arange(sum(map(len, tables))) < len(tables[0])
    attack = fit_logistic(torch.cat(tables), member)
    return [attack(each.table) for each in features]


def _outcome(
    name: str,
    scores: list[Tensor],
    halves: list[tuple[Tensor, Tensor]],
    *,
    confidence: float,
    learned_from_half: bool,
) -> AttackOutcome:
    """Judge one attack by its scores of members and of non-members."""
    if not all(bool(each.isfinite().all()) for each in scores):
        raise ValueError(f"the {name} of some examples is not finite: leave them out")
    first, second = (
        [each[half[side]] for each, half in zip(scores, halves, strict=True)] for side in (0, 1)
    )
    judged = second if learned_from_half else scores
    threshold = _best_threshold(*first)
    in_sample = _best_threshold(*judged)
    return AttackOutcome(
        name=name,
        auroc=auroc(positives=judged[0], negatives=judged[1], confidence=confidence),
        advantage=_advantage(second, threshold, confidence),
        advantage_in_sample=_rate(judged[0], in_sample) - _rate(judged[1], in_sample),
        low_rates=tuple(
            _low_rate(rate, first[1], second, confidence) for rate in _FALSE_POSITIVE_RATES
        ),
    )


def _rate(scores: Tensor, threshold: float) -> float:
    return float((scores > threshold).double().mean())


def _best_threshold(members: Tensor, non_members: Tensor) -> float:
    """The threshold with the largest difference of rates of what lies above it."""
    cuts = torch.cat([members, non_members]).unique()
    cuts = torch.cat([cuts.new_full((1,), -math.inf), cuts])

    def above(scores: Tensor) -> Tensor:
        below = torch.searchsorted(scores.sort().values, cuts, right=True)
        return 1 - below.double() / len(scores)

    return float(cuts[int((above(members) - above(non_members)).argmax())])


def _advantage(judged: list[Tensor], threshold: float, confidence: float) -> Estimate:
    each = 1 - (1 - confidence) / 2
    true, false = (
        clopper_pearson(
            successes=int((scores > threshold).sum()), trials=len(scores), confidence=each
        )
        for scores in judged
    )
    return Estimate(true.value - false.value, true.low - false.high, true.high - false.low)


def _low_rate(rate: float, chosen_on: Tensor, judged: list[Tensor], confidence: float) -> LowRate:
    """The rates above the threshold that lets at most `rate` of `chosen_on` pass."""
    allowed = math.floor(rate * len(chosen_on))
    threshold = float(chosen_on.sort(descending=True).values[allowed])
    true, false = (
        clopper_pearson(
            successes=int((scores > threshold).sum()), trials=len(scores), confidence=confidence
        )
        for scores in judged
    )
    return LowRate(aimed_at=rate, true_positive_rate=true, false_positive_rate=false)
