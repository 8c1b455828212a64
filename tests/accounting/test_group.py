"""Group privacy by the mixture's own loss, against closed forms and plain integration."""

import math

import numpy as np
import pytest
from scipy import stats

from clipless.accounting import (
    FixedSizeSampling,
    FullBatch,
    Mechanism,
    PoissonSampling,
    Relation,
    epsilon,
    group_epsilon,
)
from clipless.errors import PrivacyError

POISSON = PoissonSampling(dataset_size=10_000, rate=0.02)


def integrated_delta(sigma, rate, records, target):
    """Return the hockey-stick divergence of one step, both ways, by summation on a fine grid."""
    x = np.linspace(-12 * sigma, records + 12 * sigma, 400_001)
    base = stats.norm.pdf(x, scale=sigma)
    numbers = np.arange(records + 1)
    mixture = sum(
        weight * stats.norm.pdf(x, loc=number, scale=sigma)
        for number, weight in zip(numbers, stats.binom.pmf(numbers, records, rate), strict=True)
    )
    step = x[1] - x[0]
    return max(
        np.maximum(first - math.exp(target) * second, 0).sum() * step
        for first, second in ((base, mixture), (mixture, base))
    )


@pytest.mark.parametrize("records", [1, 3, 12])
def test_one_step_is_the_integral(records):
    sampling = PoissonSampling(dataset_size=1000, rate=0.1)
    found = group_epsilon(
        [(Mechanism(noise_multiplier=2.0, sampling=sampling), 1)], 1e-4, records=records
    )
    assert integrated_delta(2.0, 0.1, records, found) <= 1e-4
    assert integrated_delta(2.0, 0.1, records, 0.99 * found) > 1e-4


def test_one_record_costs_what_the_accountant_says():
    run = [(Mechanism(noise_multiplier=1.0, sampling=POISSON), 300)]
    assert group_epsilon(run, 1e-5, records=1) == pytest.approx(epsilon(run, 1e-5), rel=0.01)


def test_full_batches_are_gaussian_at_k_times_the_distance():
    step = Mechanism(noise_multiplier=20.0, sampling=FullBatch(dataset_size=100))
    found = group_epsilon([(step, 4)], 1e-5, records=5)
    mu = 5 * 2 / 20.0
    exact = stats.norm.cdf(mu / 2 - found / mu) - math.exp(found) * stats.norm.cdf(
        -mu / 2 - found / mu
    )
    assert exact == pytest.approx(1e-5, rel=0.05)
    assert exact <= 1e-5


def test_it_grows_with_records_and_stays_below_group_privacy_of_one_pair():
    run = [(Mechanism(noise_multiplier=1.0, sampling=POISSON), 100)]
    found = [group_epsilon(run, 1e-5, records=records) for records in (1, 2, 5)]
    assert found == sorted(found)
    # (epsilon, delta) for one gives (k epsilon, (e^(k epsilon) - 1) / (e^epsilon - 1) delta) for k.
    own = epsilon(run, 2e-7)
    assert 2e-7 * math.expm1(2 * own) / math.expm1(own) <= 1e-5
    assert found[1] < 0.9 * 2 * own
    # At the same delta two records cost more than twice what one costs: nobody may say otherwise.
    assert found[1] > 2 * found[0]


def test_a_thousand_records_have_a_number_and_no_noise_has_none():
    gentle = Mechanism(
        noise_multiplier=50.0, sampling=PoissonSampling(dataset_size=10_000, rate=0.01)
    )
    found = group_epsilon([(gentle, 20)], 1e-5, records=1000)
    assert 1 < found < 20
    bare = Mechanism(noise_multiplier=0.0, sampling=POISSON)
    assert group_epsilon([(bare, 1)], 1e-5, records=2) == math.inf
    assert group_epsilon([], 1e-5, records=2) == 0.0


def test_what_has_no_bound_is_refused():
    cut = PoissonSampling(dataset_size=100, rate=0.1, max_batch_size=20)
    fixed = FixedSizeSampling(dataset_size=100, batch_size=10)
    for sampling, relation in ((cut, Relation.ZERO_OUT), (fixed, Relation.REPLACE_ONE)):
        step = Mechanism(noise_multiplier=1.0, sampling=sampling, relation=relation)
        with pytest.raises(PrivacyError, match="group privacy"):
            group_epsilon([(step, 1)], 1e-5, records=2)
    with pytest.raises(ValueError, match="records"):
        group_epsilon([], 1e-5, records=0)
