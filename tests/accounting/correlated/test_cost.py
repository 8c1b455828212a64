"""What correlated noise costs, against closed forms; and the rule that chooses."""

import math

import numpy as np
import pytest
from scipy import stats

from clipless.accounting import Mechanism, PoissonSampling, epsilon
from clipless.accounting.correlated import (
    BandedStrategy,
    BufferedStrategy,
    CyclicPoisson,
    FixedOrderEpochs,
    OptimizerWorkload,
    noise_candidates,
    optimised_strategy,
)

ORDER = FixedOrderEpochs(dataset_size=10_000, steps_per_pass=10)


def gaussian_delta(mu, target):
    """Return the exact delta of a Gaussian mechanism with distance mu (Balle and Wang 2018)."""
    return stats.norm.cdf(mu / 2 - target / mu) - math.exp(target) * stats.norm.cdf(
        -mu / 2 - target / mu
    )


@pytest.mark.parametrize("steps", [1, 10, 11, 40])
def test_passes_without_sampling_cost_one_gaussian_mechanism(steps):
    strategy = BandedStrategy.square_root(steps=40, bands=10)
    releases = ORDER.releases(strategy, noise_multiplier=3.0, steps=steps)
    passes = math.ceil(steps / 10)
    assert sum(count for _, count in releases) == passes
    spent = epsilon(releases, 1e-5)
    assert gaussian_delta(math.sqrt(passes) / 3.0, spent) == pytest.approx(1e-5, rel=0.02)


def test_passes_of_unequal_columns_cost_their_sensitivity_at_every_moment():
    strategy = optimised_strategy(OptimizerWorkload(steps=40).matrix(), bands=10, steps_per_pass=10)
    squares = strategy.column_squares().reshape(4, 10).cumsum(axis=0).max(axis=1)
    for passes in range(1, 5):
        spent = epsilon(ORDER.releases(strategy, noise_multiplier=3.0, steps=10 * passes), 1e-5)
        exact = gaussian_delta(squares[passes - 1] ** 0.5 / 3.0, spent)
        assert exact == pytest.approx(1e-5, rel=0.02)
        assert exact <= 1e-5


def test_buffers_cost_their_sensitivity():
    strategy = BufferedStrategy(steps=40, amplitudes=(0.3, 0.2), decays=(0.5, 0.95))
    spent = epsilon(ORDER.releases(strategy, noise_multiplier=3.0), 1e-5)
    mu = strategy.sensitivity(participations=4, separation=10) / 3.0
    assert gaussian_delta(mu, spent) == pytest.approx(1e-5, rel=0.02)


def test_cyclic_sampling_costs_rounds_of_the_rate_of_a_group():
    groups = CyclicPoisson(dataset_size=10_000, rate=0.02, groups=4)
    strategy = BandedStrategy.square_root(steps=42, bands=4)
    column = strategy.sensitivity(participations=1, separation=4)
    assert column == pytest.approx(1.0, rel=1e-3)  # entries are rounded
    plain = Mechanism(
        noise_multiplier=1.0 / column, sampling=PoissonSampling(dataset_size=10_000, rate=0.08)
    )
    found = epsilon(groups.releases(strategy, noise_multiplier=1.0), 1e-5)
    assert found == pytest.approx(epsilon([(plain, 11)], 1e-5), rel=1e-9)
    # One band in one group is Poisson sampling with independent noise.
    one = CyclicPoisson(dataset_size=10_000, rate=0.02, groups=1)
    once = one.releases(BandedStrategy.independent(steps=42), noise_multiplier=1.0)
    sigma = once[0][0].noise_multiplier
    assert sigma == pytest.approx(1.0, rel=1e-9)
    plain = PoissonSampling(dataset_size=10_000, rate=0.02)
    assert once == ((Mechanism(noise_multiplier=sigma, sampling=plain), 42),)


def test_larger_columns_cost_more():
    groups = CyclicPoisson(dataset_size=10_000, rate=0.02, groups=4)
    strategy = BandedStrategy.from_table(2.0 * np.ones((8, 1)))
    ((release, rounds),) = groups.releases(strategy, noise_multiplier=1.0)
    assert release.noise_multiplier == pytest.approx(0.5, rel=1e-9)
    assert rounds == 2


@pytest.mark.parametrize("sampling", [ORDER, CyclicPoisson(dataset_size=9_000, rate=0.1, groups=5)])
def test_the_noise_for_a_budget_keeps_it(sampling):
    strategy = BandedStrategy.square_root(steps=25, bands=5)
    sigma = sampling.noise_for(strategy, target_epsilon=2.0, target_delta=1e-5)
    spent = epsilon(sampling.releases(strategy, noise_multiplier=sigma), 1e-5)
    assert 1.99 < spent <= 2.0


def test_bands_that_a_schedule_does_not_carry_are_refused():
    wide = BandedStrategy.square_root(steps=25, bands=12)
    with pytest.raises(ValueError, match="comes again after 10 steps"):
        ORDER.releases(wide, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="may come again after 5 steps"):
        CyclicPoisson(dataset_size=9_000, rate=0.1, groups=5).releases(wide, noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"rate \* groups"):
        CyclicPoisson(dataset_size=9_000, rate=0.3, groups=5)


def test_the_rule_prefers_independent_noise_for_large_batches_and_memory_for_one_pass():
    large = noise_candidates(
        OptimizerWorkload(steps=30), dataset_size=10_000, batch_size=5_000,
        target_epsilon=1.0, target_delta=1e-5, modes=("poisson", "epochs"),
    )  # fmt: skip
    assert large[0].mode == "poisson"
    assert large[0].memory == 0
    once = noise_candidates(
        OptimizerWorkload(steps=50), dataset_size=10_000, batch_size=200,
        target_epsilon=8.0, target_delta=1e-5, modes=("poisson", "epochs"),
    )  # fmt: skip
    assert once[0].mode == "epochs"
    assert once[0].relative_error < 0.6
    assert once[0].relative_error <= once[-1].relative_error
    for each in once:
        assert str(each).startswith(each.mode)
