"""Shares of noise: the theorem against sums that are computed, and the sampler against the law."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from clipless.common import Query
from clipless.federated import SHARE_STEPS, NoiseShare, largest_error


def rounded_gaussian(deviation, width):
    """Probabilities of round(N(0, deviation^2)) from -width to width."""
    ends = np.arange(-width, width + 2) - 0.5
    return np.diff(stats.norm.cdf(ends / deviation))


def spline_rounding(shares, deviation, width):
    """Probabilities of N(0, m a^2), rounded at random with a B-spline of order m."""
    ends = shares / 2

    def density(place):
        # of N(0, m a^2) plus m uniforms, at a whole number: h convolved m times over the reals
        if shares == 1:
            return stats.norm.cdf((place + 0.5) / deviation) - stats.norm.cdf(
                (place - 0.5) / deviation
            )
        found, _ = integrate.quad(
            lambda u: stats.norm.pdf(place - u, scale=math.sqrt(shares) * deviation)
            * spline(shares, u),
            -ends, ends, points=list(np.arange(-ends, ends + 1)), limit=200, epsabs=1e-13,
        )  # fmt: skip
        return found

    return np.array([density(place) for place in range(-width, width + 1)])


def spline(order, u):
    """The density of a sum of uniforms on [-1/2, 1/2]."""
    x = u + order / 2
    terms = ((-1) ** k * math.comb(order, k) * max(x - k, 0.0) ** (order - 1)
             for k in range(order + 1))  # fmt: skip
    return max(sum(terms) / math.factorial(order - 1), 0.0)


@pytest.mark.parametrize("shares", [2, 3, 5])
@pytest.mark.parametrize("deviation", [0.4, 1.0, 1.5])
def test_a_sum_of_shares_is_a_rounding_at_random_of_one_gaussian(shares, deviation):
    """The total variation that is found keeps the bound, and is not zero where shares are small."""
    width = math.ceil(9 * math.sqrt(shares) * deviation + shares)
    one = rounded_gaussian(deviation, width)
    summed = one
    for _ in range(shares - 1):
        summed = np.convolve(summed, one)
    middle = len(summed) // 2
    summed = summed[middle - width : middle + width + 1]
    found = 0.5 * np.abs(summed - spline_rounding(shares, deviation, width)).sum()
    assert found <= largest_error(shares=shares, deviation=deviation)
    if deviation == 0.4:
        assert found > 1e-3  # otherwise the two would be the same, and the test could not fail
    if deviation == 1.5:
        assert found < 1e-9


def test_the_weights_of_the_rounding_add_up_to_one_wherever_it_begins():
    for order in (1, 2, 5):
        for start in (0.0, 0.25, 0.61):
            places = np.arange(-order, order + 1)
            if order == 1:
                weights = [float(-0.5 < k - start <= 0.5) for k in places]
            else:
                weights = [spline(order, k - start) for k in places]
            assert sum(weights) == pytest.approx(1.0, abs=1e-12)


def test_what_is_left_out_is_far_below_any_delta():
    assert largest_error(shares=2**20, deviation=SHARE_STEPS) == 0.0
    assert largest_error(shares=1000, deviation=30.0) < 1e-90


def test_shares_are_gaussian_whole_numbers_and_never_the_same():
    noise, size = NoiseShare(insecure_seed=3), 200_000
    query = Query("update", 1.0, float(SHARE_STEPS))
    first, second = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    noise.add_([first], [query])
    noise.add_([second], [query])
    for share in (first, second):
        assert torch.equal(share, share.round())
        assert stats.kstest((share / SHARE_STEPS).numpy(), "norm").pvalue > 1e-4
        assert float(share.std()) == pytest.approx(SHARE_STEPS, rel=0.01)
        assert not torch.equal(share % 256, torch.zeros(size, dtype=torch.float64))
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.01
    fresh = [torch.zeros(4, dtype=torch.float64) for _ in range(2)]
    for value in fresh:
        NoiseShare().add_([value], [query])
    assert not torch.equal(*fresh)
    with pytest.raises(ValueError, match="a share has deviation"):
        noise.add_([first], [Query("update", 1.0, 3.0)])
