"""Noise on a grid: its distribution integer by integer, its tail, its lattice, its twins."""

import math
import os
import subprocess
import sys
import textwrap

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from clipless.kernels import GRID_STEPS, KeyStream, add_grid_noise_, grid_noise, joint_grid_factor
from clipless.kernels.randomness import _gaussian
from clipless.kernels.randomness._gaussian_table import (
    CELL_BITS,
    LOW_BITS,
    THRESHOLD_BITS,
    cell_probabilities,
    cell_table,
)

STREAM = KeyStream(bytes(range(32)))


@pytest.fixture(autouse=True)
def precise():
    with mpmath.workprec(250):
        yield


def tail(x):
    """P(|N(0, 1)| > x)."""
    return mpmath.erfc(mpmath.mpf(x) / mpmath.sqrt(2))


@pytest.mark.parametrize("cell", [0, 1, 2, 1023, 1024, 5000, 8192, 12000, 16383])
def test_the_probability_of_a_cell_is_exact(cell):
    width = mpmath.mpf(2) ** -10
    exact = (tail(cell * width) - tail((cell + 1) * width)) * mpmath.mpf(2) ** 94
    error = abs(cell_probabilities()[cell] - exact)
    assert error < (20_000 if cell == 0 else 1)  # the first takes what is left of rounding
    assert error < exact * mpmath.mpf(2) ** -67 + 1


def test_the_table_gives_every_cell_its_probability():
    table = cell_table(torch.device("cpu"))
    total = [0] * (1 << CELL_BITS)
    columns = (each.tolist() for each in table)
    for slot, (high, low, other) in enumerate(zip(*columns, strict=True)):
        own = (high << LOW_BITS) + low
        total[slot] += own
        total[other] += (1 << THRESHOLD_BITS) - own
    assert sum(total) == sum(cell_probabilities()) == 1 << (CELL_BITS + THRESHOLD_BITS)
    # A slot that keeps all for itself is a unit short of it, and has itself as the other one.
    assert total == list(cell_probabilities())


@pytest.mark.parametrize("cell", [0, 1, 300, 1024, 2048, 4096, 6000, 8191])
def test_every_integer_has_its_probability(cell):
    """Where one integer ends and the next begins, among the 2^63 places of a cell.

    An integer is hit by 2^45 places; a boundary that is off by 16 changes that by 2^-41.
    """
    width, steps = mpmath.mpf(2) ** -10, 1 << 18
    whole = tail(cell * width) - tail((cell + 1) * width)
    chosen = [0, 1, 2, steps // 3, steps // 2, steps - 2, steps - 1]
    for step in chosen:
        end = (cell + (step + mpmath.mpf(1) / 2) / steps) * width
        exact = int(mpmath.nint((tail(cell * width) - tail(end)) / whole * mpmath.mpf(2) ** 63))
        places = torch.tensor([exact - 16, exact + 16])
        corrected = places - _gaussian._correction(torch.full((2,), cell), places)
        found = (((corrected >> 44) + 1) >> 1).tolist()
        assert found == [step, step + 1]


def test_the_boundary_test_would_catch_a_missing_correction():
    place = torch.tensor([1 << 62])
    assert _gaussian._correction(torch.tensor([1024]), place).item() > 2**50


def test_distribution_and_independence():
    drawn = [grid_noise(300_000, STREAM, index).double() / GRID_STEPS for index in range(2)]
    for each in drawn:
        assert stats.kstest(each.numpy(), "norm").pvalue > 1e-4
        for power, moment, spread in ((2, 1, 2), (4, 3, 96), (6, 15, 10_170)):
            found = (each**power).mean().item()
            assert abs(found - moment) < 4.5 * math.sqrt(spread / 300_000)
        assert abs((each[1:] * each[:-1]).mean()) < 4.5 / math.sqrt(300_000)
    assert abs((drawn[0] * drawn[1]).mean()) < 4.5 / math.sqrt(300_000)


def test_the_tail_goes_on_where_float32_generators_end():
    """torch's float32 variates end at 5.77 deviations on a CPU; here all cells up to 16 occur."""
    slots = torch.arange(1 << CELL_BITS)
    table = cell_table(torch.device("cpu"))
    reachable = set(slots[table.threshold > 0].tolist()) | set(table.other.tolist())
    beyond = cell_probabilities()[int(5.77 * 1024) : 9 * 1024]
    assert all(each > 0 for each in beyond)
    assert set(range(9 * 1024)) <= reachable


def test_the_lowest_digits_are_uniform():
    """A lattice of the sampler's own would show here: 2^28 steps are a deviation."""
    drawn = grid_noise(100_000, STREAM, 5)
    for modulus in (2, 3, 8, 1000):
        counts = np.bincount((drawn % modulus).numpy(), minlength=modulus)
        assert stats.chisquare(counts).pvalue > 1e-4


def test_results_lie_on_the_grid_and_tell_no_lattice_of_the_sum():
    """Two neighbours' results have the same digits: multiples of the step, whatever the sum was."""
    for value in (0.0, 1 / 3):
        tensor = torch.full((1000,), value, dtype=torch.float64)
        add_grid_noise_([tensor], [0.5], STREAM)
        steps = tensor / (0.5 / GRID_STEPS)
        assert torch.equal(steps, steps.round())


def test_a_sum_is_moved_by_its_rounding_alone():
    tensor = torch.randn(1000, dtype=torch.float64)
    zero, moved = torch.zeros_like(tensor), tensor.clone()
    add_grid_noise_([zero], [2.0], STREAM)
    add_grid_noise_([moved], [2.0], STREAM)
    assert (moved - zero - tensor).abs().max() <= 0.5001 * 2.0 / GRID_STEPS


def test_how_much_rounding_costs():
    """One step an entry between neighbours, and an eighth: inside what the deviations grew by."""
    for multiplier, entries in ((1.0, 10), (50.0, 10_000_000), (1e4, 100)):
        factor = joint_grid_factor(multiplier, entries)
        moved = 1 / (factor * multiplier) + 1.1 * math.sqrt(entries) / GRID_STEPS
        assert moved < 1 / multiplier
        assert factor < 1.001
    with pytest.raises(ValueError, match="smaller"):
        joint_grid_factor(1e6, 10_000_000)


def test_tensors_that_are_drawn_together_have_each_its_own_noise():
    sizes = [3, 0, 40_000, 700, 32_000, 1, 5]
    tensors = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    deviations = [GRID_STEPS * (0.0 if size == 700 else 1.0) for size in sizes]
    add_grid_noise_(tensors, deviations, STREAM)
    for index, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        alone = grid_noise(size, STREAM, index).double()
        assert torch.equal(tensor, torch.zeros(700).double() if size == 700 else alone)
    with pytest.raises(ValueError, match="shorter"):
        add_grid_noise_(tensors, deviations[:-1], STREAM)


def test_sizes_and_devices():
    assert grid_noise(0, STREAM).shape == (0,)
    long = grid_noise(70_000, STREAM, 3)
    for count in (1, 15, 17, 32_768, 32_769):
        assert torch.equal(grid_noise(count, STREAM, 3), long[:count])
    assert not torch.equal(grid_noise(100, STREAM, 4), long[:100])


TWINS = """
    import torch
    from clipless.kernels import KeyStream, grid_noise
    from clipless.kernels.randomness import _triton_noise as kernels
    key = bytes(range(32))
    words = kernels.chacha_words(key, 2, 2**40 + 7, 130, torch.device("cpu")).numpy().view("<u8")
    assert (words == KeyStream(key).words(1040, purpose=2, index=2**40 + 7)).all()
    noise = kernels.grid_noise(700, key, 3, torch.device("cpu"))
    assert torch.equal(noise, grid_noise(700, KeyStream(key), 3))
"""


def test_the_kernels_for_cuda_make_the_same_words_and_noise():
    """Run by Triton's interpreter, which has to be chosen before Triton is loaded."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = dict(os.environ, TRITON_INTERPRET="1")
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TWINS)], check=True, env=environment, timeout=300
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_noise_on_a_gpu_is_that_of_the_cpu():
    for count in (1, 1000, 100_003):
        found = grid_noise(count, STREAM, 9, "cuda").cpu()
        assert torch.equal(found, grid_noise(count, STREAM, 9))
