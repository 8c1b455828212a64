"""The bound of one-run auditing, against closed forms and mechanisms that try to beat it."""

import json
import math

import numpy as np
import pytest
import torch
from scipy import stats

from clipless.audit import (
    OneRunResult,
    default_guesses,
    one_run_audit,
    one_run_lower_bound,
    one_run_p_value,
)


def accuracy(epsilon):
    return math.exp(epsilon) / (1 + math.exp(epsilon))


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0, 6.0])
@pytest.mark.parametrize(("guesses", "correct"), [(1, 1), (20, 13), (300, 290), (300, 0)])
def test_without_delta_it_is_a_binomial_tail(epsilon, guesses, correct):
    found = one_run_p_value(
        canaries=1000, guesses=guesses, correct=correct, epsilon=epsilon, delta=0.0
    )
    exact = sum(
        math.comb(guesses, k) * accuracy(epsilon) ** k * (1 - accuracy(epsilon)) ** (guesses - k)
        for k in range(correct, guesses + 1)
    )
    assert found == pytest.approx(min(1.0, exact), rel=1e-9)


def test_all_guesses_right_has_a_closed_form():
    """`q^r >= level`, so that epsilon is the log odds of the r-th root of the level."""
    for guesses in (1, 10, 1000):
        root = 0.05 ** (1 / guesses)
        found = one_run_lower_bound(
            canaries=guesses, guesses=guesses, correct=guesses, delta=0.0, confidence=0.95
        )
        assert found == pytest.approx(max(0.0, math.log(root / (1 - root))), abs=1e-6)


def test_the_bound_is_where_the_p_value_reaches_the_level():
    arguments = {"canaries": 5000, "guesses": 500, "correct": 450, "delta": 1e-6}
    bound = one_run_lower_bound(**arguments, confidence=0.9)
    assert one_run_p_value(**arguments, epsilon=bound - 1e-4) < 0.1
    assert one_run_p_value(**arguments, epsilon=bound + 1e-4) > 0.1


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "delta", "published"),
    [(1000, 100, 75, 1e-4, 0.673), (100_000, 1510, 1439, 1e-5, 2.675)],
)
def test_values_that_the_authors_print(canaries, guesses, correct, delta, published):
    """At 95%: appendix D, and section 7 of the paper, whose last digit may be cut off."""
    found = one_run_lower_bound(
        canaries=canaries, guesses=guesses, correct=correct, delta=delta, confidence=0.95
    )
    assert found == pytest.approx(published, abs=1e-3)


def test_the_correction_is_that_of_the_theorem():
    """Written out with a loop over all i up to m."""
    m, r, v, epsilon, delta = 40, 20, 17, 1.0, 1e-3
    w = stats.binom(r, accuracy(epsilon))
    inside = [sum(w.pmf(k) for k in range(max(0, v - i), v)) for i in range(1, m + 1)]
    alpha = max(2 / i * each for i, each in enumerate(inside, start=1))
    found = one_run_p_value(canaries=m, guesses=r, correct=v, epsilon=epsilon, delta=delta)
    assert found == pytest.approx(w.sf(v - 1) + alpha * m * delta, rel=1e-9)


# --- mechanisms that are (epsilon, delta)-DP in every coin, and use it as well as they can --------


def reveal_everything(m, r, epsilon, delta):
    """With probability delta all coins are shown; otherwise randomised response."""
    w = stats.binom(r, accuracy(epsilon))
    return lambda v: delta + (1 - delta) * w.sf(v - 1)


def reveal_each(m, r, epsilon, delta):
    """Every coin is shown with probability delta, independently; those are guessed first."""
    shown = stats.binom(m, delta)

    def tail(v):
        total = 0.0
        for sure in range(m + 1):
            left = max(0, r - sure)
            total += shown.pmf(sure) * stats.binom.sf(v - 1 - min(sure, r), left, accuracy(epsilon))
        return total

    return tail


def reveal_group(size):
    """With probability m delta / size, a random group of `size` coins is shown: each with
    probability delta, so that every coin is protected as promised, but many fall together."""

    def mechanism(m, r, epsilon, delta):
        chance = m * delta / size
        plain = stats.binom(r, accuracy(epsilon))
        rest = stats.binom(r - size, accuracy(epsilon))
        return lambda v: (1 - chance) * plain.sf(v - 1) + chance * rest.sf(v - 1 - size)

    return mechanism


MECHANISMS = {
    "everything": reveal_everything,
    "each": reveal_each,
    **{f"groups of {size}": reveal_group(size) for size in (1, 2, 4, 8)},
}


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("delta", [1e-5, 1e-3, 1e-2])
def test_no_mechanism_beats_the_bound(name, epsilon, delta):
    m, r = 60, 24
    tail = MECHANISMS[name](m, r, epsilon, delta)
    for correct in range(r + 1):
        limit = one_run_p_value(
            canaries=m, guesses=r, correct=correct, epsilon=epsilon, delta=delta
        )
        assert tail(correct) <= limit * (1 + 1e-9)


def test_the_correction_is_needed_and_not_much_too_large():
    """Groups of coins reach over a quarter of it: without its factor m it would be no bound."""
    m, r, epsilon, delta = 60, 24, 0.0, 1e-4
    closest = 0.0
    for size in (1, 2, 4, 8, 16, 20):
        tail = reveal_group(size)(m, r, epsilon, delta)
        for correct in range(14, r + 1):
            plain = stats.binom.sf(correct - 1, r, accuracy(epsilon))
            limit = one_run_p_value(
                canaries=m, guesses=r, correct=correct, epsilon=epsilon, delta=delta
            )
            closest = max(closest, (tail(correct) - plain) / (limit - plain))
    assert 0.25 < closest <= 1.0


def test_coverage_at_the_edge():
    """Randomised response attains epsilon: the bound exceeds it in at most 5% of the audits.

    500 audits; at exactly 5%, more than 41 would exceed it with probability 0.1%.
    """
    generator = np.random.default_rng(0)
    epsilon, count, exceeded, largest = 1.0, 400, 0, 0.0
    for _ in range(500):
        coins = generator.random(count) < 0.5
        answers = coins == (generator.random(count) < accuracy(epsilon))
        # The order within equal answers is random, so that the guesses are a random subset.
        scores = answers + 0.5 * generator.random(count)
        result = one_run_audit(
            torch.tensor(scores), torch.tensor(coins), delta=0.0, guesses=(100, 100)
        )
        exceeded += result.lower_bound > epsilon
        largest = max(largest, result.lower_bound)
    assert exceeded <= 41
    assert largest > 0.95 * epsilon  # and it comes close


# --- the audit -----------------------------------------------------------------------------------


def gaussian_scores(count, shift, seed=0):
    generator = torch.Generator().manual_seed(seed)
    included = torch.rand(count, generator=generator) < 0.5
    return torch.randn(count, generator=generator) + shift * included, included


def test_guesses_are_the_extremes():
    scores = torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0])
    included = torch.tensor([True, False, False, False, True])
    result = one_run_audit(scores, included, delta=0.0, guesses=(2, 2))
    assert (result.guesses_in, result.guesses_out, result.correct) == (2, 2, 3)
    assert (result.canaries, result.included) == (5, 2)


def test_several_choices_are_paid_for():
    scores, included = gaussian_scores(2000, 2.0)
    one = one_run_audit(scores, included, delta=1e-6, guesses=(100, 100))
    several = one_run_audit(scores, included, delta=1e-6, guesses=[(100, 100)] * 5)
    assert several.lower_bound < one.lower_bound
    corrected = one_run_audit(scores, included, delta=1e-6, guesses=(100, 100), confidence=0.99)
    assert several.lower_bound == pytest.approx(corrected.lower_bound)


def test_noise_proves_nothing():
    """False alarms over epsilon 0 in at most 5 of 100 audits of scores that know nothing."""
    alarms = 0
    for seed in range(100):
        scores, included = gaussian_scores(500, 0.0, seed=seed)
        alarms += one_run_audit(scores, included, delta=0.0).lower_bound > 0
    assert alarms <= 5


def test_scores_turned_around_prove_nothing():
    scores, included = gaussian_scores(1000, -3.0)
    assert one_run_audit(scores, included, delta=0.0).lower_bound == 0.0


def test_result_as_data_and_as_text():
    scores, included = gaussian_scores(1000, 3.0)
    result = one_run_audit(scores, included, delta=1e-5, claimed_epsilon=1.0)
    assert result.exposed
    assert result.p_value < 0.05
    data = json.loads(json.dumps(result.to_dict()))
    assert data["lower_bound"] == result.lower_bound
    assert data["exposed"] is True
    assert "CONTRADICTED" in str(result)
    silent = one_run_audit(scores, included, delta=1e-5)
    assert silent.p_value is None
    assert not silent.exposed
    assert "Claimed" not in str(silent)
    unlimited = one_run_audit(scores, included, delta=1e-5, claimed_epsilon=math.inf)
    assert not unlimited.exposed
    assert json.loads(json.dumps(unlimited.to_dict()))["claimed_epsilon"] is None
    assert isinstance(unlimited, OneRunResult)


def test_default_guesses_fit():
    for count in (1, 2, 3, 10, 99, 12345):
        for pair in default_guesses(count):
            assert pair[0] >= 1
            assert sum(pair) <= count


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"guesses": (600, 600)}, "together 1 to 1000"),
        ({"guesses": (0, 0)}, "together 1 to 1000"),
        ({"guesses": (-1, 5)}, "together 1 to 1000"),
        ({"guesses": []}, "empty"),
        ({"guesses": [(1, 2, 3)]}, "pairs"),
        ({"confidence": 1.0}, "confidence"),
        ({"delta": -0.1}, "delta"),
        ({"included": torch.ones(1000)}, "booleans"),
        ({"included": torch.ones(7, dtype=torch.bool)}, "booleans"),
        ({"scores": torch.full((1000,), math.nan)}, "not finite"),
    ],
)
def test_refusals(change, message):
    scores, included = gaussian_scores(1000, 1.0)
    arguments = {"scores": scores, "included": included, "delta": 1e-5} | change
    with pytest.raises(ValueError, match=message):
        one_run_audit(arguments.pop("scores"), arguments.pop("included"), **arguments)


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="impossible"):
        one_run_p_value(canaries=5, guesses=6, correct=1, epsilon=1.0, delta=0.0)
    with pytest.raises(ValueError, match="impossible"):
        one_run_p_value(canaries=5, guesses=3, correct=4, epsilon=1.0, delta=0.0)
