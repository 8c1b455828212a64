"""The ledger as a sequence of releases: beginnings of it, ends of it, and kinds of release."""

import pytest

from clipless.ledger import parse_ledger
from clipless.privacy import FullBatch, Ledger, Mechanism, PoissonSampling, Relation
from clipless.report._timeline import timeline

STEP = Mechanism(noise_multiplier=2.0, sampling=PoissonSampling(dataset_size=100, rate=0.2))
LATER = Mechanism(noise_multiplier=1.0, sampling=PoissonSampling(dataset_size=100, rate=0.2))
WHOLE = Mechanism(noise_multiplier=9.0, sampling=FullBatch(dataset_size=100))


def counts(history):
    found = {}
    for mechanism, count in history:
        found[mechanism] = found.get(mechanism, 0) + count
    return {mechanism: count for mechanism, count in found.items() if count}


@pytest.fixture
def found():
    """A statistic, ten steps, another statistic, three steps with other noise."""
    ledger = Ledger.in_memory(dataset_size=100, relation=Relation.ZERO_OUT)
    ledger.record(WHOLE, label="means")
    for _ in range(10):
        ledger.spend(STEP)
    ledger.record(WHOLE, label="norms", count=2)
    for _ in range(3):
        ledger.spend(LATER)
    text = parse_ledger(ledger.snapshot().splitlines(), name="ledger")
    assert dict(text.counts()) == {WHOLE: 3, STEP: 10, LATER: 3}
    return timeline(text)


def test_everything_is_counted_once(found):
    assert counts(found.history()) == {WHOLE: 3, STEP: 10, LATER: 3}
    assert (found.steps, found.releases) == (13, 16)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (0, {WHOLE: 1}),
        (1, {WHOLE: 1, STEP: 1}),
        (7, {WHOLE: 1, STEP: 7}),
        (10, {WHOLE: 3, STEP: 10}),  # what comes before the next step is there as well
        (11, {WHOLE: 3, STEP: 10, LATER: 1}),
        (13, {WHOLE: 3, STEP: 10, LATER: 3}),
    ],
)
def test_beginnings(found, steps, expected):
    assert counts(found.up_to(steps)) == expected


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (0, {WHOLE: 3, STEP: 10, LATER: 3}),
        (2, {WHOLE: 3, STEP: 10, LATER: 1}),
        (5, {WHOLE: 3, STEP: 8}),
        (13, {WHOLE: 3}),
    ],
)
def test_without_the_last_steps_every_statistic_stays(found, steps, expected):
    assert counts(found.without_last(steps)) == expected


def test_kinds(found):
    assert counts(found.labelled("norms", is_step=False)) == {WHOLE: 2}
    assert counts(found.except_labelled("norms", is_step=False)) == {WHOLE: 1, STEP: 10, LATER: 3}
    assert found.labelled("means", is_step=True) == []


def test_a_crash_leaves_a_reservation_that_counts():
    ledger = Ledger.in_memory(dataset_size=100, relation=Relation.ZERO_OUT)
    ledger.reserve(STEP, count=50)
    ledger.spend(STEP)
    text = "".join(f"{each.line}\n" for each in ledger._written)  # as the disk has it
    assert timeline(parse_ledger(text.splitlines(), name="ledger")).steps == 50
    settled = parse_ledger(ledger.snapshot().splitlines(), name="ledger")
    assert timeline(settled).steps == 1
