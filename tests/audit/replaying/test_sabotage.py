"""Mistakes that void a guarantee, each of which a replay finds.

None of them is an error to the library's own checks of a step: they are in what surrounds it.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clipless import PrivacyEngine, losses
from clipless import nn as lip
from clipless.audit import replay, with_empty_record
from clipless.common import Query
from clipless.errors import PrivacyError
from clipless.privacy import GaussianNoise, Ledger, Plan, Relation
from clipless.statistics import PrivateRows
from tests.audit.neighbours import LONE, records, with_record

DATA = records()


def relation():
    return getattr(Relation, "ZERO_OUT", None) or Relation.ADD_REMOVE


def train(data, *, classes=3, batch_size=40, prepare=lambda x: x, stop=None, criterion=None):
    """An honest loop over all records, with places where a mistake can be made."""
    model = nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(6, classes))
    criterion = criterion or losses.CrossEntropy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, criterion=criterion, noise_multiplier=1.0,
        data_loader=DataLoader(TensorDataset(*data), batch_size=batch_size), sampling="full_batch"
        if batch_size == len(data[0]) else "poisson",
    )  # fmt: skip
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(prepare(x)), y)
            loss.backward()
            optimizer.step()
        if stop is not None and stop(loss):
            break
    return model.state_dict()


def rows_of(data):
    ledger = Ledger.in_memory(dataset_size=len(data[0]), relation=relation())
    return PrivateRows(*data, ledger=ledger)


def column_sum(data, label="sum"):
    return rows_of(data).noisy_sum(
        lambda x, y: x, bound=2.0, noise_multiplier=1.0, label=label
    )  # fmt: skip


def test_the_honest_ones_pass():
    for run in (train, column_sum):
        for other in (
            with_empty_record(DATA, LONE),
            with_empty_record(DATA, 0),
            with_record(DATA, 0, 1e6),
        ):
            result = replay(run, DATA, other)
            assert result.passed, result
            assert not result.unmoved


def test_a_list_of_classes_from_the_data():
    def run(data):
        return train(data, classes=int(data[1].max()) + 1)

    (found,) = [
        each
        for each in replay(run, DATA, with_empty_record(DATA, LONE)).differences
        if "tensors" in each
    ]
    assert "(3, 6) torch.float64, on the neighbour (2, 6)" in found


def test_a_batch_size_from_the_data():
    def run(data):
        return train(data, batch_size=int((data[1] == 0).sum()))

    found = replay(run, DATA, with_record(DATA, LONE, y=0)).differences
    assert any("noise" not in each and "deviation" in each for each in found), found


def test_a_stopping_rule_on_the_training_loss():
    x, _ = DATA
    targets = x[:, :1].clone()

    def run(data):
        return train(
            data, classes=1, criterion=losses.Huber(delta=1.0), stop=lambda loss: loss < 100.0
        )

    far = with_record((x, targets), 5, y=1e6)
    found = replay(run, (x, targets), far)
    assert not found.passed
    assert "made on the neighbour only" in found.differences[-1]
    assert "not made on the neighbour" in replay(run, far, (x, targets)).differences[0]


def test_a_sensitivity_that_is_understated(monkeypatch):
    honest = PrivateRows._release

    def understated(self, value, sensitivity, noise_multiplier, label):
        return honest(self, value, sensitivity / 4, noise_multiplier, label)

    monkeypatch.setattr(PrivateRows, "_release", understated)
    found = replay(column_sum, DATA, with_record(DATA, 3, -1e6))
    assert not found.differences
    assert found.violations[0].name == "sum"
    assert 2 < found.violations[0].ratio <= 4


def test_bounds_of_gradients_that_are_understated(monkeypatch):
    honest = Plan.releases.func
    smaller = property(
        lambda plan: [
            query._replace(sensitivity=query.sensitivity / 20, deviation=query.deviation / 20)
            for query in honest(plan)
        ]
    )
    monkeypatch.setattr(Plan, "releases", smaller)
    found = replay(train, DATA, with_empty_record(DATA, LONE))
    assert {each.name for each in found.violations} == {"1.weight"}


def test_standardisation_of_a_batch_in_the_loop():
    """One far record moves the mean and the deviation of all others."""

    def run(data):
        return train(data, prepare=lambda x: (x - x.mean(0)) / x.std(0))

    try:
        found = replay(run, DATA, with_record(DATA, 0, 1e6))
    except PrivacyError:
        return  # refused before anything was released
    assert not found.passed
    assert found.violations


def test_a_scale_from_the_data():
    def run(data):
        x, y = data
        return train((x / x.abs().max(), y))

    # The guard brings rows to norm one at most; smaller ones keep what the scale made of them.
    assert replay(run, DATA, with_record(DATA, 0, 1e6)).violations


def test_places_by_the_order_of_values():
    """Samples are drawn by place: sorted records all move by one if the smallest grows.

    Records alternate between two far corners, and every other place is in a sample or not: what
    a replay sees is a sum over all records that changed places, far above the sensitivity.
    """
    x, y = DATA
    places = torch.arange(len(x))
    corners = torch.where((places % 2 == 0)[:, None], 1.0, -1.0) * torch.ones_like(x)
    corners[:, 0] = 1e-3 * places
    data = (corners, y)

    def run(data):
        order = data[0][:, 0].argsort()
        return train(tuple(part[order] for part in data), batch_size=20)

    assert replay(run, data, with_record(data, 0, 5.0)).violations


def test_a_split_by_what_is_in_the_records():
    def run(data):
        x, y = data
        kept = x[:, 0] < x[:, 0].mean()
        return column_sum((x[kept], y[kept]))

    found = replay(run, DATA, with_record(DATA, 0, 1e6)).differences
    assert any("dataset_size" in each for each in found), found


def test_codes_in_the_order_in_which_values_occur():
    def run(data):
        x, y = data
        seen = {}
        codes = torch.tensor([seen.setdefault(int(each), len(seen)) for each in y])
        rows = rows_of((x, codes))
        return rows.noisy_counts(
            lambda x, y: y[:, None], bins=[3], noise_multiplier=1.0, label="counts"
        )

    found = replay(run, DATA, with_record(DATA, 0, y=2))
    assert found.violations[0].name == "counts"


def test_a_statistic_that_was_never_released():
    def run(data):
        noise = torch.randn(6)  # the same in both runs, and counted nowhere
        return column_sum(data), data[0].mean(0) + noise

    (found,) = replay(run, DATA, with_empty_record(DATA, 0)).differences
    assert found.startswith("result[1]['values']")


def test_noise_that_is_added_elsewhere():
    def run(data):
        total = data[0].sum(0)
        GaussianNoise().add_([total], [Query("total", 1.0, 1.0)])
        return total

    assert not replay(run, DATA, DATA).passed


def test_a_release_that_no_ledger_counts(monkeypatch):
    monkeypatch.setattr(Ledger, "record", lambda self, mechanism, **label: None)
    (found,) = replay(column_sum, DATA, with_empty_record(DATA, 0)).differences
    assert found == "1 releases were made, of which ledgers count 0"


def test_a_query_that_is_asked_only_of_some_data():
    def run(data):
        if data[0].max() > 100:
            return column_sum(data, "large values")
        return column_sum(data)

    found = replay(run, DATA, with_record(DATA, 3, 1e6)).differences
    assert found[0] == "release 0[0]['name']: 'sum', on the neighbour 'large values'"
    assert any(each.startswith("ledger[") for each in found)


def test_a_learning_rate_from_the_data():
    def run(data):
        rate = float(data[0].abs().max())
        return {name: rate * value for name, value in train(data).items()}

    found = replay(run, DATA, with_record(DATA, 3, 1e6)).differences
    assert found
    assert all(each.startswith("result['1.weight']") for each in found)


@pytest.mark.parametrize("kind", [ValueError, PrivacyError])
def test_a_refusal_that_depends_on_a_record(kind):
    def run(data):
        if data[0].isnan().any():
            raise kind("a value is missing")
        return column_sum(data)

    (found,) = [
        each
        for each in replay(run, DATA, with_record(DATA, 3, float("nan"))).differences
        if "ended" in each
    ]
    assert "a value is missing" in found
