"""What passes cost, by brute force over who takes part when, and over where noise begins anew."""

import itertools

import numpy as np
import pytest

from clipless.accounting import FixedOrder, FullBatch, Mechanism, Relation, epsilon
from clipless.accounting.correlated import BandedStrategy, OptimizerWorkload, optimised_strategy
from clipless.errors import BudgetExhaustedError, PrivacyError
from clipless.privacy._schedule import Schedule

STEPS, PASS = 11, 4
ORDER = FixedOrder(dataset_size=40, batch_size=10)
STRATEGIES = {
    "optimised": optimised_strategy(
        OptimizerWorkload(steps=STEPS, momentum=0.9, dampening=0.9).matrix(), bands=4,
        steps_per_pass=PASS,
    ),
    "square root": BandedStrategy.square_root(steps=STEPS, bands=3),
    # Columns whose norms differ wildly: what a pass adds is not what its largest column is.
    "uneven": BandedStrategy.from_table(np.array([[1.0 + (7 * t) % 5] for t in range(STEPS)])),
}  # fmt: skip


def schedule(strategy, sigma=2.0):
    return Schedule(
        sampling=ORDER, relation=Relation.ZERO_OUT, noise_multiplier=sigma, strategy=strategy
    )


def paid(history, sigma=2.0):
    return sum(count * (sigma / each.noise_multiplier) ** 2 for each, count in history)


def worst(matrix, rows, begin):
    """The largest squared norm over examples that take part every PASS steps from `begin` on."""
    found = 0.0
    for place in range(PASS):
        steps = [t for t in rows if t >= begin and t % PASS == place]
        columns = matrix[np.ix_(list(rows), steps)]
        found = max(
            found,
            *(
                float(np.square(columns @ np.array(signs)).sum())
                for signs in itertools.product((-1.0, 1.0), repeat=len(steps))
            ),
        )
    return found


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_beginning_and_end_costs_at_least_its_sensitivity(name):
    strategy = STRATEGIES[name]
    matrix = strategy.matrix()
    for first, end in itertools.combinations(range(STEPS + 1), 2):
        cost = paid(schedule(strategy).cost(first, end, first=first))
        assert worst(matrix[:end, :end], range(first, end), first) <= cost * (1 + 1e-9)
    assert worst(matrix, range(STEPS), 0) == pytest.approx(
        paid(schedule(strategy).cost(0, STEPS)), rel=1e-9
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_runs_whose_noise_began_anew_cost_at_least_what_they_released(name):
    """Of every place in the order, over all pairs of where the first ended and the second began."""
    strategy = STRATEGIES[name]
    squares = strategy.column_squares()
    for end in range(1, STEPS + 1):
        for again in range(1, end + 1):
            total = paid(schedule(strategy).cost(0, end)) + paid(
                schedule(strategy).cost(again, STEPS, first=again)
            )
            for place in range(PASS):
                own = sum(squares[t] for t in range(end) if t % PASS == place)
                own += sum(squares[t] for t in range(again, STEPS) if t % PASS == place)
                assert own <= total * (1 + 1e-9)


def test_differences_of_one_count_would_not_be_enough_there():
    """The sabotage that the test above is against: passes counted on from where they were."""
    table = np.array([[2.0], [0.5], [1.0], [1.4]])
    strategy = BandedStrategy.from_table(table)
    own = Schedule(
        sampling=FixedOrder(dataset_size=4, batch_size=2), relation=Relation.ZERO_OUT,
        noise_multiplier=1.0, strategy=strategy,
    )  # fmt: skip
    counted_on = paid(own.cost(2, 4), 1.0)
    anew = paid(own.cost(2, 4, first=2), 1.0)
    assert counted_on < 1.4**2 <= anew * (1 + 1e-9)


def test_parts_add_up_to_the_whole_and_each_pass_is_paid_once():
    for strategy in (None, STRATEGIES["optimised"]):
        own = schedule(strategy)
        for first in range(3):
            due = [own.due(step, first=first) for step in range(first, STEPS)]
            assert [each is None for each in due] == [
                bool((step - first) % PASS) for step in range(first, STEPS)
            ]
            parts = own.cost(first, 6, first=first) + own.cost(6, STEPS, first=first)
            assert paid(parts) == pytest.approx(paid(own.cost(first, STEPS, first=first)))


def test_a_pass_in_a_fixed_order_costs_what_a_full_batch_costs():
    own, whole = (
        Mechanism(noise_multiplier=2.0, sampling=sampling)
        for sampling in (ORDER, FullBatch(dataset_size=40))
    )
    for accountant in ("pld", "rdp"):
        assert epsilon([(own, 3)], 1e-3, accountant=accountant) == epsilon(
            [(whole, 3)], 1e-3, accountant=accountant
        )
    assert Mechanism.from_dict(own.to_dict()) == own


@pytest.mark.parametrize("name", [None, *STRATEGIES])
def test_the_least_noise_keeps_the_budget(name):
    own = schedule(None if name is None else STRATEGIES[name])
    found = own.fitted(target_epsilon=2.0, target_delta=1e-3, steps=STEPS, accountant="pld")
    spent = epsilon(found.cost(0, STEPS), 1e-3)
    assert 1.99 < spent <= 2.0
    before = ((Mechanism(noise_multiplier=5.0, sampling=ORDER), 1),)
    less = own.fitted(
        target_epsilon=2.0, target_delta=1e-3, steps=STEPS, accountant="pld", history=before
    )
    assert less.noise_multiplier > found.noise_multiplier
    assert 1.99 < epsilon((*before, *less.cost(0, STEPS)), 1e-3) <= 2.0


def test_what_cannot_be_paid_for_is_refused():
    with pytest.raises(ValueError, match="at most 4 bands"):
        schedule(BandedStrategy.square_root(steps=STEPS, bands=5))
    with pytest.raises(PrivacyError, match="every so many steps"):
        Schedule(
            sampling=FullBatch(dataset_size=4), relation=Relation.ZERO_OUT, noise_multiplier=1.0,
            strategy=STRATEGIES["optimised"],
        )  # fmt: skip
    with pytest.raises(BudgetExhaustedError, match="planned for 11 steps"):
        schedule(STRATEGIES["optimised"]).due(STEPS)
