"""Correlated noise: exactly post-processing of the Gaussian mechanism, and of the stated errors."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from clipless.accounting.correlated import (
    BandedStrategy,
    OptimizerWorkload,
    error_by_step,
    optimised_strategy,
)
from clipless.common import Query
from clipless.errors import PrivacyError
from clipless.kernels import GRID_STEPS, KeyStream, grid_noise, next_key
from clipless.privacy.noise import _correlated as module
from clipless.privacy.noise._correlated import CorrelatedNoise

KEY = bytes(range(32))
KEYS = [KEY]
for _ in range(29):
    KEYS.append(next_key(KEYS[-1]))
STRATEGY = optimised_strategy(OptimizerWorkload(steps=30).matrix(), bands=6, steps_per_pass=6)


def released(noise, values, deviation=1.0, sensitivity=0.5):
    """Return what a run releases, (steps, entries)."""
    rows = []
    for value in values:
        tensor = value.clone()
        noise.add_([tensor], [Query("weight", sensitivity, deviation)])
        rows.append(tensor)
    return torch.stack(rows)


def grid_unit(entries, deviation=1.0, sensitivity=0.5):
    query = Query("weight", sensitivity, deviation)
    factor = module._grid_factor([torch.zeros(entries)], [query], [query])
    return factor * deviation * 2**10 / GRID_STEPS


def test_releases_are_a_function_of_the_gaussian_mechanism_and_of_earlier_releases():
    """In exact fractions, from `C V + z` and R alone, without V: bit for bit the same."""
    torch.manual_seed(0)
    values = 3.0 * torch.randn(30, 5, dtype=torch.float64)
    unit = grid_unit(5)
    found = torch.round(released(CorrelatedNoise(STRATEGY, key=KEY), values) / unit).long()
    on_grid = torch.round(values / unit).long()
    table = STRATEGY.table.tolist()
    for column in range(5):
        rebuilt = []
        for step in range(30):
            z = int(grid_noise(5, KeyStream(KEYS[step]))[column])
            reach = min(step, STRATEGY.bands - 1)
            mechanism = z + sum(
                table[step][back] * int(on_grid[step - back, column]) for back in range(reach + 1)
            )
            taken = sum(table[step][back] * rebuilt[step - back] for back in range(1, reach + 1))
            exact = Fraction(mechanism - taken, table[step][0])
            rebuilt.append((exact + Fraction(1, 2)).__floor__())
        assert rebuilt == found[:, column].tolist()


def test_neighbours_whose_mechanisms_agree_release_the_same(monkeypatch):
    """Other values, and a z that makes `C V + z` what it was: nothing that is released moves."""
    torch.manual_seed(1)
    unit = grid_unit(40)
    places = torch.randint(-(2**20), 2**20, (30, 40))
    moved = places + torch.randint(-(2**16), 2**16, (30, 40))
    first = released(CorrelatedNoise(STRATEGY, key=KEY), places.double() * unit)
    shift = np.rint(STRATEGY.matrix() * 2**10).astype(np.int64) @ (places - moved).numpy()

    def shifted(count, stream, index=0, device="cpu"):
        return grid_noise(count, stream, index, device) + torch.from_numpy(
            shift[KEYS.index(stream.key)]
        )

    monkeypatch.setattr(module, "grid_noise", shifted)
    second = released(CorrelatedNoise(STRATEGY, key=KEY), moved.double() * unit)
    assert torch.equal(first, second)


def test_errors_are_the_computed_ones_and_the_strategy_whitens_the_noise():
    noise = released(CorrelatedNoise(STRATEGY, key=KEY), torch.zeros(30, 20_000).double())
    factor = grid_unit(20_000) * GRID_STEPS / 2**10
    sums = OptimizerWorkload(steps=30).matrix()
    measured = (torch.from_numpy(sums) @ noise).square().mean(dim=1).sqrt().numpy() / factor
    assert measured == pytest.approx(error_by_step(sums, STRATEGY), rel=0.02)
    white = (torch.from_numpy(STRATEGY.matrix()) @ noise / factor).numpy()
    covariance = white @ white.T / white.shape[1]
    assert np.allclose(covariance, np.eye(30), atol=0.04)
    assert measured[-1] < 0.6 * 30**0.5  # and independent noise would have left sqrt(30)


def test_one_band_is_independent_noise():
    strategy = BandedStrategy.independent(steps=3)
    noise = CorrelatedNoise(strategy, key=KEY)
    found = released(noise, torch.zeros(3, 1000).double())
    assert noise.state_dict().keys() == {"step", "chacha20"}
    assert np.corrcoef(found.numpy()) == pytest.approx(np.eye(3), abs=0.12)
    assert found.std().item() == pytest.approx(1.0, rel=0.05)


def test_a_resumed_run_goes_on_with_the_same_noise():
    values = torch.ones(30, 50).double()
    whole = released(CorrelatedNoise(STRATEGY, key=KEY), values)
    first, second = (CorrelatedNoise(STRATEGY, key=key) for key in (KEY, bytes(32)))
    before = released(first, values[:13])
    second.load_state_dict(first.state_dict())
    assert torch.equal(torch.cat([before, released(second, values[13:])]), whole)


def test_float32_values_and_entries_without_noise():
    noise = CorrelatedNoise(STRATEGY, key=KEY)
    tensors = [torch.ones(4), torch.zeros(3)]
    queries = [Query("a", 0.5, 1.0), Query("b", 0.0, 0.0)]
    noise.add_(tensors, queries)
    assert not torch.equal(tensors[0], torch.ones(4))
    assert torch.equal(tensors[1], torch.zeros(3))


def test_what_would_not_be_private_is_refused():
    noise = CorrelatedNoise(BandedStrategy.square_root(steps=2, bands=2), key=KEY)
    released(noise, torch.zeros(2, 4))
    with pytest.raises(PrivacyError, match="all taken"):
        released(noise, torch.zeros(1, 4))
    other = CorrelatedNoise(STRATEGY, key=KEY)
    released(other, torch.zeros(1, 4))
    with pytest.raises(PrivacyError, match="shapes"):
        released(other, torch.zeros(1, 5))
    growing = np.ones((40, 2))
    growing[:, 1], growing[0, 1] = -2.0, 0.0
    with pytest.raises(PrivacyError, match="range of integers"):
        CorrelatedNoise(BandedStrategy.from_table(growing), key=KEY)
