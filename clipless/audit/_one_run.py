"""A lower bound on epsilon from one training run with canaries (Steinke, Nasr, Jagielski 2023).

Each of m canaries is part of the training data if a fair coin of its own says so. After training,
every canary has a score; the r canaries with the most extreme scores are guessed to be in or out,
and the others are left alone. Differential privacy limits how many guesses can be right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from clipless.audit._result import OneRunResult
from clipless.audit._statistics import require_confidence

Guesses = tuple[int, int]
"""How many canaries are guessed to be in, and how many to be out."""


def one_run_p_value(
    *, canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Return a bound of the probability of so many right guesses under (epsilon, delta)-DP.

    With `W ~ Binomial(r, e^epsilon / (1 + e^epsilon))`, r guesses about m canaries, of which v are
    right, have probability at most

        P[W >= v] + 2 m delta * max over i >= 1 of P[v > W >= v - i] / i .

    For delta = 0 the number of right guesses is stochastically dominated by W, and independent
    randomised response attains it.

    Example:
        >>> one_run_p_value(canaries=9, guesses=2, correct=2, epsilon=0.0, delta=0.0)
        0.25
    """
    from scipy import stats

    if not 0 <= correct <= guesses <= canaries or guesses < 1:
        raise ValueError(
            f"{correct} right of {guesses} guesses about {canaries} canaries: impossible"
        )
    if not epsilon >= 0 or not 0 <= delta <= 1:
        raise ValueError(f"epsilon must be >= 0 and delta in [0, 1], got {epsilon!r}, {delta!r}")
    accuracy = 1 / (1 + math.exp(-epsilon))
    pure = float(stats.binom.sf(correct - 1, guesses, accuracy))
    if delta == 0 or correct == 0:
        return min(1.0, pure)
    # Entry i - 1 is P[v > W >= v - i] / i. Beyond i = v the numerator no longer grows.
    below = stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, accuracy)
    slopes = np.cumsum(below) / np.arange(1, correct + 1)
    return min(1.0, pure + 2 * canaries * delta * float(slopes.max()))


def one_run_lower_bound(
    *, canaries: int, guesses: int, correct: int, delta: float, confidence: float
) -> float:
    """Return an epsilon that training exceeds, at this confidence, given so many right guesses.

    It is the end of an interval of epsilons whose p-value is below `1 - confidence`. That the
    p-value may not be monotone does no harm: a set of rejected pairs of epsilon and v rejects all
    v from its smallest one on, and the test at that one has the level.

    Example:
        >>> bound = one_run_lower_bound(
        ...     canaries=100, guesses=100, correct=100, delta=0.0, confidence=0.95)
        >>> round(bound, 3), round(math.log(0.05 ** (1 / 100) / (1 - 0.05 ** (1 / 100))), 3)
        (3.493, 3.493)
    """
    level = 1 - require_confidence(confidence)

    def rejected(epsilon: float) -> bool:
        found = one_run_p_value(
            canaries=canaries, guesses=guesses, correct=correct, epsilon=epsilon, delta=delta
        )
        return found < level

    if not rejected(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while rejected(high):
        low, high = high, high + 1
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if rejected(middle) else (low, middle)
    return low


def default_guesses(canaries: int) -> tuple[Guesses, ...]:
    """Return the numbers of guesses that are tried unless others are given.

    Few guesses have the most extreme scores, many have the statistics. With sampled batches a
    canary may go unseen, so that guesses of "out" are weak: some choices have none of them.

    Example:
        >>> default_guesses(1000)
        ((10, 10), (50, 50), (200, 200), (20, 0), (100, 0))
    """
    shares = ((0.01, 0.01), (0.05, 0.05), (0.2, 0.2), (0.02, 0.0), (0.1, 0.0))
    pairs = (
        (max(1, round(share_in * canaries)), round(share_out * canaries))
        for share_in, share_out in shares
    )
    return tuple(dict.fromkeys(pairs))


def one_run_audit(
    scores: Tensor,
    included: Tensor,
    *,
    delta: float,
    confidence: float = 0.95,
    guesses: Guesses | Sequence[Guesses] | None = None,
    claimed_epsilon: float | None = None,
) -> OneRunResult:
    """Return what one run proves about epsilon, from the scores of its canaries.

    Args:
        scores: one for each canary, (m,); high ones speak for being in. Any function of what
            training released gives a valid bound, a poor one a low bound.
        included: the coins, (m,), booleans. Fair, independent, and unknown to the scores.
        guesses: how many canaries are guessed in and out, chosen before looking at the scores.
            Of several choices the best is taken, at a confidence corrected for their number
            (Bonferroni); `default_guesses` by default.
        claimed_epsilon: what training claims at this delta, to be stated beside the bound.

    Example:
        >>> included = torch.arange(1000) % 2 == 0
        >>> noise = torch.randn(1000, generator=torch.Generator().manual_seed(0))
        >>> result = one_run_audit(3.0 * included + noise, included, delta=1e-5)
        >>> result.lower_bound > 2
        True
    """
    scores, included = scores.detach().cpu().double().flatten(), included.cpu().flatten()
    count = len(scores)
    if included.dtype != torch.bool or len(included) != count:
        raise ValueError(f"included must be {count} booleans, one for each score")
    if not bool(scores.isfinite().all()):
        raise ValueError("some scores are not finite: such canaries cannot be ranked")
    choices = _choices(guesses, count)
    order = torch.argsort(scores, descending=True, stable=True)
    level = 1 - (1 - require_confidence(confidence)) / len(choices)
    outcomes: list[tuple[float, Guesses, int]] = []
    p_value = 1.0
    for guesses_in, guesses_out in choices:
        right_in = int(included[order[:guesses_in]].sum())
        right_out = int((~included[order[count - guesses_out :]]).sum())
        correct, total = right_in + right_out, guesses_in + guesses_out
        bound = one_run_lower_bound(
            canaries=count, guesses=total, correct=correct, delta=delta, confidence=level
        )
        outcomes.append((bound, (guesses_in, guesses_out), correct))
        if claimed_epsilon is not None and math.isfinite(claimed_epsilon):
            found = one_run_p_value(
                canaries=count, guesses=total, correct=correct, epsilon=claimed_epsilon,
                delta=delta,
            )  # fmt: skip
            p_value = min(p_value, len(choices) * found)
    bound, (guesses_in, guesses_out), correct = max(outcomes, key=lambda outcome: outcome[0])
    return OneRunResult(
        lower_bound=bound,
        confidence=confidence,
        delta=delta,
        claimed_epsilon=claimed_epsilon,
        canaries=count,
        included=int(included.sum()),
        guesses_in=guesses_in,
        guesses_out=guesses_out,
        correct=correct,
        choices=len(choices),
        p_value=None if claimed_epsilon is None else p_value,
    )


def _choices(guesses: Guesses | Sequence[Guesses] | None, count: int) -> tuple[Guesses, ...]:
    if guesses is None:
        return default_guesses(count)
    given = tuple(guesses)
    pairs = (given,) if len(given) == 2 and all(isinstance(each, int) for each in given) else given
    for pair in pairs:
        if (
            not isinstance(pair, tuple)
            or len(pair) != 2
            or min(pair) < 0
            or not 1 <= sum(pair) <= count
        ):
            raise ValueError(
                f"guesses={guesses!r}: give pairs of how many canaries to guess in and out, "
                f"together 1 to {count}"
            )
    if not pairs:
        raise ValueError("guesses is empty: give at least one pair, or None")
    return pairs  # type: ignore[return-value]
