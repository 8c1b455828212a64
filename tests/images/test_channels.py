"""Private channel statistics: nobody moves a query by more than is paid for, and they are right."""

import math

import pytest
import torch

from clipless.images import decorrelation
from clipless.privacy import Ledger, Relation
from clipless.statistics import PrivateRows, channel_query_noise, fit_channels, fit_covariance

CHANNELS, SHAPE = 3, (3, 4, 4)
NOTHING = torch.full(SHAPE, math.nan)  # a record that is not there


def fit(rows, noise_multiplier=5.0):
    return fit_channels(
        rows, features=lambda x: x, channels=CHANNELS, noise_multiplier=noise_multiplier
    )


def custody(x, seed=0):
    ledger = Ledger.in_memory(dataset_size=len(x), relation=Relation.ZERO_OUT)
    return PrivateRows(x, ledger=ledger, insecure_seed=seed), ledger


def asked(x, monkeypatch, answers=None):
    """What the queries would release without noise, each answered by `answers` if given."""
    values, given = [], iter(answers or ())

    def release(self, value, sensitivity, noise_multiplier, label):
        values.append((value.clone(), sensitivity))
        return value if answers is None else next(given)

    with monkeypatch.context() as patch:
        patch.setattr(PrivateRows, "_release", release)
        fit(custody(x)[0])
    return values


def adversaries():
    generator = torch.Generator().manual_seed(3)
    ordinary = torch.randn(SHAPE, generator=generator)
    one_position = torch.zeros(SHAPE)
    one_position[:, 0, 0] = 1e30
    some_missing = ordinary.clone()
    some_missing[0, 1, 1] = math.nan
    return {
        "ordinary": ordinary,
        "huge": 1e30 * ordinary.sign(),
        "same huge": torch.full(SHAPE, 1e30),
        "infinite": torch.full(SHAPE, math.inf),
        "minus infinite": torch.full(SHAPE, -math.inf),
        "one position": one_position,
        "some missing": some_missing,
        "tiny": torch.full(SHAPE, 1e-30),
    }


@pytest.mark.parametrize("name", adversaries())
def test_one_record_moves_no_query_by_more_than_its_sensitivity(name, monkeypatch):
    others = torch.randn(40, *SHAPE, generator=torch.Generator().manual_seed(0))
    without = torch.cat([others, NOTHING[None]])
    record = torch.cat([others, adversaries()[name][None]])
    plain = asked(without, monkeypatch)
    answers = [value for value, _ in plain]
    moved = []
    for (value, sensitivity), (other, _) in zip(
        asked(record, monkeypatch, answers), plain, strict=True
    ):
        assert torch.isfinite(value).all()
        distance = torch.linalg.vector_norm(value - other).item()
        assert distance <= sensitivity * (1 + 1e-9)
        moved.append(distance / sensitivity)
    assert len(moved) == 3
    assert max(moved) > 0.1  # the attack does something


def test_sensitivity_is_reached(monkeypatch):
    """The bound is tight: nothing is paid for in vain."""
    others = torch.randn(40, *SHAPE, generator=torch.Generator().manual_seed(0))
    plain = asked(torch.cat([others, NOTHING[None]]), monkeypatch)
    huge = torch.cat([others, torch.full((1, *SHAPE), 1e30)])
    answers = [value for value, _ in plain]
    for (value, sensitivity), (other, _) in zip(
        asked(huge, monkeypatch, answers), plain, strict=True
    ):
        assert torch.linalg.vector_norm(value - other).item() == pytest.approx(sensitivity)


def test_statistics_are_right_and_paid_for():
    generator = torch.Generator().manual_seed(1)
    scale = torch.tensor([0.01, 1.0, 30.0])[:, None, None]
    x = scale * (3 + torch.randn(8000, *SHAPE, generator=generator))
    rows, ledger = custody(x)
    found = fit(rows)
    assert ledger.releases == 3
    expected = scale.flatten().double()
    torch.testing.assert_close(found.mean, 3 * expected, rtol=0.05, atol=0.0)
    torch.testing.assert_close(found.deviation, expected, rtol=0.1, atol=0.0)


def test_deviation_stays_above_the_noise():
    """A constant channel has deviation 0, which would blow its noise up."""
    rows, _ = custody(torch.ones(500, *SHAPE))
    found = fit(rows, noise_multiplier=20.0)
    assert (found.deviation > 0.05).all()
    assert torch.isfinite(found.mean).all()


def test_features_of_several_records_are_noticed():
    rows, ledger = custody(torch.randn(50, *SHAPE))
    with pytest.raises(Exception, match="among other"):
        fit_channels(
            rows, features=lambda x: x - x.mean(dim=0), channels=CHANNELS, noise_multiplier=5.0
        )
    assert ledger.releases == 0


def test_query_noise_costs_a_small_part():
    assert channel_query_noise(epsilon=1.0) == 25.0
    assert channel_query_noise(epsilon=100.0) == 10.0


def correlated(count):
    """Two channels that are nearly the same, and one that is small."""
    base = torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(2))
    return base * torch.tensor([1.0, 1.0, 0.0])[:, None, None] + 0.1 * noise


def test_covariance_counts_every_record_alike():
    x = correlated(4000)
    rows, ledger = custody(x)
    found = fit_covariance(rows, features=lambda x: x, noise_multiplier=2.0)
    unit = (x / x.flatten(1).norm(dim=1)[:, None, None, None]).double().flatten(2)
    exact = torch.einsum("ncp,ndp->cd", unit, unit) / len(x)
    assert (found - exact).abs().max() < 5 * 2.0 / 4000
    assert ledger.releases == 1
    rows, _ = custody(torch.cat([1e6 * x[:1], x[1:]]))  # a loud record counts no more
    loud = fit_covariance(rows, features=lambda x: x, noise_multiplier=2.0)
    assert (loud - found).norm() < 2 / 4000


def test_decorrelation_evens_out_what_is_above_the_noise():
    x = correlated(4000)
    rows, _ = custody(x)
    covariance = fit_covariance(rows, features=lambda x: x, noise_multiplier=0.01)
    layer = decorrelation(1e-6, covariance, noise=0.01 / 4000)
    mixed = layer(x / x.flatten(1).norm(dim=1)[:, None, None, None]).flatten(2)
    after = torch.einsum("ncp,ndp->cd", mixed, mixed)
    assert (after - after[0, 0] * torch.eye(3)).norm() < 0.05 * after.norm()
    assert layer.lipschitz == pytest.approx(1, rel=0.01)
    # Of eigenvalues below those of the noise nothing is made.
    noisy = decorrelation(1e-6, covariance, noise=10.0)
    assert (noisy.matrix - torch.eye(3)).abs().max() < 0.05
    nothing = decorrelation(0.01, torch.zeros(3, 3, dtype=torch.float64), noise=0.0)
    torch.testing.assert_close(nothing.matrix, torch.eye(3))
