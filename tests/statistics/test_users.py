"""Private queries on rows whose units are users."""

import pytest
import torch

from clipless.audit import record, with_empty_user
from clipless.errors import LedgerError, PrivacyError
from clipless.privacy import Ledger, Relation, Users
from clipless.statistics import PrivateRows
from clipless.statistics import _private_rows as internals

IDS = [0, *[1] * 10, *[2] * 1000, *range(3, 60)]


def rows_of(x, users=None, noise=None):
    users = users or Users(IDS)
    ledger = Ledger.in_memory(
        dataset_size=users.number, relation=Relation.ZERO_OUT, unit=users.digest
    )
    return PrivateRows(x, ledger=ledger, users=users, insecure_seed=noise)


def table():
    """Two columns: the rows of the first three users are at the bounds, and in all bins."""
    x = torch.zeros(len(IDS), 2, dtype=torch.float64)
    x[:1011] = torch.tensor([3.0, -4.0], dtype=torch.float64)
    x[:1011, 1] += torch.arange(1011) % 4
    return x


def ask(x):
    rows = rows_of(x)
    noise = {"noise_multiplier": 2.0}
    values = [str(number) for number in range(1100)]
    numbers = torch.arange(len(IDS))
    asked = [
        rows.noisy_sum(lambda x: x, bound=2.0, label="sum", **noise),
        rows.noisy_gram(lambda x: x.unsqueeze(-1), label="gram", **noise),
        *rows.noisy_counts(
            lambda x: (x + 4).long().clamp(0, 7), bins=[8, 8], label="counts", **noise
        ),
        rows.map_rows(lambda x: (x, x[:, 0])).noisy_values(
            lambda x, y: (x[:, 1] + 4).long(), values=values, failure=1e-6, label="values", **noise
        ),
    ]
    return {"asked": asked, "count": len(rows), "of": len(numbers)}


def test_every_query_moves_by_one_contribution_for_users_of_any_size():
    recording = record(ask, table())
    for user in (0, 1, 2):
        result = recording.replay(with_empty_user(table(), Users(IDS), user))
        assert result.passed, result
        assert min(result.largest.values()) > 0.4, result.largest


def test_rows_that_count_as_units_are_caught(monkeypatch):
    monkeypatch.setattr(internals.torch, "bincount", _counts_of_ones(torch.bincount))
    recording = record(ask, table())
    assert recording.replay(with_empty_user(table(), Users(IDS), 0)).passed
    found = recording.replay(with_empty_user(table(), Users(IDS), 2))
    assert {"sum", "gram", "counts"} <= {query.name for query in found.violations}


def _counts_of_ones(bincount):
    """Shares become one."""

    def counts(x, weights=None, minlength=0):
        if weights is None and minlength == 0:
            return torch.ones(int(x.max()) + 1, dtype=torch.int64)
        return bincount(x, weights, minlength=minlength)

    return counts


def test_answers_are_averages_over_users():
    x = torch.zeros(len(IDS), 1)
    x[1:11, 0] = torch.arange(10) / 10
    x[11:1011] = 0.25
    rows = rows_of(x, noise=1)
    assert len(rows) == 60
    total = rows.noisy_sum(lambda x: x, bound=1.0, noise_multiplier=1e-6, label="sum")
    assert total.item() == pytest.approx(0.45 + 0.25, abs=1e-4)
    (counts,) = rows.noisy_counts(
        lambda x: (x > 0.4).long(), bins=[2], noise_multiplier=1e-6, label="counts"
    )
    assert counts.tolist() == pytest.approx([59.5, 0.5], abs=1e-4)
    assert "60 users" in repr(rows)


def test_one_row_of_a_user_votes_for_a_value():
    x = torch.arange(len(IDS), dtype=torch.float64)[:, None]  # the 1,000 rows say all the same
    x[11:1011] = 5000.0
    values = [str(number) for number in range(5001)]
    found = rows_of(x, noise=2).noisy_values(
        lambda x: x[:, 0].long(), values=values, noise_multiplier=1.0, failure=1e-3, label="values"
    )
    assert found == {}


def test_what_does_not_fit_is_refused():
    x = torch.zeros(3, 1)
    ledger = Ledger.in_memory(dataset_size=3, relation=Relation.ZERO_OUT)
    with pytest.raises(PrivacyError, match="2 users"):
        PrivateRows(x, ledger=ledger, users=Users([1, 1, 2]))
    with pytest.raises(PrivacyError, match="ids of users for 2 rows"):
        PrivateRows(x, ledger=ledger, users=Users([1, 2]))


def test_a_ledger_of_other_units_is_refused():
    x, users = torch.zeros(3, 1), Users([1, 1, 2])
    for size, unit, given in [(2, None, users), (2, Users([1, 2, 2]).digest, users),
                              (3, Users([1, 2, 3]).digest, None)]:  # fmt: skip
        ledger = Ledger.in_memory(dataset_size=size, relation=Relation.ZERO_OUT, unit=unit)
        with pytest.raises(LedgerError, match="was begun for"):
            PrivateRows(x, ledger=ledger, users=given)
