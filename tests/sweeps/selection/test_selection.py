"""What a selection costs: closed forms, the library's own event, and exact attacks on the bound."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from scipy import optimize, stats

from clipless.errors import PrivacyError
from clipless.privacy import (
    FixedSizeSampling,
    FullBatch,
    Mechanism,
    PoissonSampling,
    Relation,
    epsilon,
)
from clipless.sweeps import Repetitions, composition_epsilon, selection_epsilon
from clipless.sweeps.selection._cost import _repeated
from clipless.sweeps.selection._repetitions import negative_binomial_mean

DELTA = 1e-5
ALL = [
    Repetitions(distribution="geometric", mean=10.0),
    Repetitions(distribution="logarithmic", mean=10.0),
    Repetitions(distribution="negative_binomial", mean=10.0, shape=0.5),
    Repetitions(distribution="poisson", mean=10.0),
]
NAMES = [each.distribution for each in ALL]


def gaussian(sigma):
    return [(Mechanism(noise_multiplier=sigma, sampling=FullBatch(dataset_size=1000)), 1)]


def poisson(sigma, rate=0.01, steps=1000):
    sampling = PoissonSampling(dataset_size=60_000, rate=rate)
    return [(Mechanism(noise_multiplier=sigma, sampling=sampling), steps)]


# --- the formula ---------------------------------------------------------------------------------


@pytest.mark.parametrize("repetitions", ALL, ids=NAMES)
@pytest.mark.parametrize(("sigma", "rate", "steps"), [(1.0, 0.01, 1000), (3.0, 0.2, 200)])
def test_agrees_with_the_event_of_the_library(repetitions, sigma, rate, steps):
    one = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma))
    event = dp_event.RepeatAndSelectDpEvent(
        dp_event.SelfComposedDpEvent(one, steps), mean=repetitions.mean, shape=repetitions.eta
    )
    expected = RdpAccountant().compose(event).get_epsilon(DELTA)
    found = selection_epsilon([poisson(sigma, rate, steps)], delta=DELTA, repetitions=repetitions)
    assert found == pytest.approx(expected, rel=1e-4)
    assert found >= expected * (1 - 1e-7)


def test_closed_form_for_one_gaussian():
    """d(a) = a/(2 s^2), for which the geometric minimum over b is sqrt(2 log m)/s - 1/(2 s^2)."""
    sigma, mean = 4.0, 20.0
    constant = 2 * (math.sqrt(2 * math.log(mean)) / sigma - 1 / (2 * sigma**2))

    def at(order):
        divergence = order / (2 * sigma**2) + math.log(mean) / (order - 1) + constant
        tail = math.log1p(-1 / order) - math.log(DELTA * order) / (order - 1)
        return divergence + tail

    best = optimize.minimize_scalar(at, bounds=(1.01, 500), method="bounded").fun
    repetitions = Repetitions(distribution="geometric", mean=mean)
    found = selection_epsilon([gaussian(sigma)], delta=DELTA, repetitions=repetitions)
    assert best <= found <= 1.02 * best  # the orders are a grid


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_pure_privacy_grows_by_the_known_factor(eta):
    """epsilon-private runs become (2 + eta) epsilon: 2 for logarithmic, 3 for geometric."""
    pure, orders = 0.3, np.geomspace(1.5, 1e9, 400)
    repetitions = Repetitions(distribution="negative_binomial", mean=50.0, shape=eta)
    found = _repeated(orders, np.full(len(orders), pure), repetitions)
    assert found[-1] == pytest.approx((2 + eta) * pure, rel=1e-4)
    assert found[-1] >= (2 + eta) * pure * (1 - 1e-8)
    assert np.all(np.diff(found) >= 0)


# --- attacks -------------------------------------------------------------------------------------


def generating(repetitions, s):
    """The probability generating function of the number of runs, and its derivative."""
    if repetitions.distribution == "poisson":
        value = np.exp(repetitions.mean * (s - 1))
        return value, repetitions.mean * value
    gamma, eta = repetitions.gamma, repetitions.eta
    rest = 1 - (1 - gamma) * s
    if eta == 0:
        return np.log(rest) / math.log(gamma), (1 - gamma) / (rest * math.log(1 / gamma))
    scale = gamma**-eta - 1
    return (rest**-eta - 1) / scale, eta * (1 - gamma) * rest ** (-eta - 1) / scale


def exact_epsilon(repetitions, sigma):
    """The true epsilon of showing the largest of K Gaussian answers, by numerical integration."""
    grid = np.linspace(-12 * sigma, 1 + 12 * sigma, 400_001)

    def density(mean):
        single = stats.norm(mean, sigma)
        return generating(repetitions, single.cdf(grid))[1] * single.pdf(grid)

    here, there = density(0.0), density(1.0)
    assert np.trapezoid(here, grid) == pytest.approx(
        1 - generating(repetitions, np.array(0.0))[0], abs=1e-6
    )

    def delta(level):
        pairs = ((here, there), (there, here))
        return max(np.trapezoid(np.maximum(a - math.exp(level) * b, 0.0), grid) for a, b in pairs)

    return optimize.brentq(lambda level: delta(level) - DELTA, 0.0, 60.0)


@pytest.mark.parametrize("repetitions", ALL, ids=NAMES)
@pytest.mark.parametrize("sigma", [1.0, 4.0])
def test_the_bound_holds_against_an_exact_attack(repetitions, sigma):
    """Selecting by a private answer really leaks more than one answer, and less than the bound."""
    bound = selection_epsilon([gaussian(sigma)], delta=DELTA, repetitions=repetitions)
    truth = exact_epsilon(repetitions, sigma)
    one = epsilon(gaussian(sigma), DELTA)
    assert one < truth <= bound


def test_the_worst_kind_of_run_counts():
    repetitions = ALL[0]
    weak, strong = poisson(0.8), poisson(2.0, rate=0.05, steps=2000)
    alone = [selection_epsilon([h], delta=DELTA, repetitions=repetitions) for h in (weak, strong)]
    both = selection_epsilon([weak, strong], delta=DELTA, repetitions=repetitions)
    assert both >= max(alone)


def test_grows_slowly_with_the_mean():
    """Ten times the runs cost far less than ten times the budget."""
    few, many = (
        selection_epsilon([poisson(1.0)], delta=DELTA, repetitions=Repetitions(mean=mean))
        for mean in (10.0, 100.0)
    )
    one = epsilon(poisson(1.0), DELTA, accountant="rdp")
    assert one < few < many < 3 * one
    assert composition_epsilon([poisson(1.0)] * 100, delta=DELTA) > 3 * many


def test_refuses_what_it_has_no_bound_for():
    sampling = PoissonSampling(dataset_size=1000, rate=0.1)
    other = Mechanism(noise_multiplier=1.0, sampling=sampling, relation=Relation.REPLACE_ONE)
    with pytest.raises(PrivacyError, match="no bound"):
        selection_epsilon([[(other, 5)]], delta=DELTA, repetitions=ALL[0])
    with pytest.raises(ValueError, match="at least one"):
        selection_epsilon([], delta=DELTA, repetitions=ALL[0])
    with pytest.raises(ValueError, match="empty"):
        selection_epsilon([[]], delta=DELTA, repetitions=ALL[0])
    with pytest.raises(ValueError, match="delta"):
        selection_epsilon([gaussian(1.0)], delta=0.0, repetitions=ALL[0])
    silent = selection_epsilon([gaussian(0.0)], delta=DELTA, repetitions=ALL[0])
    assert silent == math.inf


def test_fixed_size_samples_have_bounds_at_whole_orders_only():
    sampling = FixedSizeSampling(dataset_size=10_000, batch_size=100)
    step = Mechanism(noise_multiplier=4.0, sampling=sampling, relation=Relation.REPLACE_ONE)
    one = epsilon([(step, 100)], DELTA, accountant="rdp")
    for repetitions in ALL:
        found = selection_epsilon([[(step, 100)]], delta=DELTA, repetitions=repetitions)
        assert one < found < 10 * one


# --- the number of runs --------------------------------------------------------------------------


@pytest.mark.parametrize("repetitions", ALL, ids=NAMES)
def test_the_distribution_is_the_one_that_is_accounted_for(repetitions):
    pairs = []
    for number, chance in repetitions.probabilities():
        pairs.append((number, chance))
        if number > 20_000:
            break
    numbers, chances = np.array(pairs).T
    assert chances.sum() == pytest.approx(1.0, abs=1e-9)
    assert (numbers * chances).sum() == pytest.approx(repetitions.mean, rel=1e-6)
    # Against scipy's forms of the same distributions.
    first = numbers[:40]
    if repetitions.distribution == "poisson":
        expected = stats.poisson(10.0).pmf(first)
    elif repetitions.eta == 0:
        expected = stats.logser(1 - repetitions.gamma).pmf(first)
    else:
        whole = stats.nbinom(repetitions.eta, repetitions.gamma)
        expected = whole.pmf(first) / (1 - whole.pmf(0))
    np.testing.assert_allclose(chances[:40], expected, rtol=1e-9)


@pytest.mark.parametrize("repetitions", ALL, ids=NAMES)
def test_draws_follow_the_distribution(repetitions):
    uniform = np.random.default_rng(0).random
    draws = np.array([repetitions.draw(uniform=uniform) for _ in range(4000)])
    edges = [0, 1, 2, 3, 5, 8, 13, 21, 40]
    chances = np.zeros(len(edges))
    for number, chance in repetitions.probabilities():
        chances[np.searchsorted(edges, number, side="right") - 1] += chance
        if number > 5000:
            break
    counts = np.bincount(
        np.searchsorted(edges, draws, side="right") - 1, minlength=len(edges)
    ).astype(float)
    kept = chances > 1e-3
    observed, expected = counts[kept], 4000 * chances[kept]
    assert stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), kept.sum() - 1) > 1e-3
    assert repetitions.draw() >= 0


@pytest.mark.parametrize("eta", [0.0, 0.3, 1.0, 7.0])
@pytest.mark.parametrize("mean", [1.5, 10.0, 1e5])
def test_gamma_gives_at_most_the_mean(eta, mean):
    repetitions = Repetitions(distribution="negative_binomial", mean=mean, shape=eta)
    found = negative_binomial_mean(eta, repetitions.gamma)
    assert mean * (1 - 1e-6) <= found <= mean * (1 + 1e-12)


def test_composition_is_that_of_all_releases():
    histories = [poisson(1.0, steps=100), poisson(1.0, steps=50), poisson(2.0, steps=10)]
    expected = epsilon([*poisson(1.0, steps=150), *poisson(2.0, steps=10)], DELTA)
    assert composition_epsilon(histories, delta=DELTA) == pytest.approx(expected)
    # Many kinds of runs: by Rényi divergences, and still an upper bound.
    many = [poisson(1.0 + 0.01 * k, rate=0.01 + 1e-4 * k, steps=20) for k in range(14)]
    slow = epsilon([each for history in many for each in history], DELTA, accountant="rdp")
    assert composition_epsilon(many, delta=DELTA) == pytest.approx(slow)
