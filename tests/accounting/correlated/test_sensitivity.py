"""Sensitivities of strategies against all patterns in which a record can take part."""

import itertools
import math

import numpy as np
import pytest

from clipless.accounting.correlated import (
    BandedStrategy,
    BufferedStrategy,
    OptimizerWorkload,
    banded_sensitivity,
    optimised_strategy,
    toeplitz_sensitivity,
)


def patterns(steps, participations, separation):
    """Yield every set of at most so many steps, at least so far apart."""
    for count in range(1, participations + 1):
        for chosen in itertools.combinations(range(steps), count):
            if all(b - a >= separation for a, b in itertools.pairwise(chosen)):
                yield chosen


def brute_force(matrix, allowed):
    """Return the largest norm over all patterns, and over all signs of the contributions."""
    found = 0.0
    for pattern in allowed:
        for signs in itertools.product((1.0, -1.0), repeat=len(pattern) - 1):
            found = max(found, np.linalg.norm(matrix[:, pattern] @ np.array([1.0, *signs])))
    return found


def banded(steps, bands, seed):
    draw = np.random.default_rng(seed).normal(size=(steps, steps))
    matrix = np.tril(draw) - np.tril(draw, -bands)
    matrix[np.diag_indices(steps)] = abs(np.diag(matrix)) + 0.1
    return matrix


@pytest.mark.parametrize("seed", range(12))
def test_a_banded_strategy_has_the_sensitivity_of_its_worst_pattern(seed):
    rng = np.random.default_rng(seed)
    steps, bands = int(rng.integers(4, 10)), int(rng.integers(1, 4))
    separation, participations = bands + int(rng.integers(0, 2)), int(rng.integers(1, 5))
    strategy = BandedStrategy.from_matrix(banded(steps, bands, seed), bands=bands)
    found = strategy.sensitivity(participations=participations, separation=separation)
    worst = brute_force(strategy.matrix(), patterns(steps, participations, separation))
    assert found == pytest.approx(worst, rel=1e-9)
    assert found >= worst * (1 - 1e-15)


def test_the_worst_pattern_of_unequal_columns_is_not_the_greedy_one():
    # The largest column alone would exclude the two that together are worse.
    found = banded_sensitivity([2.0, 3.0, 2.0], participations=2, separation=2)
    assert found**2 == pytest.approx(4.0)


@pytest.mark.parametrize("seed", range(6))
def test_passes_in_a_fixed_order_cost_what_their_worst_record_costs(seed):
    rng = np.random.default_rng(seed)
    length, steps = int(rng.integers(2, 5)), int(rng.integers(5, 13))
    bands = min(length, int(rng.integers(1, 5)))
    strategy = BandedStrategy.from_matrix(banded(steps, bands, seed), bands=bands)
    costs = strategy.pass_costs(steps_per_pass=length)
    assert len(costs) == math.ceil(steps / length)
    for passes in range(1, len(costs) + 1):
        # Only what the passes so far have taken part in, but with all that still follows from it.
        allowed = [tuple(range(j, min(steps, passes * length), length)) for j in range(length)]
        worst = brute_force(strategy.matrix(), [each for each in allowed if each])
        assert sum(costs[:passes]) == pytest.approx(worst**2, rel=1e-9)
        assert sum(costs[:passes]) >= worst**2 * (1 - 1e-15)


@pytest.mark.parametrize("seed", range(8))
def test_a_decreasing_toeplitz_strategy_has_the_sensitivity_of_its_worst_pattern(seed):
    rng = np.random.default_rng(seed)
    steps, separation = int(rng.integers(4, 10)), int(rng.integers(1, 4))
    participations = int(rng.integers(1, 5))
    amplitudes = rng.dirichlet(np.ones(3))[:2]
    strategy = BufferedStrategy(
        steps=steps, amplitudes=tuple(amplitudes), decays=tuple(rng.uniform(0, 0.99, 2))
    )
    column = strategy.coefficients()
    matrix = np.tril(column[np.subtract.outer(np.arange(steps), np.arange(steps)).clip(0)])
    found = strategy.sensitivity(participations=participations, separation=separation)
    worst = brute_force(matrix, patterns(steps, participations, separation))
    assert found == pytest.approx(worst, rel=1e-9)
    costs = strategy.pass_costs(steps_per_pass=separation)
    for passes in range(1, len(costs) + 1):
        size = min(steps, passes * separation)
        orders = [tuple(range(j, size, separation)) for j in range(min(separation, size))]
        worst = brute_force(matrix[:size, :size], orders)
        assert sum(costs[:passes]) >= worst**2 * (1 - 1e-12)


def test_contributions_that_follow_earlier_outputs_do_not_exceed_it():
    # Vectors instead of signs: gradient ascent over contributions of norm at most 1.
    strategy = BandedStrategy.from_matrix(banded(8, 3, 5), bands=3)
    matrix, found = strategy.matrix(), strategy.sensitivity(participations=3, separation=3)
    rng, largest = np.random.default_rng(0), 0.0
    for pattern in patterns(8, 3, 3):
        columns = matrix[:, pattern]
        moves = rng.normal(size=(len(pattern), 4))
        for _ in range(50):
            moves /= np.linalg.norm(moves, axis=1, keepdims=True)
            moves += columns.T @ (columns @ moves)
        moves /= np.linalg.norm(moves, axis=1, keepdims=True)
        largest = max(largest, np.linalg.norm(columns @ moves))
    assert 0.99 * found < largest <= found


def test_what_has_no_known_worst_pattern_is_refused():
    with pytest.raises(ValueError, match="do not increase"):
        toeplitz_sensitivity([1.0, 0.2, 0.4], steps=3, participations=1, separation=1)
    with pytest.raises(ValueError, match="meet its own noise"):
        BandedStrategy.square_root(steps=8, bands=4).sensitivity(participations=2, separation=3)
    with pytest.raises(ValueError, match="at most 3"):
        BandedStrategy.square_root(steps=8, bands=4).pass_costs(steps_per_pass=3)
    with pytest.raises(ValueError, match="comes again"):
        optimised_strategy(OptimizerWorkload(steps=8).matrix(), bands=4, steps_per_pass=3)
    with pytest.raises(ValueError, match="add up to at most 1"):
        BufferedStrategy(steps=3, amplitudes=(0.8, 0.8), decays=(0.1, 0.1))


def test_a_strategy_is_kept_exactly_and_damage_is_refused():
    strategy = BandedStrategy.from_matrix(banded(9, 4, 1), bands=4)
    assert BandedStrategy.from_dict(strategy.to_dict()) == strategy
    assert np.array_equal(strategy.matrix() * 2**10, np.rint(strategy.matrix() * 2**10))
    with pytest.raises(ValueError, match="steps, bands and table"):
        BandedStrategy.from_dict({"steps": 1})
    with pytest.raises(ValueError, match="bytes are no table"):
        BandedStrategy(steps=2, bands=1, packed=strategy.packed)
    with pytest.raises(ValueError, match="diagonal"):
        BandedStrategy.from_table(np.zeros((2, 1)))
    with pytest.raises(ValueError, match="before the first"):
        BandedStrategy.from_table(np.ones((2, 2)))
    with pytest.raises(ValueError, match="outside"):
        BandedStrategy.from_matrix(np.tril(np.ones((3, 3))), bands=2)
