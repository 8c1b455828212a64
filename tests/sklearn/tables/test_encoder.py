"""What the encoding does to columns that vary together."""

import math
from dataclasses import replace

import torch

from clipless.privacy import Ledger, Relation
from clipless.sklearn.tables._encoder import Encoder
from clipless.statistics import PrivateRows, fit_covariance

ROWS = 20_000
NOISE = 25.0


def encoder(columns):
    """Of columns that are centred and scaled already, without a second feature."""
    none = torch.zeros(0, dtype=torch.long)
    return Encoder(
        center=torch.zeros(columns, dtype=torch.float64),
        spread=torch.ones(columns, dtype=torch.float64),
        indicators=none, buckets=(), folded=none, rates=torch.zeros(0, dtype=torch.float64),
    )  # fmt: skip


def correlated():
    """Two columns that are nearly one, and one of its own."""
    x = torch.randn(ROWS, 3, dtype=torch.float64)
    x[:, 1] = x[:, 0] + 0.1 * x[:, 1]
    return x


def decorrelated(plain, x):
    ledger = Ledger.in_memory(dataset_size=ROWS, relation=Relation.ZERO_OUT)
    rows = PrivateRows(x, torch.zeros(ROWS, 0), ledger=ledger, insecure_seed=0)
    covariance = fit_covariance(
        rows, features=lambda x, codes: plain(x, codes).unsqueeze(-1), noise_multiplier=NOISE
    )
    assert ledger.releases == 1
    return plain.decorrelated(covariance, noise=NOISE / ROWS)


def spread_of_directions(rows):
    """Largest over smallest variance of the three columns, whatever their mixture."""
    rows = rows - rows.mean(0)
    values = torch.linalg.svdvals(rows[:, :4])[:3]
    return float(values[0] / values[2])


def test_directions_of_little_variance_are_raised():
    plain, x = encoder(3), correlated()
    mixed = decorrelated(plain, x)
    codes = torch.zeros(ROWS, 0)
    before, after = plain(x, codes), mixed(x, codes)
    assert after.shape == before.shape
    assert spread_of_directions(after) < 0.7 * spread_of_directions(before)


def test_no_direction_grows_and_the_constant_of_certificates_stands():
    mixed = decorrelated(encoder(3), correlated())
    torch.testing.assert_close(torch.linalg.matrix_norm(mixed.mix, 2), torch.tensor(1.0).double())
    x, codes = torch.randn(1000, 3).double(), torch.zeros(1000, 0)
    step = 1e-3 * torch.randn(1000, 3).double()
    moved = (mixed(x + step, codes).double() - mixed(x, codes).double()).norm(dim=1)
    assert (moved <= mixed.lipschitz() * step.norm(dim=1) * (1 + 1e-3)).all()
    assert 1 <= mixed.lipschitz() * math.sqrt(3) < 1.001
    doubled = replace(mixed, mix=2 * mixed.mix)  # nothing is assumed of the matrix
    assert doubled.lipschitz() >= 2 / math.sqrt(3)


def test_it_is_saved_with_the_rest():
    mixed = decorrelated(encoder(3), correlated())
    restored = Encoder.from_dict(mixed.to_dict())
    x, codes = torch.randn(10, 3), torch.zeros(10, 0)
    assert torch.equal(restored(x, codes), mixed(x, codes))
    assert Encoder.from_dict(encoder(3).to_dict()).mix is None
