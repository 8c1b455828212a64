"""Noise and steps for a target: what is promised to fit does fit, and little is wasted."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipless.accounting import (
    FixedSizeSampling,
    FullBatch,
    Mechanism,
    PoissonSampling,
    Relation,
    epsilon,
    noise_multiplier_for,
    steps_for,
)
from clipless.errors import BudgetExhaustedError, PrivacyError
from clipless.ledger import Budget, BudgetMeter, Ledger

N = 60_000
DELTA = 1e-5
POISSON = PoissonSampling(dataset_size=N, rate=0.01)
STEP = Mechanism(noise_multiplier=1.0, sampling=POISSON)
STATISTIC = Mechanism(noise_multiplier=15.0, sampling=FullBatch(dataset_size=N))

CASES = [
    (3.0, 2000, POISSON, Relation.ZERO_OUT, "pld"),
    (3.0, 2000, POISSON, Relation.ZERO_OUT, "rdp"),
    (1.0, 500, PoissonSampling(dataset_size=N, rate=0.03), Relation.REPLACE_ONE, "pld"),
    (8.0, 20, PoissonSampling(dataset_size=N, rate=0.5), Relation.ZERO_OUT, "pld"),
    (2.0, 100, FixedSizeSampling(dataset_size=N, batch_size=600), Relation.REPLACE_ONE, "pld"),
    (1.0, 100, FullBatch(dataset_size=N), Relation.ZERO_OUT, "pld"),
    (0.01, 10, FullBatch(dataset_size=N), Relation.REPLACE_ONE, "rdp"),
    (12.0, 2, POISSON, Relation.ZERO_OUT, "pld"),
]


@pytest.mark.parametrize(("target", "steps", "sampling", "relation", "accountant"), CASES)
def test_noise_is_enough_and_hardly_more(target, steps, sampling, relation, accountant):
    sigma = noise_multiplier_for(
        target_epsilon=target,
        target_delta=DELTA,
        steps=steps,
        sampling=sampling,
        relation=relation,
        accountant=accountant,
    )

    def cost(sigma):
        step = Mechanism(noise_multiplier=sigma, sampling=sampling, relation=relation)
        return epsilon([(step, steps)], DELTA, accountant=accountant)

    assert cost(sigma) <= target < cost(sigma * (1 - 1e-3))
    assert float(f"{sigma:.5g}") == sigma

    mechanism = Mechanism(noise_multiplier=sigma, sampling=sampling, relation=relation)
    most = steps_for(
        target_epsilon=target, target_delta=DELTA, mechanism=mechanism, accountant=accountant
    )
    assert most >= steps
    assert epsilon([(mechanism, most)], DELTA, accountant=accountant) <= target
    assert epsilon([(mechanism, most + 1)], DELTA, accountant=accountant) > target


def test_a_cut_poisson_sample_can_be_calibrated():
    sampling = PoissonSampling(dataset_size=2000, rate=0.05, max_batch_size=150)
    sigma = noise_multiplier_for(
        target_epsilon=1.0, target_delta=DELTA, steps=50, sampling=sampling
    )
    step = Mechanism(noise_multiplier=sigma, sampling=sampling)
    assert 0.99 < epsilon([(step, 50)], DELTA) <= 1.0


def test_what_was_spent_before_counts():
    history = [(STATISTIC, 3)]
    target = {"target_epsilon": 2.0, "target_delta": DELTA}
    alone = noise_multiplier_for(**target, steps=500, sampling=POISSON)
    after = noise_multiplier_for(**target, steps=500, sampling=POISSON, history=history)
    assert after > alone
    step = Mechanism(noise_multiplier=after, sampling=POISSON)
    assert 1.99 < epsilon([*history, (step, 500)], DELTA) <= 2.0
    # The same mechanism may be continued.
    assert steps_for(**target, mechanism=step, history=[*history, (step, 400)]) in (100, 101, 102)
    assert steps_for(**target, mechanism=STEP, history=history) < steps_for(
        **target, mechanism=STEP
    )


def test_an_exhausted_budget_is_said_to_be_so():
    spent = [(STEP, 10_000)]
    with pytest.raises(BudgetExhaustedError, match=r"epsilon=6\.1.* of 3 is already spent"):
        noise_multiplier_for(
            target_epsilon=3.0, target_delta=DELTA, steps=1, sampling=POISSON, history=spent
        )
    with pytest.raises(BudgetExhaustedError, match="no amount of noise"):
        noise_multiplier_for(
            target_epsilon=1e-3,
            target_delta=DELTA,
            steps=1_000_000,
            sampling=POISSON,
            accountant="rdp",
        )
    target = {"target_epsilon": 3.0, "target_delta": DELTA}
    assert steps_for(**target, mechanism=STEP, history=spent) == 0
    silent = Mechanism(noise_multiplier=0.0, sampling=POISSON)
    assert steps_for(**target, mechanism=silent) == 0


def test_steps_are_capped():
    quiet = Mechanism(noise_multiplier=1e4, sampling=POISSON)
    assert (
        steps_for(target_epsilon=3.0, target_delta=DELTA, mechanism=quiet, max_steps=12_345)
        == 12_345
    )


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_bad_targets_are_refused(bad):
    with pytest.raises(ValueError, match="target_epsilon"):
        steps_for(target_epsilon=bad, target_delta=DELTA, mechanism=STEP)
    with pytest.raises(ValueError, match="target_epsilon"):
        noise_multiplier_for(target_epsilon=bad, target_delta=DELTA, steps=1, sampling=POISSON)
    with pytest.raises(ValueError, match="epsilon"):
        Budget(epsilon=bad, delta=DELTA)


def test_bad_questions_are_refused():
    with pytest.raises(ValueError, match="steps"):
        noise_multiplier_for(target_epsilon=1.0, target_delta=DELTA, steps=0, sampling=POISSON)
    with pytest.raises(ValueError, match="delta"):
        noise_multiplier_for(target_epsilon=1.0, target_delta=1.0, steps=1, sampling=POISSON)
    with pytest.raises(ValueError, match="max_steps"):
        steps_for(target_epsilon=1.0, target_delta=DELTA, mechanism=STEP, max_steps=0)
    with pytest.raises(PrivacyError, match="REPLACE_ONE"):
        noise_multiplier_for(
            target_epsilon=1.0,
            target_delta=DELTA,
            steps=1,
            sampling=FixedSizeSampling(dataset_size=N, batch_size=6),
        )
    with pytest.raises(ValueError, match="delta"):
        Budget(epsilon=1.0, delta=0.0)


@settings(max_examples=5)
@given(target=st.floats(0.2, 10.0), steps=st.integers(1, 3000), rate=st.floats(1e-3, 0.9))
def test_round_trips(target, steps, rate):
    sampling = PoissonSampling(dataset_size=N, rate=rate)
    sigma = noise_multiplier_for(
        target_epsilon=target, target_delta=DELTA, steps=steps, sampling=sampling, accountant="rdp"
    )
    step = Mechanism(noise_multiplier=sigma, sampling=sampling)
    assert target * 0.99 < epsilon([(step, steps)], DELTA, accountant="rdp") <= target
    assert epsilon([(step, steps)], DELTA) <= target


# --- The budget and its meter -------------------------------------------------------------------


def ledger_for_steps():
    return Ledger.in_memory(dataset_size=N, relation=Relation.ZERO_OUT)


def run(meter, ledger, mechanism, most):
    for step in range(most):
        try:
            limit = meter.require(mechanism)
        except BudgetExhaustedError:
            return step
        assert limit >= 1
        ledger.spend(mechanism, limit=limit)
    return most


def test_the_meter_stops_exactly_when_the_budget_is_used_up():
    budget = Budget(epsilon=1.0, delta=DELTA)
    ledger = ledger_for_steps()
    ledger.record(STATISTIC, label="feature scale")
    allowed = budget.remaining_steps(ledger.history(), mechanism=STEP)
    assert run(BudgetMeter(budget=budget, ledger=ledger), ledger, STEP, 10_000) == allowed
    assert budget.allows(ledger.history())
    assert not budget.allows([*ledger.history(), (STEP, 1)])
    with pytest.raises(BudgetExhaustedError, match="larger budget"):
        BudgetMeter(budget=budget, ledger=ledger).require(STEP)


def test_the_meter_notices_other_releases():
    budget = Budget(epsilon=2.5, delta=DELTA, accountant="rdp")
    ledger = ledger_for_steps()
    meter = BudgetMeter(budget=budget, ledger=ledger)
    run(meter, ledger, STEP, 9)
    ledger.record(STATISTIC, label="one more statistic")
    louder = Mechanism(noise_multiplier=0.9, sampling=POISSON)
    for mechanism in (STEP, louder, STEP, louder):
        run(meter, ledger, mechanism, 3)
    run(meter, ledger, louder, 10_000)
    spent = budget.spent(ledger.history())
    assert spent <= 2.5 < budget.spent([*ledger.history(), (louder, 1)])


def test_the_meter_is_cheap():
    budget = Budget(epsilon=5.0, delta=DELTA)
    ledger = ledger_for_steps()
    meter = BudgetMeter(budget=budget, ledger=ledger)
    run(meter, ledger, STEP, 1024)
    meter.require(STEP)
    start = time.perf_counter()
    run(meter, ledger, STEP, 1000)
    assert time.perf_counter() - start < 0.1
