"""Values are told only if many rows have them."""

import math
from itertools import product
from statistics import NormalDist

import pytest
import torch

from clipless.accounting import prepare_history, require_supported_sampling
from clipless.errors import PrivacyError
from clipless.privacy import FullBatch, Ledger, Mechanism, Relation, delta, epsilon
from clipless.statistics import PrivateRows, value_threshold
from clipless.statistics._values import _BUCKETS, leading_values


def ask(places, values, *, noise=5.0, failure=1e-3, present=None):
    ledger = Ledger.in_memory(dataset_size=len(places), relation=Relation.ZERO_OUT)
    rows = PrivateRows(torch.tensor(places), ledger=ledger, present=present)
    options = {"noise_multiplier": noise, "failure": failure, "label": "values"}
    return rows.noisy_values(lambda y: y, values=values, **options), ledger


def test_frequent_values_are_told_with_their_counts():
    found, ledger = ask([0] * 400 + [1] * 300 + [2] * 3 + [-1] * 50 + [9], ["a", "b", "c"])
    assert set(found) == {"a", "b"}
    assert abs(found["a"] - 400) < 40
    ((mechanism, count),) = ledger.history()
    assert (mechanism.noise_multiplier, mechanism.failure, count) == (5.0, 1e-3, 1)


def test_a_value_of_one_row_is_told_no_more_often_than_is_paid_for(monkeypatch):
    """With probability 2%, of which 40 of 2,000 are expected; none for rows that are empty."""
    monkeypatch.setattr("clipless.statistics._values._BUCKETS", 64)  # less noise to draw
    ledger = Ledger.in_memory(dataset_size=30, relation=Relation.ZERO_OUT)
    column = torch.tensor([0] * 29 + [1])
    options = {"values": ["a", "b"], "noise_multiplier": 2.0, "failure": 0.02, "label": ""}
    rows = PrivateRows(column, ledger=ledger)
    told = sum("b" in rows.noisy_values(lambda y: y, **options) for _ in range(2000))
    assert 15 < told < 70
    rows = PrivateRows(column, ledger=ledger, present=column == 0)
    told = sum("b" in rows.noisy_values(lambda y: y, **options) for _ in range(2000))
    assert told < 40  # a lead of zero is further below the threshold


def test_one_row_moves_the_query_by_one_and_no_name_that_is_told():
    """Names that share a bucket included, which are found by brute force."""
    seen, number = {}, 0
    while True:
        place = leading_values([str(number)], torch.ones(1))[1].popitem()[0]
        if place in seen:
            break
        seen[place] = str(number)
        number += 1
    values = [seen[place], str(number), "far"]
    random = torch.Generator().manual_seed(0)
    least = value_threshold(noise_multiplier=0.1, failure=1e-9)
    for _ in range(200):
        counts = torch.randint(0, 5, (3,), generator=random).double()
        for which in range(3):
            other = counts.clone()
            other[which] += 1
            (leads, names), (moved, renamed) = (leading_values(values, c) for c in (counts, other))
            assert leads.shape == (_BUCKETS,)
            assert (leads - moved).norm() <= 1
            for bucket, name in renamed.items():
                if name != names.get(bucket):  # one row decided: nobody leads by more than one
                    assert max(leads[bucket], moved[bucket]) <= 1 < least


def test_the_threshold_is_that_of_a_normal_tail():
    for failure in (1e-3, 1e-7, 1e-12):
        above = (value_threshold(noise_multiplier=3.0, failure=failure) - 1) / 3.0
        assert 0.5 * math.erfc(above / math.sqrt(2)) == pytest.approx(failure, rel=1e-6)
    with pytest.raises(ValueError, match="probability"):
        value_threshold(noise_multiplier=3.0, failure=0.0)


def test_failures_are_added_to_delta():
    plain = Mechanism(noise_multiplier=5.0, sampling=FullBatch(dataset_size=100))
    failing = Mechanism(noise_multiplier=5.0, sampling=FullBatch(dataset_size=100), failure=2e-6)
    assert Mechanism.from_dict(failing.to_dict()) == failing
    assert "failure" not in plain.to_dict()
    history = [(plain, 1), (failing, 2)]
    for accountant in ("pld", "rdp"):
        there = epsilon(history, 1e-5, accountant=accountant)
        assert there == epsilon([(plain, 3)], 6e-6, accountant=accountant)
        assert there > epsilon([(plain, 3)], 1e-5, accountant=accountant)
        assert epsilon(history, 4e-6, accountant=accountant) == math.inf
        ideal = delta([(plain, 3)], 0.5, accountant=accountant)
        assert delta(history, 0.5, accountant=accountant) == pytest.approx(ideal + 4e-6, rel=1e-9)
    assert delta(history, math.inf) == 4e-6
    for accountant in ("pld", "rdp"):  # nobody who looks at divergences alone gets to see it
        with pytest.raises(PrivacyError, match="added to delta"):
            require_supported_sampling(((failing, 1),), accountant)
    with pytest.raises(PrivacyError, match="added to delta"):
        prepare_history(((failing, 1),))
    with pytest.raises(ValueError, match="failure"):
        Mechanism(noise_multiplier=5.0, sampling=FullBatch(dataset_size=100), failure=1.0)


def test_where_a_row_is_replaced_two_names_may_depend_on_it(monkeypatch):
    """Of 30 rows one is replaced by another name: each is told half as often, from a lead of two.

    With a threshold for one row, names of two records' making were told with twice the probability.
    """
    monkeypatch.setattr("clipless.statistics._values._BUCKETS", 64)  # less noise to draw
    deviation, failure = 2.0, 0.02
    once, twice = (
        value_threshold(noise_multiplier=deviation, failure=failure, changes=n) for n in (1, 2)
    )
    above = [0.5 * math.erfc((twice - lead) / deviation / math.sqrt(2)) for lead in (1, 2)]
    assert 2 * above[0] <= failure
    assert above[1] == pytest.approx(failure / 2)
    assert twice > once + 1
    ledger = Ledger.in_memory(dataset_size=30, relation=Relation.REPLACE_ONE)
    rows = PrivateRows(torch.tensor([0] * 28 + [1] * 2), ledger=ledger)
    options = {"values": ["a", "b"], "noise_multiplier": deviation, "failure": failure, "label": ""}
    told = sum("b" in rows.noisy_values(lambda y: y, **options) for _ in range(500))
    assert told < 16  # 5 are expected, and 20 by the threshold of one row


@pytest.mark.parametrize("changes", [1, 2])
@pytest.mark.parametrize(("sigma", "failure"), [(0.5, 0.1), (2.0, 0.01), (8.0, 1e-4)])
def test_the_curve_of_all_small_neighbours_is_the_one_that_is_paid_for(
    changes, sigma, failure, monkeypatch
):
    """Exactly, with all names in one bucket: (1 - f) delta_G + f is never exceeded."""
    monkeypatch.setattr("clipless.statistics._values._BUCKETS", 1)
    threshold = value_threshold(noise_multiplier=sigma, failure=failure, changes=changes)
    cdf = NormalDist().cdf

    def answer(counts):
        leads, leaders = leading_values([n for n in "abc" if counts[n]], _present(counts))
        return leads[0].item(), leaders.get(0)

    def divergence(one, other, level):
        (lead, name), (other_lead, other_name) = one, other
        silent, others = (
            1.0 if who is None else cdf((threshold - at) / sigma) for at, who in (one, other)
        )
        found = max(0.0, silent - math.exp(level) * others)
        if name is None or name != other_name:
            return found + 1 - silent
        if lead == other_lead:
            return found
        edge = (level * sigma**2 + (lead**2 - other_lead**2) / 2) / (lead - other_lead)
        low, high = (max(edge, threshold), math.inf) if lead > other_lead else (threshold, edge)
        if low >= high:
            return found
        mine, its = (
            cdf((high - at) / sigma) - cdf((low - at) / sigma) for at in (lead, other_lead)
        )
        return found + max(0.0, mine - math.exp(level) * its)

    for level in (0.0, 0.5, 2.0):
        shift, slope = changes / (2 * sigma), level * sigma / changes
        gaussian = cdf(shift - slope) - math.exp(level) * cdf(-shift - slope)
        allowed = (1 - failure) * gaussian + failure
        for numbers in product(range(5), repeat=3):
            counts = dict(zip("abc", numbers, strict=True))
            for gone, new in product("abc", "abc" if changes == 2 else [None]):
                moved = {n: counts[n] - (n == gone) + (n == new) for n in "abc"}
                if counts[gone]:
                    pair = answer(counts), answer(moved)
                    assert divergence(*pair, level) <= allowed + 1e-12
                    assert divergence(*pair[::-1], level) <= allowed + 1e-12


def _present(counts):
    return torch.tensor([float(n) for n in counts.values() if n], dtype=torch.float64)
