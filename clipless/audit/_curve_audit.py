"""Audits of the whole trade-off curve from one run, after Mahloujifar, Melis and Chaudhuri (2024).

As for `one_run_audit`, a fair coin for each of m canaries decides whether it is in the data, and r
of them are guessed. What is tested is the trade-off function that the run claims, of which
(epsilon, delta) is one point.

**The theorem.** Let p_i be the probability of exactly i right guesses out of r, and f a trade-off
function that each coin obeys, symmetric. For every set T of numbers,

    sum over i in T of i p_i / m  <=  1 - f( sum over i in T of (r - i + 1) p_{i-1} / m ) .

*Proof.* Fix a canary and the coins of the others. Let A be the event, of what was released, that it
is guessed to be in and that so many of the other guesses are right as make i in T with it. Right
guesses of this kind have probability P_in(A), and wrong ones, which make i - 1, P_out(A), so that
P_in(A) <= 1 - f(P_out(A)). The same holds for guesses of "out". As 1 - f is concave, the averages
over both answers, over canaries and over the other coins obey it too; they are the two sums.

For T = {i, ..., r} it says: given the tail from i on, p_{i-1} cannot be small. If c guesses or more
were right with probability t, going down from c to 0 adds up to more than 1 unless t is small; the
largest t that does not is the p-value. Nothing is supposed about how canaries hang together: a
mechanism that now and then tells all of them is covered, and that is what limits this audit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from clipless.accounting import TradeOff
from clipless.audit._noise_family import NoiseFamily
from clipless.audit._one_run import Guesses, default_guesses
from clipless.audit._result import CurveResult
from clipless.audit._statistics import Array, exact_ends, require_confidence

_SMALLEST_P_VALUE = 1e-12
_FACTORS = (1 / 64, 64.0)


def curve_p_value(*, canaries: int, guesses: int, correct: int, curve: TradeOff) -> float:
    """Return a bound of the probability of so many right guesses, under a trade-off function.

    Example:
        >>> flat = TradeOff(epsilons=(0.0,), deltas=(0.0,))  # nothing is told: coin flips
        >>> found = curve_p_value(canaries=3, guesses=3, correct=3, curve=flat)
        >>> 0.125 <= found
        True
    """
    if not 0 <= correct <= guesses <= canaries or guesses < 1:
        raise ValueError(
            f"{correct} right of {guesses} guesses about {canaries} canaries: impossible"
        )
    alphas, betas = np.array(curve.vertices()).T
    low, high = np.log10(_SMALLEST_P_VALUE), 0.0
    for _ in range(3):
        tails = np.linspace(low, high, 33)
        total = _least_total(10.0**tails, canaries, guesses, correct, alphas, betas)
        possible = np.flatnonzero(total <= guesses / canaries * (1 + 1e-12))
        if len(possible) == 0:
            return float(10.0**low)
        if possible[-1] == len(tails) - 1:
            return float(10.0**high)
        low, high = tails[possible[-1]], tails[possible[-1] + 1]
    return float(10.0**high)


def _least_total(
    tails: Array, canaries: int, guesses: int, correct: int, alphas: Array, betas: Array
) -> Array:
    """Return the least `r_0 + h_0`: of probabilities, times guesses over canaries.

    `r_i` and `h_i` are the shares of right and of wrong guesses in the tail from i on. The least
    total has the whole tail at `correct` itself, and each `h_{i-1}` as small as it may be: what is
    moved from wrong to right, or added, makes later ones larger.
    """
    right, wrong = tails * correct / canaries, tails * (guesses - correct) / canaries
    for number in range(correct, 0, -1):
        # The inverse of 1 - f at `right`, where f is its own inverse.
        needed = np.maximum(wrong, np.interp(1.0 - np.minimum(right, 1.0), alphas, betas))
        weight = (number - 1) / (guesses - number + 1)
        right, wrong = right + weight * (needed - wrong), needed
    total: Array = right + wrong
    return total


def curve_audit(
    scores: Tensor, included: Tensor, *, family: NoiseFamily, confidence: float = 0.95,
    guesses: tuple[Guesses, ...] | None = None, independent: bool = False,
) -> CurveResult:  # fmt: skip
    """Return what one run proves about its trade-off function, from the scores of its canaries.

    Args:
        scores: one for each canary, (m,); high ones speak for being in.
        included: the coins, (m,), booleans. Fair, independent, and unknown to the scores.
        family: what the run claims, and the same with other noise.
        guesses: how many canaries are guessed in and out, chosen before looking at the scores;
            several are corrected for (Bonferroni). Not for `independent`.
        independent: whether the score of a canary is known to depend on its own coin and on noise
            of its own only, as for gradients that are orthogonal to each other in every step and
            weights that do not matter to them. Then guesses are independent trials, and the audit
            is close to exact; without it the theorem above stands, with much less power.

    Example:
        >>> from clipless.accounting import FullBatch, Mechanism
        >>> step = Mechanism(noise_multiplier=1.0, sampling=FullBatch(dataset_size=1000))
        >>> coins = torch.arange(2000) % 2 == 0
        >>> noise = torch.randn(2000, generator=torch.Generator().manual_seed(0))
        >>> family = NoiseFamily(releases=((step, 1),), delta=1e-5)
        >>> curve_audit(coins + noise, coins, family=family, independent=True).exposed
        False
        >>> curve_audit(coins + 0.6 * noise, coins, family=family, independent=True).exposed
        True
    """
    test = curve_test(
        scores, included, confidence=confidence, guesses=guesses, independent=independent
    )
    factor = _smallest_excluded(lambda each: test(family.curve(each)))
    return CurveResult(
        lower_bound=0.0 if factor is None else family.epsilon(factor),
        confidence=confidence,
        delta=family.delta,
        claimed_epsilon=family.epsilon(),
        canaries=len(scores),
        included=int(included.sum()),
        noise_factor=factor,
        independent=independent,
        contradicted=test(family.curve()),
    )


def curve_test(
    scores: Tensor, included: Tensor, *, confidence: float = 0.95,
    guesses: tuple[Guesses, ...] | None = None, independent: bool = False,
) -> Callable[[TradeOff], bool]:  # fmt: skip
    """Return the test that says of a trade-off function whether one run rules it out.

    A run that obeys the function is contradicted with probability at most `1 - confidence`. The
    arguments are those of `curve_audit`.
    """
    scores, included = scores.detach().cpu().double().flatten(), included.cpu().flatten()
    if included.dtype != torch.bool or len(included) != len(scores):
        raise ValueError(f"included must be {len(scores)} booleans, one for each score")
    if not bool(scores.isfinite().all()):
        raise ValueError("some scores are not finite: such canaries cannot be ranked")
    if independent and guesses is not None:
        raise ValueError("independent canaries are all guessed: leave guesses out")
    level = 1.0 - require_confidence(confidence)
    if independent:
        return _independent_test(scores.numpy(), included.numpy(), level)
    return _theorem(scores, included, guesses or default_guesses(len(scores)), level)


def _smallest_excluded(excluded: Callable[[float], bool]) -> float | None:
    """Return about the smallest noise factor that is ruled out, from above, or None."""
    low, high = _FACTORS
    if not excluded(high):
        return None
    if excluded(low):
        return low
    if excluded(1.0):
        high = 1.0
    else:
        low = 1.0
    for _ in range(9):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if excluded(middle) else (middle, high)
    return high


def _theorem(
    scores: Tensor, included: Tensor, choices: tuple[Guesses, ...], level: float
) -> Callable[[TradeOff], bool]:
    """Return the test of a curve that supposes nothing about canaries."""
    order = torch.argsort(scores, descending=True, stable=True)
    count = len(scores)
    outcomes = []
    for guesses_in, guesses_out in choices:
        right = int(included[order[:guesses_in]].sum())
        right += int((~included[order[count - guesses_out :]]).sum())
        outcomes.append((guesses_in + guesses_out, right))

    def excluded(curve: TradeOff) -> bool:
        return any(
            curve_p_value(canaries=count, guesses=guesses, correct=correct, curve=curve)
            < level / len(outcomes)
            for guesses, correct in outcomes
        )

    return excluded


def _independent_test(scores: Array, included: Array, level: float) -> Callable[[TradeOff], bool]:
    """Return the test of a curve by canaries that are independent trials.

    Every fifth canary chooses thresholds, the others are judged by them: by the number of right
    guesses at the best threshold, which is binomial, and by the rates of a threshold with hardly
    any false alarms (Clopper-Pearson). Each test gets half of the level.
    """
    from scipy import stats

    chosen = np.arange(len(scores)) % 5 == 0
    accuracy_cut, rare_cut = _thresholds(scores[chosen], included[chosen])
    above, truth = scores[~chosen], included[~chosen]
    correct = int(((above > accuracy_cut) == truth).sum())
    members, others = int(truth.sum()), int((~truth).sum())
    if min(members, others) < 4:
        raise ValueError("at least 4 canaries that are judged must be in, and as many out")
    found = int((above[truth] > rare_cut).sum())
    alarms = int((above[~truth] > rare_cut).sum())
    # One-sided ends at level / 4 each, together level / 2.
    hits = float(exact_ends(np.array([found]), members, 1 - level / 2)[0][0])
    false_alarms = float(exact_ends(np.array([alarms]), others, 1 - level / 2)[1][0])

    def excluded(curve: TradeOff) -> bool:
        tail = float(stats.binom.sf(correct - 1, len(truth), curve.attack_accuracy()))
        return tail < level / 2 or hits > curve.detection(false_alarms)

    return excluded


def _thresholds(scores: Array, included: Array) -> tuple[float, float]:
    """Return the threshold of the most right guesses, and the largest score of one that is out."""
    order = np.argsort(scores)
    ordered, members = scores[order], included[order]
    right = np.concatenate([[0], np.cumsum(~members)]) + np.concatenate(
        [np.cumsum(members[::-1])[::-1], [0]]
    )
    ends = np.concatenate([[-np.inf], ordered])
    others = scores[~included]
    rare = float(others.max()) if len(others) else 0.0
    return float(ends[int(right.argmax())]), rare
