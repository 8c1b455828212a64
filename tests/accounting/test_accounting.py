"""Epsilon against closed forms, exact small cases, proved lower bounds and a second opinion."""

from __future__ import annotations

import math
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from clipless.accounting import (
    SAMPLER_EPSILON,
    FixedSizeSampling,
    FullBatch,
    LargeDelta,
    Mechanism,
    PoissonSampling,
    Relation,
    _pld,
    chosen_delta,
    default_delta,
    delta,
    epsilon,
    epsilon_curve,
    rdp,
)
from clipless.accounting import _epsilon as _accounting
from clipless.errors import PrivacyError

N = 60_000
ZERO_OUT, REPLACE_ONE, ADD_REMOVE = Relation.ZERO_OUT, Relation.REPLACE_ONE, Relation.ADD_REMOVE


def poisson(sigma, rate=0.01, relation=ZERO_OUT, limit=None, size=N):
    sampling = PoissonSampling(dataset_size=size, rate=rate, max_batch_size=limit)
    return Mechanism(noise_multiplier=sigma, sampling=sampling, relation=relation)


def full(sigma, relation=ZERO_OUT):
    return Mechanism(noise_multiplier=sigma, sampling=FullBatch(dataset_size=N), relation=relation)


def fixed(sigma, batch=600, relation=REPLACE_ONE, size=N):
    sampling = FixedSizeSampling(dataset_size=size, batch_size=batch)
    return Mechanism(noise_multiplier=sigma, sampling=sampling, relation=relation)


def gaussian_delta(sigma, eps):
    """Balle and Wang 2018: the exact profile of the Gaussian mechanism at distance 1."""
    a, b = 1 / (2 * sigma), eps * sigma
    return stats.norm.cdf(a - b) - math.exp(eps + stats.norm.logcdf(-a - b))


def gaussian_epsilon(sigma, target):
    if gaussian_delta(sigma, 0.0) <= target:
        return 0.0
    high = 1.0
    while gaussian_delta(sigma, high) > target:
        high *= 2
    return optimize.brentq(lambda eps: gaussian_delta(sigma, eps) - target, 0.0, high, xtol=1e-12)


def poisson_lower_bound(rate, sigma, steps, target):
    """Return an epsilon that no correct accountant may go below.

    The sum of all outputs is N(0, T sigma^2) without the example and a binomial mixture with it;
    thresholding that sum is one attack among many.
    """
    width = sigma * math.sqrt(steps)
    hits = np.arange(int(stats.binom.ppf(1 - 1e-13, steps, rate)) + 1)
    weights = stats.binom.pmf(hits, steps, rate)
    best = 0.0
    for threshold in np.linspace(-width, 9 * width + hits[-1], 600):
        with_it = weights @ stats.norm.sf((threshold - hits) / width)
        log_without = stats.norm.logsf(threshold / width)
        if with_it > target:
            best = max(best, math.log(with_it - target) - log_without)
    return best


def mixture_delta(upper, lower, sigma, eps):
    """Return the exact hockey-stick divergence of two mixtures {mean: weight} of Gaussians."""
    means = [*upper, *lower]
    x = np.linspace(min(means) - 12 * sigma, max(means) + 12 * sigma, 20_001)

    def density(mixture):
        return sum(w * stats.norm.pdf(x, mean, sigma) for mean, w in mixture.items())

    excess = density(upper) - math.exp(eps) * density(lower)
    return float(np.trapezoid(np.maximum(excess, 0.0), x))


# --- Closed forms -------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize(
    ("sigma", "steps"), [(0.5, 1), (1.0, 1), (4.0, 30), (30.0, 1000), (200, 9)]
)
@pytest.mark.parametrize("target", [1e-2, 1e-5, 1e-9])
def test_full_batch_is_the_gaussian_closed_form(relation, sigma, steps, target):
    distance = 2.0 if relation is REPLACE_ONE else 1.0
    exact = gaussian_epsilon(sigma / distance / math.sqrt(steps), target)
    ours = epsilon([(full(sigma, relation), steps)], target)
    assert exact - 1e-9 <= ours <= exact + 1e-3
    assert epsilon([(full(sigma, relation), steps)], target, accountant="rdp") >= exact - 1e-9


def test_delta_is_the_gaussian_closed_form():
    for eps in (0.0, 0.5, 2.0):
        exact = gaussian_delta(0.5, eps)
        assert exact <= delta([(full(1.0, REPLACE_ONE), 1)], eps) <= exact * (1 + 1e-3)
        assert delta([(full(1.0, REPLACE_ONE), 1)], eps, accountant="rdp") >= exact


def test_mixed_full_batch_releases_are_one_gaussian():
    history = [(full(3.0), 4), (full(5.0), 2), (poisson(7.0, rate=1.0), 3)]
    sigma = (4 / 9 + 2 / 25 + 3 / 49) ** -0.5
    exact = gaussian_epsilon(sigma, 1e-5)
    assert exact <= epsilon(history, 1e-5) <= exact + 1e-3


def test_replace_one_doubles_the_distance_once_in_both_accountants():
    # The library's PLD doubles by itself and its RDP does not.
    for accountant in ("pld", "rdp"):
        doubled = epsilon([(full(2.0, REPLACE_ONE), 10)], 1e-5, accountant=accountant)
        plain = epsilon([(full(1.0), 10)], 1e-5, accountant=accountant)
        assert doubled == pytest.approx(plain, rel=1e-4)
    assert epsilon([(poisson(1.0, relation=REPLACE_ONE), 500)], 1e-5) > 1.2 * epsilon(
        [(poisson(1.0), 500)], 1e-5
    )


def test_one_poisson_step_is_exact():
    for eps in (0.0, 0.1, 1.0):
        for relation in Relation:
            lower = {0.0: 1.0} if relation is not REPLACE_ONE else {0.0: 0.7, -1.0: 0.3}
            exact = mixture_delta({0.0: 0.7, 1.0: 0.3}, lower, 0.8, eps)
            ours = delta([(poisson(0.8, rate=0.3, relation=relation), 1)], eps)
            assert exact * (1 - 1e-5) <= ours <= exact * (1 + 1e-3) + 1e-11


# --- Exact small cases: the worst data sets we know of stay below what is reported --------------


def cut_poisson(others, rate, limit, example):
    """Return the law of a cut Poisson sum of `others` examples of -1 and one of value `example`."""
    law: dict[float, float] = {}
    for drawn in range(others + 1):
        weight = stats.binom.pmf(drawn, others, rate)
        kept = min(drawn, limit)
        with_it = 0.0 if example is None else rate * min(1.0, limit / (drawn + 1))
        law[-float(kept)] = law.get(-float(kept), 0.0) + weight * (1 - with_it)
        if example is not None:
            total = example - float(min(drawn, limit - 1))
            law[total] = law.get(total, 0.0) + weight * with_it
    return law


@pytest.mark.parametrize(("limit", "sigma"), [(1, 1.0), (5, 1.0), (8, 1.0), (6, 3.0), (13, 2.0)])
def test_cut_poisson_covers_the_attack_on_the_cut(limit, sigma):
    size, rate = 12, 0.4
    zeroing = poisson(sigma, rate=rate, limit=limit, size=size)
    adding = poisson(sigma, rate=rate, limit=limit, size=size, relation=ADD_REMOVE)
    replacing = poisson(sigma, rate=rate, limit=limit, size=size, relation=REPLACE_ONE)
    for eps in (0.0, 0.2, 1.0):
        # The empty record keeps its place in the sample: the others' places do not change.
        present, empty = (cut_poisson(size - 1, rate, limit, value) for value in (1.0, 0.0))
        for pair in ((present, empty), (empty, present)):
            assert mixture_delta(*pair, sigma, eps) <= delta([(zeroing, 1)], eps) + 1e-6
        reported = delta([(adding, 1)], eps)
        for others in (size - 1, size):
            # Both neighbours of a data set of `size`: one example less, one example more.
            present = cut_poisson(others, rate, limit, 1.0)
            absent = cut_poisson(others, rate, limit, None)
            for pair in ((present, absent), (absent, present)):
                assert mixture_delta(*pair, sigma, eps) <= reported + 1e-6
        present, other = (cut_poisson(size - 1, rate, limit, value) for value in (1.0, -1.0))
        for pair in ((present, other), (other, present)):
            assert mixture_delta(*pair, sigma, eps) <= delta([(replacing, 1)], eps) + 1e-6


@pytest.mark.parametrize("limit", [1, 8])
def test_cut_poisson_counts_the_worse_of_both_sizes(limit):
    """In old ledgers a data set of N is compared with N - 1 examples and with N + 1."""

    def cut(size, relation):
        return poisson(1.0, rate=0.4, limit=limit, size=size, relation=relation)

    costs = [_pld.epsilon(((cut(size, ADD_REMOVE), 5),), 1e-5) for size in (12, 13)]
    assert costs[0] != costs[1]
    assert epsilon([(cut(12, ADD_REMOVE), 5)], 1e-5) == max(costs) + SAMPLER_EPSILON
    # Under zero-out both neighbours have N.
    assert epsilon([(cut(12, ZERO_OUT), 5)], 1e-5) == costs[0] + SAMPLER_EPSILON


@pytest.mark.parametrize(("limit", "sigma"), [(1, 1.0), (5, 1.0), (8, 2.0), (12, 3.0)])
def test_cut_poisson_by_renyi_covers_the_attack_on_the_cut(limit, sigma):
    """The Renyi divergences of the exact laws, both ways, against the bound."""
    size, rate = 12, 0.4
    laws = [cut_poisson(size - 1, rate, limit, value) for value in (1.0, 0.0)]
    x = np.linspace(-size - 14 * sigma, 2 + 14 * sigma, 40_001)
    present, empty = (
        np.logaddexp.reduce([np.log(w) + stats.norm.logpdf(x, mean, sigma) for mean, w in law])
        for law in ([each for each in law.items() if each[1] > 0] for law in laws)
    )
    orders, bounds = rdp.step_divergences(poisson(sigma, rate=rate, limit=limit, size=size))
    for order, bound in zip(orders, bounds, strict=True):
        if order > 8:
            continue
        for upper, lower in ((present, empty), (empty, present)):
            moment = np.trapezoid(np.exp(order * upper + (1 - order) * lower), x)
            assert math.log(moment) / (order - 1) <= bound * (1 + 1e-6)


def test_cut_poisson_by_renyi_is_the_plain_one_where_nothing_is_cut():
    _, plain = rdp.step_divergences(poisson(1.0))
    _, rarely = rdp.step_divergences(poisson(1.0, limit=900))
    _, often = rdp.step_divergences(poisson(1.0, limit=620))
    assert rarely[:10] == pytest.approx(plain[:10], rel=1e-6)
    assert all(often >= plain)
    assert often[10] > 1.5 * plain[10]
    history = [(poisson(1.0, limit=760), 1000)]
    assert epsilon(history, 1e-5) < epsilon(history, 1e-5, accountant="rdp")
    assert epsilon(history, 1e-5, accountant="rdp") < 1.3 * epsilon(history, 1e-5)


@pytest.mark.parametrize("batch", [1, 3, 9, 10])
@pytest.mark.parametrize("ones", [0, 4, 9])
def test_fixed_size_covers_the_worst_replacement(batch, ones):
    size, sigma = 10, 1.3

    def law(example):
        """Return the law of the sum when `ones` of the 9 other examples are +1, the rest -1."""
        total: dict[float, float] = {}
        for member, weight in ((True, batch / size), (False, 1 - batch / size)):
            drawn = batch - member
            for hits in range(drawn + 1):
                value = float(2 * hits - drawn + (example if member else 0))
                chance = weight * stats.hypergeom.pmf(hits, size - 1, ones, drawn)
                total[value] = total.get(value, 0.0) + float(np.nan_to_num(chance))
        return total

    for eps in (0.0, 0.3, 1.0):
        reported = delta([(fixed(sigma, batch=batch, size=size), 1)], eps)
        worst = mixture_delta(law(1), law(-1), sigma, eps)
        assert worst <= reported + 1e-6
        assert mixture_delta(law(-1), law(1), sigma, eps) <= reported + 1e-6
        if batch == size:
            assert reported == pytest.approx(worst, rel=1e-3)


def test_fixed_size_lies_between_poisson_at_half_the_noise_and_renyi():
    ours = epsilon([(fixed(2.0), 1000)], 1e-5)
    assert epsilon([(poisson(1.0), 1000)], 1e-5) <= ours
    assert ours <= epsilon([(fixed(2.0), 1000)], 1e-5, accountant="rdp")


def test_a_maximum_size_that_never_cuts_costs_nothing():
    plain = epsilon([(poisson(1.0), 1000)], 1e-5)
    assert epsilon([(poisson(1.0, limit=N), 1000)], 1e-5) == plain
    assert epsilon([(poisson(1.0, limit=2000), 1000)], 1e-5) == plain
    slightly = epsilon([(poisson(1.0, limit=760), 1000)], 1e-5)
    clearly = epsilon([(poisson(1.0, limit=680), 1000)], 1e-5)
    assert plain < slightly < 1.001 * plain
    assert slightly < clearly


# --- Lower bounds and a second implementation ---------------------------------------------------

GRID = [
    (0.01, 1.0, 1000),
    (0.001, 0.7, 20_000),
    (0.1, 3.0, 500),
    (0.5, 10.0, 200),
    (0.02, 5.0, 5000),
    (1e-4, 0.6, 50_000),
    (1e-5, 1.0, 1_000_000),
    (0.05, 0.4, 3),
]


@pytest.mark.parametrize(("rate", "sigma", "steps"), GRID)
def test_never_below_a_proved_lower_bound(rate, sigma, steps):
    ours = epsilon([(poisson(sigma, rate=rate), steps)], 1e-5)
    assert ours >= poisson_lower_bound(rate, sigma, steps, 1e-5)


@pytest.mark.filterwarnings("ignore:Optimal order:UserWarning")
@pytest.mark.parametrize(("rate", "sigma", "steps"), GRID[:5])
def test_agrees_with_the_second_implementation(rate, sigma, steps):
    from opacus.accountants import PRVAccountant, RDPAccountant

    history = [(poisson(sigma, rate=rate), steps)]
    error = 0.01
    second = PRVAccountant()
    second.history = [(sigma, rate, steps)]
    bound = second.get_epsilon(1e-5, eps_error=error, delta_error=1e-8)
    # The second one reports its upper limit: at most 2 * error above the true value.
    assert bound - 2 * error - 1e-3 * bound <= epsilon(history, 1e-5) <= bound * 1.002 + 1e-3
    renyi = RDPAccountant()
    renyi.history = [(sigma, rate, steps)]
    ours = epsilon(history, 1e-5, accountant="rdp")
    assert ours == pytest.approx(renyi.get_epsilon(1e-5), rel=0.01)
    assert epsilon(history, 1e-5) <= ours


def test_agrees_on_several_noise_levels():
    from opacus.accountants import PRVAccountant

    levels = [(1.0, 0.01, 400), (1.5, 0.02, 300), (0.8, 0.005, 500)]
    second = PRVAccountant()
    second.history = levels
    bound = second.get_epsilon(1e-5, eps_error=0.01, delta_error=1e-8)
    ours = epsilon([(poisson(s, rate=q), t) for s, q, t in levels], 1e-5)
    assert bound - 0.02 - 1e-3 * bound <= ours <= bound * 1.002 + 1e-3


# --- Traps --------------------------------------------------------------------------------------


def test_layers_of_one_step_are_one_mechanism():
    """Wrapping every layer in a subsampled event of its own reports too little."""
    layers, steps, sigma = 10, 1000, 1.0
    joint = epsilon([(poisson(sigma), steps)], 1e-5)
    per_layer = sigma * math.sqrt(layers)
    assert (layers * per_layer**-2) ** -0.5 == pytest.approx(sigma)
    wrong = epsilon([(poisson(per_layer), steps * layers)], 1e-5)
    assert wrong < 0.9 * joint
    assert poisson_lower_bound(0.01, sigma, steps, 1e-5) > wrong
    # A mechanism holds one multiplier and one sampling: nothing else can be written down.
    assert set(poisson(1.0).to_dict()) == {"noise_multiplier", "sampling", "relation"}


def test_full_batch_is_never_amplified():
    assert epsilon([(full(1.0), 100)], 1e-5) > 10 * epsilon([(poisson(1.0), 100)], 1e-5)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_fixed_size_under_zero_out_is_refused(accountant):
    with pytest.raises(PrivacyError, match="REPLACE_ONE"):
        epsilon([(fixed(1.0, relation=ZERO_OUT), 1)], 1e-5, accountant=accountant)


@pytest.mark.parametrize(
    "mechanism", [poisson(1.0, limit=700, relation=ADD_REMOVE), poisson(1.0, relation=REPLACE_ONE)]
)
def test_what_renyi_cannot_account_for_is_refused(mechanism):
    with pytest.raises(PrivacyError, match="use 'pld'"):
        epsilon([(mechanism, 10)], 1e-5, accountant="rdp")


def test_zero_out_costs_what_add_remove_costs():
    for accountant in ("pld", "rdp"):
        for make in (poisson, full):
            costs = [
                epsilon([(make(1.0, relation=each), 20)], 1e-5, accountant=accountant)
                for each in (ZERO_OUT, ADD_REMOVE)
            ]
            assert costs[0] == costs[1]


def test_relations_cannot_be_mixed():
    with pytest.raises(PrivacyError, match="mixes"):
        epsilon([(full(1.0), 1), (full(1.0, REPLACE_ONE), 1)], 1e-5)


def test_importing_does_not_load_the_accounting_library():
    code = (
        "import sys; import clipless.accounting._epsilon, clipless.accounting._calibration;"
        "import clipless.ledger._ledger; assert 'dp_accounting' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- Numbers that must not be misread -----------------------------------------------------------


def test_nothing_spent_is_zero_and_no_noise_is_infinite():
    for accountant in ("pld", "rdp"):
        assert epsilon([], 1e-5, accountant=accountant) == 0.0
        assert epsilon([(poisson(1.0), 0)], 1e-5, accountant=accountant) == 0.0
        assert epsilon([(poisson(0.0), 0)], 1e-5, accountant=accountant) == 0.0
        assert epsilon([(poisson(0.0), 1)], 1e-5, accountant=accountant) == math.inf
        assert epsilon([(poisson(1.0), 9), (full(0.0), 1)], 1e-5, accountant=accountant) == math.inf
        assert delta([(poisson(0.0), 1)], 3.0, accountant=accountant) == 1.0
        assert delta([], 3.0, accountant=accountant) == 0.0
    assert delta([(poisson(1.0), 1)], math.inf) == 0.0


@pytest.mark.parametrize("sigma", [0.1, 0.03, 0.01, 1e-3, 1e-6, 1e-100])
def test_tiny_noise_is_never_underestimated(sigma):
    assert epsilon([(full(sigma), 1)], 1e-5) >= gaussian_epsilon(max(sigma, 1e-3), 1e-5)
    # One sampled step may show the example with probability 0.01, far above delta.
    log_odds = gaussian_epsilon(max(sigma, 0.05), 1e-5 / 0.01) + math.log(0.01)
    assert epsilon([(poisson(sigma), 1)], 1e-5) >= log_odds


@pytest.mark.parametrize("rate", [1e-5, 1e-7])
def test_tiny_rates_are_not_free(rate):
    steps = int(0.1 / rate)
    for accountant in ("pld", "rdp"):
        ours = epsilon([(poisson(0.5, rate=rate), steps)], 1e-5, accountant=accountant)
        assert ours >= poisson_lower_bound(rate, 0.5, steps, 1e-5) > 0


def test_renyi_rounding_is_on_the_safe_side():
    # The library's divergences of such a step are below the truth at some of the orders.
    rate, sigma = 1e-9, 100.0
    orders, divergences = rdp.step_divergences(poisson(sigma, rate=rate))
    assert np.all(divergences >= orders * rate**2 * math.expm1(sigma**-2) / 2)


def test_delta_below_the_resolution_is_refused_not_guessed():
    with pytest.raises(PrivacyError, match="too small"):
        epsilon([(poisson(1.0), 1000)], 1e-13)
    assert epsilon([(poisson(1.0), 1000)], 1e-13, accountant="rdp") > 0


def test_numerical_failure_raises(monkeypatch):
    for failure in (lambda *_: math.nan, lambda *_: 1 / 0, lambda *_: math.exp(1e4)):
        _accounting._delta.cache_clear()
        monkeypatch.setattr(_pld, "delta", failure)
        with pytest.raises(PrivacyError):
            delta([(poisson(1.0), 17)], 1.0)
    monkeypatch.setattr(_pld, "epsilon", lambda *_: -0.5)
    _accounting._epsilon.cache_clear()
    assert epsilon([(poisson(1.0), 17)], 1e-5) == SAMPLER_EPSILON
    _accounting._epsilon.cache_clear()
    _accounting._delta.cache_clear()


def test_a_coarse_grid_only_overestimates(monkeypatch):
    runs = ((poisson(0.7, rate=1e-3), 5000),)
    fine = _pld.epsilon(runs, 1e-5)
    for width in (1e-3, 1e-2):
        monkeypatch.setattr(_pld, "grid_width", lambda _, width=width: width)
        assert _pld.epsilon(runs, 1e-5) > fine


@pytest.mark.parametrize("bad", [0.0, 1.0, -1e-5, 2.0, math.nan])
def test_bad_deltas_are_refused(bad):
    with pytest.raises(ValueError, match="delta"):
        epsilon([(poisson(1.0), 1)], bad)


def test_bad_questions_are_refused():
    with pytest.raises(ValueError, match="negative"):
        epsilon([(poisson(1.0), -1)], 1e-5)
    with pytest.raises(TypeError):
        epsilon([(poisson(1.0), 1.5)], 1e-5)
    with pytest.raises(TypeError, match="Mechanism"):
        epsilon([(1.0, 1)], 1e-5)
    with pytest.raises(ValueError, match="accountant"):
        epsilon([(poisson(1.0), 1)], 1e-5, accountant="gdp")
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match="epsilon"):
            delta([(poisson(1.0), 1)], bad)
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="noise_multiplier"):
            poisson(bad)
    for build in (
        lambda: poisson(1.0, rate=0.0),
        lambda: poisson(1.0, rate=1.1),
        lambda: poisson(1.0, limit=0),
        lambda: fixed(1.0, batch=N + 1),
        lambda: fixed(1.0, batch=0),
        lambda: poisson(1.0, size=0),
        lambda: Mechanism(noise_multiplier=1.0, sampling=None),
        lambda: poisson(1.0, relation="add_remove"),
    ):
        with pytest.raises(ValueError):  # noqa: PT011
            build()


# --- Speed, merging, curves ---------------------------------------------------------------------


def test_a_hundred_thousand_steps_at_three_levels_take_seconds():
    history = [(poisson(1.01), 40_000), (poisson(1.27), 30_000), (poisson(1.53), 30_000)]
    start = time.perf_counter()
    first = epsilon(history, 1e-5)
    assert time.perf_counter() - start < 10.0
    start = time.perf_counter()
    assert epsilon(history, 1e-5) == first
    assert time.perf_counter() - start < 0.05


def test_a_million_steps_at_a_small_rate_take_seconds():
    start = time.perf_counter()
    assert 0.5 < epsilon([(poisson(0.7, rate=1e-4), 1_000_000)], 1e-6) < 1.5
    assert time.perf_counter() - start < 10.0


def test_equal_mechanisms_are_merged_whatever_their_order():
    together = epsilon([(poisson(1.1), 300), (poisson(2.2), 50)], 1e-5)
    scattered = [(poisson(2.2), 20)] + [(poisson(1.1), 1)] * 300 + [(poisson(2.2), 30)]
    assert epsilon(scattered, 1e-5) == pytest.approx(together, rel=1e-9)


def test_a_noise_level_for_every_step_is_an_upper_bound_close_to_the_truth():
    schedule = [(poisson(1.0 + step / 50), 1) for step in range(100)]
    coarse = epsilon(schedule, 1e-5)
    renyi = epsilon(schedule, 1e-5, accountant="rdp")
    grouped = [(poisson(1.0 + step / 50), 10) for step in range(0, 100, 10)]
    above = epsilon(grouped, 1e-5)
    below = epsilon([(poisson(m.noise_multiplier + 9 / 50), n) for m, n in grouped], 1e-5)
    assert below < coarse < above * 1.01
    assert coarse < renyi


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_curves_are_pointwise_and_monotone(accountant):
    common = {"mechanism": poisson(1.3), "accountant": accountant, "history": [(full(20.0), 1)]}
    steps = [0, 10, 100, 1000]
    curve = epsilon_curve(steps=steps, delta=1e-5, **common)
    assert curve[-1] == epsilon(
        [(full(20.0), 1), (poisson(1.3), 1000)], 1e-5, accountant=accountant
    )
    assert list(curve) == sorted(curve)
    assert curve[0] > 0
    mechanism, start = common["mechanism"], common.get("history", ())
    deltas = [delta([*start, (mechanism, count)], 0.5, accountant=accountant) for count in steps]
    assert list(deltas) == sorted(deltas)
    profile = [
        epsilon([(poisson(1.3), 100)], each, accountant=accountant) for each in (1e-3, 1e-5, 1e-7)
    ]
    assert list(profile) == sorted(profile)


def test_epsilon_and_delta_are_inverse():
    for accountant in ("pld", "rdp"):
        history = [(poisson(1.0), 1000)]
        eps = epsilon(history, 1e-5, accountant=accountant)
        assert delta(history, eps, accountant=accountant) == pytest.approx(1e-5, rel=1e-3)


@settings(max_examples=8)
@given(
    rate=st.floats(1e-3, 0.3),
    sigma=st.floats(0.6, 8.0),
    steps=st.integers(1, 3000),
    relation=st.sampled_from(list(Relation)),
)
def test_epsilon_is_monotone(rate, sigma, steps, relation):
    def cost(rate, sigma, steps):
        return epsilon([(poisson(sigma, rate=rate, relation=relation), steps)], 1e-5)

    here = cost(rate, sigma, steps)
    # In the hundreds the grid gives up, at one noise earlier than at another, and says infinite.
    assume(here < 100)
    # Moves of 10% outweigh the 0.1% by which the width of the grid shifts the bound.
    assert cost(rate, sigma * 1.1, steps) <= here + 1e-6
    assert cost(rate * 1.1, sigma, steps) >= here - 1e-6
    assert cost(rate, sigma, math.ceil(steps * 1.1)) >= here - 1e-6


def test_default_delta_is_a_tenth_of_one_over_n_rounded_down():
    expected = {1: 1e-4, 1000: 1e-4, 1187: 8e-5, 9999: 1e-5, 10_000: 1e-5, 60_000: 1e-6}
    expected |= {99_999: 1e-6, 100_000: 1e-6, 162_079: 6e-7, 1_281_167: 7e-8}
    for size, value in expected.items():
        assert default_delta(size) == value
    for size in range(1, 30_000, 7):
        wanted = min(1e-4, 0.1 / size)
        assert wanted / 2 < default_delta(size) <= wanted * (1 + 1e-12)
    with pytest.raises(ValueError, match="dataset_size"):
        default_delta(0)


def test_a_delta_that_is_chosen_is_looked_at():
    assert chosen_delta(None, 60_000) == 1e-6
    assert chosen_delta(1e-6, 60_000) == 1e-6
    with pytest.warns(UserWarning, match=r"above 0\.1/N"):
        assert chosen_delta(LargeDelta(1e-5), 60_000) == 1e-5
    with pytest.raises(PrivacyError, match=r"above 0\.1/N.*LargeDelta"):
        chosen_delta(1e-5, 60_000)
    for each in (0.99999 / 10, 0.11 / 10):
        with pytest.warns(UserWarning, match="publishes one example"):
            chosen_delta(LargeDelta(each), 10)
    for each in (1 / 60_000, 1e-4, 0.5, LargeDelta(1e-4), LargeDelta(0.5)):
        with pytest.raises(PrivacyError, match="at least 1/N"):
            chosen_delta(each, 60_000)
    for each in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="strictly between"):
            chosen_delta(each, 60_000)


@pytest.mark.parametrize("mechanism", [poisson(1.0), poisson(0.1, limit=7), fixed(2.0), full(1e-7)])
def test_mechanisms_survive_as_plain_data(mechanism):
    import json

    assert Mechanism.from_dict(json.loads(json.dumps(mechanism.to_dict()))) == mechanism


def test_plain_data_of_a_newer_version_is_refused():
    for change, message in (
        ({"relation": "group_of_three"}, "newer version"),
        ({"sampling": {"kind": "shuffled", "dataset_size": 3}}, "newer version"),
        ({"bias": 1}, "unknown fields"),
    ):
        with pytest.raises(ValueError, match=message):
            Mechanism.from_dict(poisson(1.0).to_dict() | change)
    with pytest.raises(ValueError, match="lacks"):
        Mechanism.from_dict({"noise_multiplier": 1.0})
