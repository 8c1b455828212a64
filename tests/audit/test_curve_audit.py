"""The audit of a whole trade-off curve: its theorem, its level, and what it exposes."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from clipless.accounting import FullBatch, Mechanism, PoissonSampling, TradeOff, trade_off
from clipless.audit import (
    NoiseFamily,
    audit_training_curve,
    curve_audit,
    curve_p_value,
    curve_test,
    one_run_audit,
)
from tests.audit.broken import HalvedNoise, background, table_trainer, tokens
from tests.audit.nominal import nominal_epsilons  # noqa: F401

FULL = FullBatch(dataset_size=1000)


def gaussian(mu):
    return trade_off([(Mechanism(noise_multiplier=1 / mu, sampling=FULL), 1)])


def draw(canaries, mu, generator):
    """Independent canaries of a Gaussian mechanism."""
    coins = torch.rand(canaries, generator=generator) < 0.5
    return mu * coins + torch.randn(canaries, generator=generator, dtype=torch.float64), coins


# --- the theorem ----------------------------------------------------------------------------------


def test_the_theorem_holds_for_mechanisms_that_can_be_enumerated():
    """All sets T, for randomised response of three canaries that fail together now and then."""
    flip, together = 0.3, 0.1
    m = r = 3
    counts = np.zeros(m + 1)
    for right in itertools.product((0, 1), repeat=m):
        alone = math.prod(1 - flip if each else flip for each in right)
        counts[sum(right)] += (1 - together) * alone
    counts[m] += together
    # One coin: shown with probability `together`, else flipped; f from its two points.
    epsilon = math.log((1 - flip) / flip)
    loud = together + (1 - together) * (1 - flip)
    curve = TradeOff(
        epsilons=(0.0, epsilon), deltas=(2 * loud - 1, loud - math.exp(epsilon) * (1 - loud))
    )
    for size in range(1, m + 2):
        for chosen in itertools.combinations(range(m + 1), size):
            right = sum(i * counts[i] for i in chosen) / m
            wrong = sum((r - i + 1) * counts[i - 1] for i in chosen if i) / m
            assert right <= 1 - curve.misses(wrong) + 1e-12
    for correct in range(m + 1):
        found = curve_p_value(canaries=m, guesses=r, correct=correct, curve=curve)
        assert found >= counts[correct:].sum() - 1e-9


def test_one_canary_is_the_trade_off_itself():
    """With one guess about one canary, right with probability t: `1 - t >= f(t)`."""
    for curve in (gaussian(1.0), gaussian(0.3)):
        found = curve_p_value(canaries=1, guesses=1, correct=1, curve=curve)
        assert found == pytest.approx(curve.attack_accuracy(), rel=1e-2)


@pytest.mark.parametrize("mu", [0.5, 2.0])
@pytest.mark.parametrize("guesses", [5, 40, 200])
def test_p_values_bound_the_tails_of_independent_and_of_joint_mechanisms(mu, guesses):
    """Independent canaries; and ones that a tail event tells all at once, as f allows."""
    m, curve, rng = 200, gaussian(mu), np.random.default_rng(0)
    coins = rng.integers(0, 2, size=(4000, m)).astype(bool)
    scores = mu * (coins - 0.5) + rng.normal(size=coins.shape)
    order = np.argsort(-abs(scores), axis=1)[:, :guesses]
    hits = np.take_along_axis((scores > 0) == coins, order, axis=1).sum(axis=1)
    alpha = 0.05
    told = alpha * (1 - curve.misses(alpha)) / (alpha + 1 - curve.misses(alpha))
    for correct in {int(np.quantile(hits, each)) for each in (0.5, 0.9, 0.99)}:
        bound = curve_p_value(canaries=m, guesses=guesses, correct=correct, curve=curve)
        assert bound >= (hits >= correct).mean() - 0.02
        assert bound >= min(alpha, told) * 0.5 or correct < guesses


def test_p_values_fall_with_what_is_found_and_rise_with_what_is_claimed():
    values = [
        [
            curve_p_value(canaries=300, guesses=100, correct=c, curve=gaussian(mu))
            for c in (50, 80, 95, 100)
        ]
        for mu in (0.1, 0.5, 1.5)
    ]
    for row in values:
        assert row == sorted(row, reverse=True)
    for column in zip(*values, strict=True):
        assert list(column) == sorted(column)


def published_total(mu, *, canaries, guesses, correct, tail):
    """Return r_0 + h_0 by the published recursion, written out for a Gaussian mechanism.

    Mahloujifar, Melis and Chaudhuri (2024; ICML 2025), with two answers to a guess: from h_c and
    r_c, the wrong and the right part of the tail, h_i = max(h_{i+1}, F(r_{i+1})) and
    r_i = r_{i+1} + i / (c' - i) (h_i - h_{i+1}), where F is the inverse of 1 - f. The claim is
    ruled out at that tail if the total is above c' / m.
    """
    right = tail * correct / canaries
    wrong = tail * (guesses - correct) / canaries
    for number in range(correct - 1, -1, -1):
        before = wrong
        wrong = max(wrong, stats.norm.cdf(stats.norm.ppf(right) - mu))
        right += number / (guesses - number) * (wrong - before)
    return right + wrong


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(("guesses", "correct"), [(20, 18), (100, 75), (200, 150), (200, 200)])
def test_the_recursion_is_the_published_one(mu, guesses, correct):
    """At our p-value the published total reaches its limit, to the grid of the curve."""
    options = {"canaries": 400, "guesses": guesses, "correct": correct}
    found = curve_p_value(curve=gaussian(mu), **options)
    limit = guesses / 400
    if found < 0.98:
        assert published_total(mu, tail=1.05 * found, **options) > limit * (1 - 1e-9)
    if found > 1e-7:  # below, the tabulated curve is pessimistic, and so is our value
        assert published_total(mu, tail=0.95 * found, **options) <= limit


# --- level and power ------------------------------------------------------------------------------


def rates(mu_claimed, mu_true, *, runs, canaries, **options):
    """Return how often the claim is ruled out."""
    generator, curve = torch.Generator().manual_seed(7), gaussian(mu_claimed)
    return sum(
        curve_test(*draw(canaries, mu_true, generator), **options)(curve) for _ in range(runs)
    )


def test_two_hundred_correct_runs_are_left_alone():
    assert rates(1.0, 1.0, runs=200, canaries=2500, confidence=0.9999, independent=True) == 0
    assert rates(1.0, 1.0, runs=20, canaries=400, guesses=((20, 20), (100, 0))) == 0


def test_the_level_is_kept_where_it_can_be_measured():
    assert rates(1.0, 1.0, runs=400, canaries=500, confidence=0.9, independent=True) <= 40 + 18


@pytest.mark.parametrize("factor", [1 / 0.8, 1.5])
def test_noise_that_is_too_small_and_rules_that_are_wrong_are_exposed(factor):
    found = rates(1.0, factor, runs=100, canaries=5000, confidence=0.999, independent=True)
    assert found >= 95


def test_faked_sampling_is_exposed():
    """One sample used in all of 20 steps, where each was to have its own."""
    steps, rate, sigma, canaries = 20, 0.1, 1.0, 8000
    sampling = PoissonSampling(dataset_size=10_000, rate=rate)
    curve = trade_off([(Mechanism(noise_multiplier=sigma, sampling=sampling), steps)])
    rng, found = np.random.default_rng(0), {"own": 0, "faked": 0}
    for _ in range(20):
        coins = rng.integers(0, 2, size=canaries).astype(bool)
        once = rng.random(canaries) < rate
        for kind in found:
            drawn = (
                np.broadcast_to(once, (steps, canaries))
                if kind == "faked"
                else rng.random((steps, canaries)) < rate
            )
            seen = (drawn & coins) / sigma**2 + rng.normal(size=drawn.shape) / sigma
            score = np.log(1 - rate + rate * np.exp(seen - 0.5 / sigma**2)).sum(axis=0)
            test = curve_test(
                torch.from_numpy(score),
                torch.from_numpy(coins),
                confidence=0.9999,
                independent=True,
            )
            found[kind] += test(curve)
    assert found["own"] == 0
    assert found["faked"] >= 19


def test_it_proves_more_than_one_pair_of_epsilon_and_delta():
    generator = torch.Generator().manual_seed(1)
    scores, coins = draw(1000, 2.0, generator)
    step = Mechanism(noise_multiplier=0.5, sampling=FULL)
    family = NoiseFamily(releases=((step, 1),), delta=1e-5)
    guesses = ((50, 50), (100, 0))
    whole = curve_audit(scores, coins, family=family, guesses=guesses)
    pair = one_run_audit(scores, coins, delta=1e-5, guesses=guesses)
    assert pair.lower_bound * 1.3 < whole.lower_bound < whole.claimed_epsilon
    assert not whole.exposed
    assert "epsilon an attacker could prove" in whole.proved
    assert 1 < whole.noise_factor < 4
    nearly = curve_audit(scores, coins, family=family, independent=True)
    assert 0.75 * nearly.claimed_epsilon < nearly.lower_bound < nearly.claimed_epsilon


def test_nothing_is_found_where_nothing_is_told():
    coins = torch.rand(500, generator=torch.Generator().manual_seed(0)) < 0.5
    step = Mechanism(noise_multiplier=1.0, sampling=FULL)
    family = NoiseFamily(releases=((step, 1),), delta=1e-5)
    result = curve_audit(torch.arange(500.0), coins, family=family)
    assert result.lower_bound == 0.0
    assert result.noise_factor is None
    assert "not contradicted" in str(result)
    with pytest.raises(ValueError, match="leave guesses out"):
        curve_audit(coins.float(), coins, family=family, guesses=((1, 1),), independent=True)
    with pytest.raises(ValueError, match="booleans"):
        curve_audit(coins.float(), coins.float(), family=family)
    with pytest.raises(ValueError, match="impossible"):
        curve_p_value(canaries=2, guesses=3, correct=1, curve=gaussian(1.0))


def test_real_runs_are_audited():
    """A table whose canaries are tokens of their own: independent by construction."""

    def audited(kind, seed):
        canaries = 3000
        return audit_training_curve(
            table_trainer(canaries + 4, noise=2 / 0.6, steps=4, seed=seed, kind=kind),
            background(),
            canaries=tuple(part[4:] for part in tokens(canaries + 4)),
            confidence=0.99,
            independent=True,
            seed=seed,
        )

    from clipless.training import Trainer

    correct, broken = audited(Trainer, 0), audited(HalvedNoise, 0)
    assert not correct.exposed
    assert correct.lower_bound > 0.5 * correct.claimed_epsilon
    assert broken.exposed
    assert broken.noise_factor == pytest.approx(0.5, rel=0.25)
    assert stats.norm.cdf(0.3) < correct.claimed_epsilon
