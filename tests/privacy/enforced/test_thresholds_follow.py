"""Thresholds follow their quantile from any start, and training ends where the best choice does."""

import math
import random

import pytest
import torch
from torch import nn

from clipless import PrivacyEngine, losses
from clipless.privacy import EnforcedBounds
from clipless.privacy.enforced._controller import FollowedThreshold
from tests.privacy.enforced.runs import enforced_run

TARGET = 0.05


def followed(start, *, noise, steps=300, batch=256, spread=1.0, seed=0):
    """Thresholds over their true quantile, for norms that are lognormal."""
    rng = random.Random(seed)
    quantile = math.exp(1.645 * spread)
    threshold, found, searched = FollowedThreshold(value=start * quantile), [], 0
    for _ in range(steps):
        above = sum(rng.lognormvariate(0, spread) > threshold.value for _ in range(batch)) / batch
        searched += threshold.searching
        deviation = noise / 4 if threshold.searching else noise
        threshold = threshold.after(
            above + rng.gauss(0, deviation), target=TARGET,
            deviation=math.hypot(deviation, math.sqrt(TARGET * (1 - TARGET) / batch)),
        )  # fmt: skip
        found.append(threshold.value / quantile)
    return found, searched


@pytest.mark.parametrize("start", [1e-6, 1e-3, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("noise", [0.02, 0.08])
def test_a_threshold_finds_its_quantile_and_stays_there(start, noise):
    for seed in range(3):
        found, searched = followed(start, noise=noise, seed=seed)
        assert searched <= 40
        late = found[100:]
        assert 0.2 < min(late) <= max(late) < 5, (start, noise, seed)
        assert 0.5 < sorted(late)[len(late) // 2] < 2


def test_noise_alone_moves_nothing_far():
    found, _ = followed(1.0, noise=1.0, steps=400)
    assert 0.1 < min(found) <= max(found) < 10


def test_a_majority_without_gradients_does_not_collapse_it():
    """Half of the norms are zero, as of examples that are learnt: their median would be, too."""
    rng, threshold = random.Random(0), FollowedThreshold(value=1.0, searching=False)
    for _ in range(400):
        norms = [rng.lognormvariate(0, 0.5) if rng.random() < 0.5 else 0.0 for _ in range(256)]
        above = sum(norm > threshold.value for norm in norms) / 256
        threshold = threshold.after(above + rng.gauss(0, 0.03), target=TARGET, deviation=0.033)
    assert 1.0 < threshold.value < 4.0


def problem():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2000, 8, generator=generator)
    chance = torch.sigmoid(2 * x[:, 0] + x[:, 1])  # labels that nobody can know for sure
    return x, (torch.rand(2000, generator=generator) < chance).long()


def trained(bounds, lr):
    """The final loss on all data, after 120 steps with noise."""
    torch.manual_seed(0)
    x, y = problem()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    criterion = losses.CrossEntropy()
    engine, optimizer, loader = enforced_run(
        model, (x, y), bounds=bounds, batch_size=500, noise_multiplier=0.5, lr=lr,
        criterion=criterion, engine=PrivacyEngine(insecure_seed=1),
    )  # fmt: skip
    for _ in range(30):
        for inputs, targets in loader:
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()
    engine.detach()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x), y)), engine


def test_starts_a_thousand_times_off_end_within_a_percent_of_the_best_fixed_choice():
    fixed = {
        value: trained(EnforcedBounds(thresholds=value), 1.0)[0]
        for value in (0.01, 0.3, 1.0, 2.0, 4.0, 8.0)
    }
    best = min(fixed.values())
    assert max(fixed.values()) > 1.1 * best  # the choice matters
    for start in (1e-3, 1.0, 1e3):
        loss, _ = trained(EnforcedBounds(thresholds=start, follow=True), 1.0)
        assert loss <= 1.01 * best, (start, loss, fixed)
