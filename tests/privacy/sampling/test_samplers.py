"""The samples are what the accountant is told, to within what a factor of 1.05 would show.

Seeds are fixed, so nothing here fails by chance. Thresholds are stated as a p-value or in
standard errors; `test_the_thresholds_notice_five_percent` shows that they are not too wide.
"""

import json
import math

import numpy as np
import pytest
import torch
from scipy import stats

from clipless.accounting import FixedSizeSampling, FullBatch, PoissonSampling
from clipless.common import fresh_bits
from clipless.errors import PrivacyError
from clipless.privacy import IndexSampler, padded_sampling, steps_of_one_pass
from clipless.privacy.sampling._samplers import largest_sample, shard

P_VALUE = 1e-4
STANDARD_ERRORS = 4.0


def poisson(size, rate, limit=None, seed=0):
    sampling = PoissonSampling(dataset_size=size, rate=rate, max_batch_size=limit)
    return IndexSampler(sampling=sampling, insecure_seed=seed)


def draw_sizes(sampler, steps):
    return np.array([len(indices) for indices in sampler.take(steps=steps)])


def draw_members(sampler, steps):
    """Steps by examples, True where the example is in the step."""
    members = np.zeros((steps, sampler.sampling.dataset_size), dtype=bool)
    for row, indices in zip(members, sampler.take(steps=steps), strict=True):
        row[indices.numpy()] = True
    return members


def size_evidence(sizes, size, rate):
    """Chi-square p-value of the sizes, and how many errors mean and variance are off."""
    law = stats.binom(size, rate)
    edges = np.unique(law.ppf(np.linspace(0.02, 0.98, 25)))
    expected = np.diff(law.cdf(np.concatenate([[-np.inf], edges, [np.inf]]))) * len(sizes)
    bins = np.searchsorted(edges, sizes, side="left")
    observed = np.bincount(bins, minlength=len(expected))
    p_value = stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue
    mean_error = (sizes.mean() - law.mean()) / (law.std() / math.sqrt(len(sizes)))
    fourth = float(law.stats(moments="k")) + 2.0  # variance of (x - mean)^2 over var^2
    variance_error = (sizes.var() / law.var() - 1.0) / math.sqrt(fourth / len(sizes))
    return p_value, abs(mean_error), abs(variance_error)


def inclusion_p_value(counts, steps, rate):
    """Are counts of inclusion those of independent examples, all with the same rate?"""
    statistic = np.sum((counts - steps * rate) ** 2) / (steps * rate * (1.0 - rate))
    below = stats.chi2(len(counts)).cdf(statistic)
    return 2.0 * min(below, 1.0 - below)


# --- Poisson: sizes -----------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.002, 0.02, 0.3, 0.9])
def test_poisson_sizes_are_binomial(rate):
    sizes = draw_sizes(poisson(1500, rate), 40_000)
    p_value, mean_error, variance_error = size_evidence(sizes, 1500, rate)
    assert p_value > P_VALUE
    assert mean_error < STANDARD_ERRORS
    assert variance_error < STANDARD_ERRORS
    # The tails, where a sampler that draws too few candidates would be cut.
    low, high = stats.binom(1500, rate).ppf([0.002, 0.998])
    for tail, expected in (
        (sizes < low, stats.binom(1500, rate).cdf(low - 1)),
        (sizes > high, stats.binom(1500, rate).sf(high)),
    ):
        error = math.sqrt(40_000 * expected)  # zero where there is no tail
        assert abs(tail.sum() - 40_000 * expected) <= STANDARD_ERRORS * error


@pytest.mark.parametrize("factor", [1.05, 1 / 1.05])
def test_the_thresholds_notice_five_percent(factor):
    sizes = draw_sizes(poisson(1500, 0.02 * factor), 40_000)
    p_value, mean_error, _ = size_evidence(sizes, 1500, 0.02)
    assert p_value < P_VALUE
    assert mean_error > STANDARD_ERRORS
    # The right mean with a variance 5% off: sizes spread around the mean.
    sizes = draw_sizes(poisson(1500, 0.3), 40_000)
    spread = sizes.mean() + (sizes - sizes.mean()) * math.sqrt(factor)
    assert size_evidence(spread, 1500, 0.3)[2] > STANDARD_ERRORS
    # A twentieth of the examples 5% more likely than they should be.
    members = draw_members(poisson(1000, 0.3), 20_000)
    counts = members.sum(0).astype(float)
    counts[:50] *= factor
    assert inclusion_p_value(counts, 20_000, 0.3) < P_VALUE


@pytest.mark.parametrize(
    ("size", "rate"), [(10_000_000, 1e-7), (3_000_000, 3e-7), (1_000_000_000, 1e-9)]
)
def test_tiny_rates_are_not_rounded(size, rate):
    drawn = list(poisson(size, rate).take(steps=20_000))
    sizes = np.array([len(indices) for indices in drawn])
    p_value, mean_error, variance_error = size_evidence(sizes, size, rate)
    assert p_value > P_VALUE
    assert mean_error < STANDARD_ERRORS  # 2.8% of the mean
    assert variance_error < STANDARD_ERRORS
    positions = torch.cat(drawn)
    assert stats.kstest(positions.double().numpy() / size, "uniform").pvalue > P_VALUE
    # Birthdays: a generator too coarse for the rate would reach few of the positions, often.
    repeated = len(positions) - len(positions.unique())
    by_chance = len(positions) ** 2 / (2 * size)
    assert repeated <= by_chance + STANDARD_ERRORS * math.sqrt(by_chance) + 1


def test_large_data_sets_are_sampled_in_time_of_the_sample():
    sampler = poisson(10_000_000, 1e-4)
    sizes = draw_sizes(sampler, 2000)  # 2 * 10^10 examples considered
    assert size_evidence(sizes, 10_000_000, 1e-4)[0] > P_VALUE


def test_rate_one_takes_everything():
    assert torch.equal(poisson(17, 1.0).draw(step=3), torch.arange(17))


def test_empty_samples_are_yielded():
    sizes = draw_sizes(poisson(10, 0.05), 20_000)
    expected = 0.95**10
    error = math.sqrt(expected * (1 - expected) / len(sizes))
    assert abs((sizes == 0).mean() - expected) < STANDARD_ERRORS * error
    empty = next(indices for indices in poisson(10, 0.01).take(steps=100) if len(indices) == 0)
    assert empty.dtype == torch.int64
    assert empty.shape == (0,)


# --- Poisson: which examples --------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.8])
def test_every_example_is_equally_likely(rate):
    steps = 20_000
    counts = draw_members(poisson(500, rate), steps).sum(0)
    assert inclusion_p_value(counts, steps, rate) > P_VALUE
    # The ends, where a sampler that jumps would go wrong first.
    error = math.sqrt(rate * (1 - rate) / steps)
    for index in (0, 1, 498, 499):
        assert abs(counts[index] / steps - rate) < STANDARD_ERRORS * error


def test_examples_are_independent_of_each_other():
    steps, size, rate = 40_000, 40, 0.3
    members = draw_members(poisson(size, rate), steps).astype(float)
    joint = members.T @ members / steps
    pairs = np.triu_indices(size, k=1)
    error = rate * (1 - rate) / math.sqrt(steps)  # of a covariance
    covariance = joint[pairs] - rate * (members.mean(0)[pairs[0]] + members.mean(0)[pairs[1]])
    z = (covariance + rate**2) / error
    assert stats.kstest(z, "norm").pvalue > P_VALUE
    assert stats.chi2(len(z)).sf(np.sum(z**2)) > P_VALUE
    for distance in (1, 2, 5):
        near = np.diagonal(joint, distance)
        tolerance = STANDARD_ERRORS * math.sqrt(rate**2 * (1 - rate**2) / steps / len(near)) * 1.5
        assert abs(near.mean() - rate**2) < tolerance < 0.05 * rate**2


def test_steps_are_independent_of_each_other():
    steps, size, rate = 20_000, 60, 0.2
    members = draw_members(poisson(size, rate), steps)
    sizes = members.sum(1) - size * rate
    centred = members - rate
    for lag in (1, 2, 3, 7):
        correlation = np.mean(sizes[lag:] * sizes[:-lag]) / (size * rate * (1 - rate))
        assert abs(correlation) < STANDARD_ERRORS / math.sqrt(steps - lag)
        same = np.mean(centred[lag:] * centred[:-lag], axis=0) / (rate * (1 - rate))
        z = same * math.sqrt(steps - lag)
        assert stats.chi2(size).sf(np.sum(z**2)) > P_VALUE
        assert stats.kstest(z, "norm").pvalue > P_VALUE
    both = (members[1:] & members[:-1]).mean()
    error = math.sqrt(rate**2 * (1 - rate**2) / (size * steps)) * 1.5
    assert abs(both - rate**2) < STANDARD_ERRORS * error < 0.05 * rate**2


def test_neighbouring_seeds_are_independent():
    steps, size, rate = 5000, 60, 0.2
    one = draw_members(poisson(size, rate, seed=0), steps) - rate
    two = draw_members(poisson(size, rate, seed=1), steps) - rate
    correlation = np.mean(one * two) / (rate * (1 - rate))
    assert abs(correlation) < STANDARD_ERRORS / math.sqrt(size * steps)


def test_indices_are_distinct_increasing_and_in_range():
    for indices in poisson(100, 0.7).take(steps=200):
        assert indices.dtype == torch.int64
        assert indices.min() >= 0
        assert indices.max() < 100
        assert (indices.diff() > 0).all()


# --- truncation ---------------------------------------------------------------------------------


def test_truncation_keeps_a_uniform_subset_of_the_drawn_batch():
    size, rate, limit, steps = 50, 0.5, 20, 20_000
    cut, whole = poisson(size, rate, limit), poisson(size, rate)
    counts, kept_ranks, cuts = np.zeros(size), np.zeros(limit + 1), 0
    for short, full in zip(cut.take(steps=steps), whole.take(steps=steps), strict=True):
        assert len(short) == min(len(full), limit)
        assert np.isin(short, full).all()
        counts[short.numpy()] += 1
        if len(full) == limit + 1:
            # One of limit + 1 was dropped: each rank must be as likely to be it.
            kept_ranks += ~np.isin(full, short)
            cuts += 1
        elif len(full) <= limit:
            assert torch.equal(short, full)
    assert stats.chisquare(kept_ranks).pvalue > P_VALUE
    assert cuts > 500
    rate_after = counts.sum() / size / steps
    statistic = np.sum((counts / steps - rate_after) ** 2) * steps
    statistic *= (size - 1) / size / (rate_after * (1 - rate_after))
    assert P_VALUE < stats.chi2(size - 1).cdf(statistic) < 1 - P_VALUE


def test_truncated_rate_is_that_of_the_accounted_event():
    size, rate, limit, steps = 200, 0.1, 18, 20_000
    sizes = draw_sizes(poisson(size, rate, limit), steps)
    support = np.arange(size + 1)
    law = stats.binom(size, rate).pmf(support)
    mean = np.sum(law * np.minimum(support, limit))
    deviation = math.sqrt(np.sum(law * np.minimum(support, limit) ** 2) - mean**2)
    assert abs(sizes.mean() - mean) < STANDARD_ERRORS * deviation / math.sqrt(steps)
    assert sizes.max() == limit


# --- fixed size and full batch ------------------------------------------------------------------


@pytest.mark.parametrize(("size", "batch_size"), [(60, 7), (60, 45), (20_000, 100)])
def test_fixed_size_is_a_uniform_subset(size, batch_size):
    steps = 20_000 if size < 100 else 5000
    sampling = FixedSizeSampling(dataset_size=size, batch_size=batch_size)
    counts = np.zeros(size)
    for indices in IndexSampler(sampling=sampling, insecure_seed=0).take(steps=steps):
        assert indices.dtype == torch.int64
        assert len(indices) == batch_size
        assert (indices.diff() > 0).all()
        counts[indices.numpy()] += 1
    rate = batch_size / size
    statistic = np.sum((counts - steps * rate) ** 2) / (steps * rate * (1 - rate))
    below = stats.chi2(size - 1).cdf(statistic * (size - 1) / size)
    assert P_VALUE / 2 < below < 1 - P_VALUE / 2


def test_fixed_size_pairs_are_those_without_replacement():
    size, batch_size, steps = 12, 4, 30_000
    sampling = FixedSizeSampling(dataset_size=size, batch_size=batch_size)
    members = draw_members(IndexSampler(sampling=sampling, insecure_seed=0), steps).astype(float)
    joint = (members.T @ members / steps)[np.triu_indices(size, k=1)]
    expected = batch_size * (batch_size - 1) / (size * (size - 1))
    z = (joint - expected) / math.sqrt(expected * (1 - expected) / steps)
    assert np.abs(z).max() < STANDARD_ERRORS
    subsets = np.unique(members, axis=0, return_counts=True)[1]
    assert len(subsets) == math.comb(size, batch_size)
    assert stats.chisquare(subsets).pvalue > P_VALUE


def test_fixed_size_of_all_is_all():
    sampling = FixedSizeSampling(dataset_size=9, batch_size=9)
    assert torch.equal(IndexSampler(sampling=sampling).draw(step=0), torch.arange(9))


def test_full_batch_is_complete():
    for indices in IndexSampler(sampling=FullBatch(dataset_size=11)).take(steps=3):
        assert sorted(indices.tolist()) == list(range(11))


# --- randomness and state -----------------------------------------------------------------------


def test_default_randomness_is_fresh_and_a_seed_repeats():
    sampling = PoissonSampling(dataset_size=1000, rate=0.5)
    first, second = IndexSampler(sampling=sampling), IndexSampler(sampling=sampling)
    assert not first.insecure
    assert not torch.equal(first.draw(step=0), second.draw(step=0))
    assert not torch.equal(first.draw(step=0), first.draw(step=1))
    one, two = poisson(1000, 0.5, seed=7), poisson(1000, 0.5, seed=7)
    assert one.insecure
    for a, b in zip(one.take(steps=5), two.take(steps=5), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.draw(step=5), poisson(1000, 0.5, seed=8).draw(step=5))


def test_global_seeds_do_not_matter():
    sampling = PoissonSampling(dataset_size=1000, rate=0.5)
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        draws.append(IndexSampler(sampling=sampling).draw(step=0))
    assert not torch.equal(*draws)
    state = torch.get_rng_state()
    poisson(1000, 0.5).draw(step=0)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    "sampling",
    [
        PoissonSampling(dataset_size=300, rate=0.1),
        PoissonSampling(dataset_size=300, rate=0.1, max_batch_size=20),
        FixedSizeSampling(dataset_size=300, batch_size=30),
    ],
)
def test_state_continues_the_same_schedule(sampling):
    sampler = IndexSampler(sampling=sampling)
    list(sampler.take(steps=4))
    state = json.loads(json.dumps(sampler.state_dict()))
    expected = list(sampler.take(steps=4))
    other = IndexSampler(sampling=sampling)
    other.load_state_dict(state)
    assert other.step == 4
    assert not other.insecure
    for a, b in zip(expected, other.take(steps=4), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(other.draw(step=7), expected[3])
    assert other.comes_after(state)
    assert not IndexSampler(sampling=sampling).comes_after(state)
    with pytest.raises(PrivacyError, match="no longer known"):
        other.draw(step=4)  # keys lead forward alone


def test_drawing_ahead_changes_no_sample():
    """Samples are drawn some steps at a time; each still is a function of key and step alone."""
    sampler = poisson(500, 0.1, seed=3)
    for step in (0, 1, 2, 40, 41, 5, 5, 17):
        assert torch.equal(sampler.draw(step=step), poisson(500, 0.1, seed=3).draw(step=step))
    before = sampler.draw(step=18)
    sampler.draw(step=19)  # 20 and later ones are drawn already
    sampler.begin(key=fresh_bits(128), repeated=poisson(500, 0.1, seed=4).state_dict(), until=30)
    assert not torch.equal(sampler.draw(step=20), poisson(500, 0.1, seed=3).draw(step=20))
    sampler.load_state_dict(poisson(500, 0.1, seed=3).state_dict())
    assert torch.equal(sampler.draw(step=18), before)


def test_state_of_another_sampling_is_refused():
    state = poisson(300, 0.1).state_dict()
    with pytest.raises(PrivacyError, match="saved under PoissonSampling"):
        poisson(300, 0.2).load_state_dict(state)


def test_a_state_is_repeated_up_to_a_step_and_drawn_afresh_from_there():
    sampling = PoissonSampling(dataset_size=300, rate=0.5)
    saved = IndexSampler(sampling=sampling)
    list(saved.take(steps=3))
    state = saved.state_dict()
    others = [IndexSampler(sampling=sampling) for _ in range(2)]
    for other in others:
        other.begin(key=fresh_bits(128), repeated=state, until=5)
        assert other.step == 3
        assert not other.insecure
    for step in (3, 4):
        assert torch.equal(others[0].draw(step=step), saved.draw(step=step))
        assert torch.equal(others[1].draw(step=step), saved.draw(step=step))
    for step in (5, 6, 20):
        drawn = [each.draw(step=step) for each in (saved, *others)]
        assert not torch.equal(drawn[0], drawn[1])
        assert not torch.equal(drawn[0], drawn[2])
        assert not torch.equal(drawn[1], drawn[2])
    assert others[0].state_dict()["key"] == state["key"]  # of the step that comes next
    list(others[0].take(steps=2))
    assert others[0].state_dict()["key"] != state["key"]
    others[1].repeat_no_more()
    assert not torch.equal(others[1].draw(step=4), saved.draw(step=4))


# --- descriptions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "rate"),
    [(100, 0.01), (1000, 0.05), (60_000, 0.01), (10**6, 0.1), (10**9, 1e-8), (40_000, 0.9)],
)
def test_padding_cuts_one_step_in_a_billion_at_most(size, rate):
    sampling = PoissonSampling(dataset_size=size, rate=rate)
    padded = padded_sampling(sampling)
    assert padded.dataset_size == size
    assert padded.rate == rate
    assert padded.max_batch_size % 8 == 0
    law = stats.binom(size, rate)
    assert law.sf(padded.max_batch_size) <= 1e-9
    assert law.sf(padded.max_batch_size - 9) > 1e-9  # the next smaller one would cut more
    assert largest_sample(padded) == padded.max_batch_size


def test_padding_leaves_alone_what_is_bounded_already():
    for sampling in (
        PoissonSampling(dataset_size=100, rate=0.1, max_batch_size=13),
        PoissonSampling(dataset_size=30, rate=0.9),
        FixedSizeSampling(dataset_size=100, batch_size=10),
        FullBatch(dataset_size=100),
    ):
        assert padded_sampling(sampling) == sampling
    assert largest_sample(PoissonSampling(dataset_size=30, rate=0.9)) == 30


def test_steps_of_one_pass():
    assert steps_of_one_pass(PoissonSampling(dataset_size=1000, rate=0.03)) == 33
    assert steps_of_one_pass(PoissonSampling(dataset_size=1000, rate=0.9)) == 1
    assert steps_of_one_pass(FixedSizeSampling(dataset_size=100, batch_size=30)) == 3
    assert steps_of_one_pass(FullBatch(dataset_size=100)) == 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_shards_partition_the_sample(world_size):
    for indices in poisson(20, 0.2).take(steps=50):
        parts = [shard(indices, rank=r, world_size=world_size) for r in range(world_size)]
        assert sorted(torch.cat(parts).tolist()) == indices.tolist()
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (PoissonSampling(dataset_size=0, rate=0.1), "nothing to sample"),
        (PoissonSampling(dataset_size=10, rate=0.0), "rate=0.0"),
        (PoissonSampling(dataset_size=10, rate=1.5), "rate=1.5"),
        (PoissonSampling(dataset_size=10, rate=float("nan")), "rate=nan"),
        (PoissonSampling(dataset_size=10, rate=1e-12), "rate=1e-12"),
        (PoissonSampling(dataset_size=10, rate=0.1, max_batch_size=0), "max_batch_size=0"),
        (FixedSizeSampling(dataset_size=10, batch_size=11), "without replacement"),
        (FixedSizeSampling(dataset_size=10, batch_size=0), "batch_size=0"),
        ("shuffled", "not a sampling"),
    ],
)
def test_impossible_samplings_are_refused(sampling, message):
    with pytest.raises(PrivacyError, match=message):
        IndexSampler(sampling=sampling)
    with pytest.raises(PrivacyError, match=message):
        padded_sampling(sampling)
