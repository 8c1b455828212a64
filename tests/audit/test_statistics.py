"""Intervals: against another implementation, and by how often they hold."""

import pytest
import torch
from scipy import stats

from clipless.audit._statistics import auroc, clopper_pearson


@pytest.mark.parametrize(("successes", "trials"), [(0, 5), (5, 5), (1, 7), (40, 1000)])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_clopper_pearson(successes, trials, confidence):
    ours = clopper_pearson(successes=successes, trials=trials, confidence=confidence)
    theirs = stats.binomtest(successes, trials).proportion_ci(confidence, method="exact")
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))
    assert ours.value == successes / trials


def test_impossible_trials_are_refused():
    for successes, trials in ((3, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="cannot have succeeded"):
            clopper_pearson(successes=successes, trials=trials, confidence=0.95)


def test_auroc_counts_pairs():
    positives = torch.tensor([0.1, 0.5, 0.5, 0.9])
    negatives = torch.tensor([0.5, 0.0, 0.2])
    pairs = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for a in positives.tolist()
        for b in negatives.tolist()
    ]
    found = auroc(positives=positives, negatives=negatives, confidence=0.95)
    assert found.value == pytest.approx(sum(pairs) / len(pairs))


def test_delong_is_the_spread_of_the_bootstrap():
    generator = torch.Generator().manual_seed(0)
    positives = torch.randn(300, generator=generator) + 1
    negatives = torch.randn(200, generator=generator)
    found = auroc(positives=positives, negatives=negatives, confidence=0.95)
    values = []
    for _ in range(500):
        one, other = (
            group[torch.randint(len(group), (len(group),), generator=generator)]
            for group in (positives, negatives)
        )
        values.append(auroc(positives=one, negatives=other, confidence=0.95).value)
    low, high = torch.tensor(values).quantile(torch.tensor([0.025, 0.975])).tolist()
    assert found.low == pytest.approx(low, abs=0.012)
    assert found.high == pytest.approx(high, abs=0.012)


def test_the_interval_of_the_auroc_holds():
    """Of 400 samples at a known AUROC, 95% intervals miss it in 2.5% to 8%."""
    generator = torch.Generator().manual_seed(1)
    true, missed = float(stats.norm.cdf(0.7 / 2**0.5)), 0
    for _ in range(400):
        found = auroc(
            positives=torch.randn(80, generator=generator) + 0.7,
            negatives=torch.randn(60, generator=generator),
            confidence=0.95,
        )
        missed += not found.low <= true <= found.high
    assert 10 <= missed <= 32


def test_perfect_separation_is_no_certainty():
    found = auroc(positives=torch.arange(20.0) + 100, negatives=torch.arange(20.0), confidence=0.95)
    assert found.value == found.high == 1.0
    assert 0.7 < found.low < 0.9
