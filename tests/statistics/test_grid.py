"""Answers to private queries lie on a public grid: no digit tells what the noise was added to.

Float noise has a lattice of its own, which a sum shifts: one answer then tells with certainty
whether a known record was there, whatever the noise multiplier is (Mironov 2012).
"""

import math

import pytest
import torch

from clipless.kernels import GRID_STEPS
from clipless.kernels.randomness import _gaussian
from clipless.privacy import Ledger, Relation
from clipless.statistics import PrivateRows

ASK = {"noise_multiplier": 3.0, "label": "a query"}
QUERIES = {
    "sum": lambda rows: rows.noisy_sum(lambda x: x, bound=0.7, **ASK),
    "covariance": lambda rows: rows.noisy_gram(lambda x: x[:, :, None], **ASK),
    "histogram": lambda rows: rows.noisy_counts(
        lambda x: (4 * x).long().clamp(0, 3), bins=[4, 4, 4], **ASK
    )[1],
}


def table(extra):
    """Rows of thirds and sevenths, which no grid of floats holds, with and without one of them."""
    x = torch.rand(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 3
    x[7] = 3 * extra if extra else 0.0
    return x.float()


@pytest.fixture
def deviations(monkeypatch):
    """The deviations of the noise that was really added, of one release after the other."""
    seen = []
    add = _gaussian.add_grid_noise_

    def watch(tensors, deviations, stream):
        seen.append(list(deviations))
        add(tensors, deviations, stream)

    monkeypatch.setattr(_gaussian, "add_grid_noise_", watch)
    return seen


def answer(name, extra, seed=None):
    ledger = Ledger.in_memory(dataset_size=50, relation=Relation.ZERO_OUT)
    return QUERIES[name](PrivateRows(table(extra), ledger=ledger, insecure_seed=seed)).flatten()


@pytest.mark.parametrize("name", QUERIES)
def test_neighbours_answers_are_multiples_of_the_same_step(name, deviations):
    for extra in (0.0, 1 / 7):
        found = answer(name, extra)
        step = deviations[-1][0] / GRID_STEPS
        steps = (found / step).round()
        assert torch.equal(steps * step, found)  # bit for bit
        assert len(set((steps.long() % 64).tolist())) > 1  # and of no larger one
    (one,), (other,) = deviations
    assert one == other  # the step is public: it does not follow from the rows


@pytest.mark.parametrize("name", QUERIES)
def test_with_the_same_noise_neighbours_differ_by_the_sensitivity_and_by_whole_steps(
    name, deviations
):
    bound = {"sum": 0.7, "covariance": 1.0, "histogram": math.sqrt(3)}[name]
    moved = answer(name, 1 / 7, seed=1) - answer(name, 0.0, seed=1)
    step = deviations[-1][0] / GRID_STEPS
    if name == "covariance":
        moved = moved.view(3, 3)[torch.triu(torch.ones(3, 3)) > 0]
    assert 0 < moved.norm() <= bound + 1.125 * step * moved.numel() ** 0.5
    assert ((moved / step) - (moved / step).round()).abs().max() < 1e-6


def test_float_noise_would_tell():
    """The attack works where it should: float32 noise, added to a float64 sum, names the sum."""
    noise = torch.randn(50, generator=torch.Generator().manual_seed(0)).double()
    third = torch.tensor(1 / 3, dtype=torch.float64)
    for true in (0 * third, third):
        left = [noise + true - guess for guess in (0 * third, third)]
        fits = [bool(((each.float().double() - each).abs() < 2.0**-50).all()) for each in left]
        assert fits == [bool(true == 0), bool(true == third)]
