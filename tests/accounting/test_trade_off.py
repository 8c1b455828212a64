"""Trade-off functions, against closed forms of Gaussian mechanisms and against attacks."""

import math

import numpy as np
import pytest
from scipy import stats

from clipless.accounting import (
    FullBatch,
    Mechanism,
    PoissonSampling,
    Relation,
    TradeOff,
    delta,
    noise_multiplier_for_accuracy,
    trade_off,
)
from clipless.errors import BudgetExhaustedError

GAUSSIAN = [(Mechanism(noise_multiplier=2.0, sampling=FullBatch(dataset_size=1000)), 4)]
SAMPLED = Mechanism(noise_multiplier=0.8, sampling=PoissonSampling(dataset_size=1000, rate=0.3))
ALPHAS = np.concatenate([[0.0], np.geomspace(1e-10, 1.0, 100)])


def gaussian(alpha, mu):
    return stats.norm.cdf(stats.norm.isf(alpha) - mu)


def test_a_gaussian_mechanism_has_its_own_curve():
    curve = trade_off(GAUSSIAN)  # mu = sqrt(4) / 2
    for alpha in ALPHAS:
        assert curve.misses(alpha) == pytest.approx(gaussian(alpha, 1.0), abs=2e-4)
        assert curve.misses(alpha) <= gaussian(alpha, 1.0) + 1e-9
    assert curve.advantage == pytest.approx(2 * stats.norm.cdf(0.5) - 1, rel=1e-3)
    assert curve.attack_accuracy() == pytest.approx(stats.norm.cdf(0.5), rel=1e-3)
    assert 1.0 - 1e-4 < curve.gaussian_fit(tail=1e-6) < 1.001


@pytest.mark.parametrize("rate", [0.5, 0.2, 0.9])
def test_accuracy_at_a_base_rate_is_that_of_the_best_threshold(rate):
    found = trade_off(GAUSSIAN).attack_accuracy(rate)
    # A threshold at which the posterior is one half.
    cut = 0.5 + math.log((1 - rate) / rate)
    best = rate * stats.norm.sf(cut - 1.0) + (1 - rate) * stats.norm.cdf(cut)
    assert found == pytest.approx(best, abs=1e-3)
    assert found >= best - 1e-9


def test_no_attack_on_a_sampled_step_beats_the_curve():
    # Both directions, by the exact distributions of one step: a mixture against a normal.
    curve = trade_off([(SAMPLED, 1)])
    cuts = np.linspace(-6.0, 12.0, 4001) * 0.8
    q, sigma = 0.3, 0.8
    alarms = stats.norm.sf(cuts, scale=sigma)
    hits = (1 - q) * alarms + q * stats.norm.sf(cuts, loc=1.0, scale=sigma)
    for alpha, beta in zip(alarms, 1 - hits, strict=True):
        assert beta >= curve.misses(alpha) - 1e-9
    for alpha, beta in zip(1 - hits, alarms, strict=True):
        assert beta >= curve.misses(alpha) - 1e-9
    gap = min(b - curve.misses(a) for a, b in zip(alarms, 1 - hits, strict=True) if 0.1 < a < 0.4)
    assert gap < 2e-3


def test_the_gaussian_fit_covers_every_delta():
    history = [(SAMPLED, 20)]
    curve = trade_off(history)
    mu = curve.gaussian_fit(tail=1e-4)
    for target in np.linspace(0.0, 6.0, 25):
        exact = stats.norm.cdf(mu / 2 - target / mu) - math.exp(target) * stats.norm.cdf(
            -mu / 2 - target / mu
        )
        assert delta(history, float(target)) <= exact + 1e-4 + 1e-9
    for alpha in ALPHAS:
        assert curve.misses(alpha) >= gaussian(alpha, mu) - 1e-4 - 1e-9
    smaller = 0.98 * mu
    assert any(curve.misses(a) < gaussian(a, smaller) - 1e-4 for a in ALPHAS)


def test_nothing_and_everything():
    assert trade_off([]).attack_accuracy() == 0.5
    assert trade_off([]).misses(0.3) == pytest.approx(0.7)
    bare = trade_off([(Mechanism(noise_multiplier=0.0, sampling=FullBatch(dataset_size=9)), 1)])
    assert bare.advantage == 1.0
    assert bare.misses(0.0) == 0.0
    assert bare.attack_accuracy(0.01) == 1.0
    assert bare.to_dict(tail=1e-6)["gaussian_mu"] is None


def test_pairs_that_are_no_guarantee_are_refused():
    for epsilons, deltas in [
        ((), ()),
        ((1.0,), (0.1,)),
        ((0.0, 0.0), (0.1, 0.1)),
        ((0.0,), (2.0,)),
    ]:
        with pytest.raises(ValueError, match=r"epsilon|delta"):
            TradeOff(epsilons=epsilons, deltas=deltas)
    with pytest.raises(ValueError, match="false_alarms"):
        trade_off([]).misses(1.5)
    with pytest.raises(ValueError, match="base_rate"):
        trade_off([]).attack_accuracy(0.0)


@pytest.mark.parametrize("base_rate", [0.5, 0.1])
@pytest.mark.parametrize("relation", [Relation.ZERO_OUT, Relation.REPLACE_ONE])
def test_noise_for_a_risk_is_the_least_that_keeps_it(base_rate, relation):
    limit = 0.6 if base_rate == 0.5 else 0.91
    sampling = PoissonSampling(dataset_size=1000, rate=0.1)
    sigma = noise_multiplier_for_accuracy(
        max_attack_accuracy=limit, base_rate=base_rate, steps=30, sampling=sampling,
        relation=relation,
    )  # fmt: skip

    def accuracy(noise):
        step = Mechanism(noise_multiplier=noise, sampling=sampling, relation=relation)
        odds = math.log((1 - base_rate) / base_rate)
        return 1 - base_rate + base_rate * delta([(step, 30)], odds)

    assert accuracy(sigma) <= limit
    assert accuracy(0.99 * sigma) > limit
    step = Mechanism(noise_multiplier=sigma, sampling=sampling, relation=relation)
    assert trade_off([(step, 30)]).attack_accuracy(base_rate) == pytest.approx(limit, abs=2e-3)


def test_a_risk_that_cannot_be_kept_is_refused():
    options = {"steps": 1, "sampling": FullBatch(dataset_size=100)}
    with pytest.raises(ValueError, match="blind guessing"):
        noise_multiplier_for_accuracy(max_attack_accuracy=0.5, **options)
    with pytest.raises(ValueError, match="blind guessing"):
        noise_multiplier_for_accuracy(max_attack_accuracy=0.85, base_rate=0.1, **options)
    with pytest.raises(BudgetExhaustedError, match="no amount of noise"):
        noise_multiplier_for_accuracy(max_attack_accuracy=0.6, history=GAUSSIAN, **options)
