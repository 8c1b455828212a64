"""Bounds from many runs: their coverage, and what is refused."""

import dataclasses
import itertools
import json
import math

import pytest
import torch
from scipy import optimize, stats

from clipless.audit import audit_repeated_training, distinguishing_audit
from clipless.errors import PrivacyError
from tests.audit.broken import background, table_trainer, tokens
from tests.audit.nominal import nominal_epsilons  # noqa: F401


def gaussian_epsilon(shift, delta):
    """The epsilon of one Gaussian release whose mean moves by `shift` standard deviations."""

    def excess(epsilon):
        below, above = stats.norm.cdf([-epsilon / shift + shift / 2, -epsilon / shift - shift / 2])
        return below - math.exp(epsilon) * above - delta

    return optimize.brentq(excess, 0, 50)


def scores(count, shift, generator):
    out, within = torch.randn(2, count, generator=generator, dtype=torch.float64)
    return out, within + shift


@pytest.mark.parametrize("delta", [1e-5, 0.05])
def test_the_bound_stays_below_the_truth(delta):
    """200 audits of a release whose epsilon is known; at most 5% may exceed it."""
    generator = torch.Generator().manual_seed(0)
    true, found = gaussian_epsilon(1.0, delta), []
    for _ in range(200):
        out, within = scores(200, 1.0, generator)
        found.append(distinguishing_audit(out, within, delta=delta).lower_bound)
    assert sum(bound > true for bound in found) <= 10
    assert max(found) > 0.2 * true


def test_coverage_where_the_bound_is_tight():
    """Randomised response at epsilon = 1: one threshold says it all, and 5% may exceed 1."""
    generator = torch.Generator().manual_seed(0)
    exceeded, largest = 0, 0.0
    for _ in range(300):
        honest = torch.rand(2, 600, generator=generator) < math.e / (1 + math.e)
        out, within = (~honest[0]).double(), honest[1].double()
        bound = distinguishing_audit(out, within, delta=0.0).lower_bound
        exceeded, largest = exceeded + (bound > 1.0), max(largest, bound)
    assert exceeded <= 22  # more at exactly 5% have a probability of 2%
    assert largest > 0.9


def test_both_ends_count():
    """A release that only ever betrays who is out is found as well."""
    generator = torch.Generator().manual_seed(0)
    out, within = torch.rand(2, 400, generator=generator)
    out = torch.where(torch.rand(400, generator=generator) < 0.5, out - 10, out)
    bound = distinguishing_audit(out, within, delta=1e-3).lower_bound
    assert bound > 2
    assert distinguishing_audit(-within, -out, delta=1e-3).lower_bound == pytest.approx(bound, 0.5)


def test_more_cannot_be_proved_than_runs_allow():
    out, within = torch.zeros(400) + torch.arange(400) / 1e4, torch.ones(400) * 9
    result = distinguishing_audit(out, within, delta=0.0, claimed_epsilon=1.0)
    assert result.lower_bound == pytest.approx(math.log(400 / 7.4), abs=0.05)
    assert result.exposed
    assert json.loads(json.dumps(result.to_dict()))["runs"] == 400
    assert "400 runs" in str(result)


def test_refusals_of_scores():
    good = torch.arange(10.0)
    with pytest.raises(ValueError, match="four runs"):
        distinguishing_audit(good[:3], good, delta=1e-5)
    with pytest.raises(ValueError, match="not finite"):
        distinguishing_audit(good / 0, good, delta=1e-5)
    with pytest.raises(ValueError, match="delta"):
        distinguishing_audit(good, good, delta=1.0)


CANARY = tuple(part[4:] for part in tokens(5))


def test_noise_that_repeats_is_refused():
    """A fixed seed would separate the data sets perfectly, for no fault of the trainer."""
    make = table_trainer(5, noise=1.0, steps=1, seed=7)
    with pytest.raises(PrivacyError, match="same noise"):
        audit_repeated_training(make, background(), canary=CANARY, runs=4)


def test_a_rate_that_depends_on_the_size_is_refused():
    make = table_trainer(5, noise=1.0, steps=1, seed=itertools.count(), rate=0.5)

    def by_batch_size(size):
        trainer = make(size)
        trainer._options = dataclasses.replace(trainer._options, sampling="poisson")
        return trainer

    with pytest.raises(ValueError, match="same rate"):
        audit_repeated_training(by_batch_size, background(), canary=CANARY, runs=4)
    assert audit_repeated_training(make, background(), canary=CANARY, runs=4).lower_bound == 0.0


def test_one_canary_only():
    make = table_trainer(5, noise=1.0, steps=1, seed=0)
    with pytest.raises(ValueError, match="one canary"):
        audit_repeated_training(make, background(), canary=tokens(2), runs=4)
