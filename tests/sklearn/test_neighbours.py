"""One row changes nothing that is public: no code, no class, no schema, no error."""

import datetime
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
import torch

from clipless.privacy import Ledger, Relation, epsilon
from clipless.sklearn import CliplessClassifier, CliplessRegressor, TabularRule
from clipless.sklearn.tables._table import columns_of, encode, read_schema
from clipless.statistics import PrivateRows

pytestmark = [
    pytest.mark.usefixtures("quick"),
    pytest.mark.filterwarnings("ignore::clipless.sklearn.RepeatedFitWarning"),
]

ROWS = 600


def frame(rows=ROWS):
    random = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "typed": random.normal(size=rows),
            "mixed": pd.Series(random.normal(size=rows).tolist(), dtype=object),
            "city": pd.Series(random.choice(["Paris", "Lyon"], rows).tolist(), dtype=object),
        }
    )


@pytest.mark.parametrize("first", [True, 1, 1.0, Decimal("1.0"), Decimal("1.00")], ids=repr)
def test_the_first_row_does_not_decide_the_codes_of_others(first):
    def codes(*values):
        columns, names = columns_of(np.array([[value] for value in values], dtype=object))
        return encode(columns, read_schema(columns, names, [0])).codes[:, 0].tolist()

    others = [True, 1, Decimal("1.00"), 1.0, "1"]
    assert codes(first, *others)[1:] == codes(*others)
    assert len(set(codes(*others))) == 3


class Answers:
    """Records the answers of the queries of a fit, or gives those of another one."""

    def __init__(self, monkeypatch, answers=None):
        self.given, self.labels, self.values = [], [], []
        release = PrivateRows._release

        def recorded(rows, value, *query):
            self.values.append((value.clone(), query[0]))
            answer = release(rows, value, *query)
            if answers is not None:
                answer = answers[len(self.given)].clone()
            self.given.append(answer)
            self.labels.append(query[2])
            return answer

        monkeypatch.setattr(PrivateRows, "_release", recorded)


def fitted(kind, table, y, monkeypatch, answers=None, **options):
    with monkeypatch.context() as patch:
        record = Answers(patch, answers)
        estimator = kind(4.0, random_state=0, **options).fit(table, y)
    return estimator, record


CHANGES = {
    "a new category": ("city", "Atlantis"),
    "a number among texts": ("city", 7),
    "text among numbers": ("mixed", "seven"),
    "a boolean among numbers": ("mixed", True),
    "an extreme value": ("typed", 1e300),
    "infinity": ("typed", np.inf),
    "nothing": ("typed", np.nan),
    "a gap among texts": ("city", None),
    "NA among numbers": ("mixed", pd.NA),
    "a date among numbers": ("mixed", datetime.date(2020, 1, 1)),
    "a list": ("mixed", [1, 2]),
}
LABELS = {"a new class": "never", "a number": 3, "no label": None, "a boolean": True}


@pytest.mark.parametrize("row", [0, ROWS - 1])
@pytest.mark.parametrize("change", [*CHANGES, *LABELS])
def test_one_row_changes_queries_by_their_sensitivity_and_nothing_else(change, row, monkeypatch):
    """Two neighbours, each one row from the table without it: at most twice the sensitivity."""
    table = frame()
    y = pd.Series(np.where(table["typed"] > 0, "yes", "no"), dtype=object)
    other, other_y = table.copy(), y.copy()
    if change in CHANGES:
        column, value = CHANGES[change]
        other.at[row, column] = value
    else:
        other_y[row] = LABELS[change]
    one, asked = fitted(CliplessClassifier, table, y, monkeypatch)
    two, again = fitted(CliplessClassifier, other, other_y, monkeypatch, asked.given)
    assert again.labels == asked.labels
    reach = 1 if change == "no label" else 2
    for (value, sensitivity), (changed, same) in zip(asked.values, again.values, strict=True):
        assert value.shape == changed.shape
        assert sensitivity == same
        assert (value - changed).norm() <= reach * sensitivity * (1 + 1e-9)
    assert one._schema == two._schema
    assert one._schema.kinds == ("number", "number", "category")
    assert list(one.classes_) == list(two.classes_) == ["no", "yes"]
    assert one.rule_ == two.rule_
    assert one.privacy_.plan == two.privacy_.plan
    for name, part in one._encoder.to_dict().items():
        assert torch.equal(part, two._encoder.to_dict()[name])


@pytest.mark.parametrize("kind", [CliplessClassifier, CliplessRegressor])
def test_rows_without_a_label_contribute_nothing(kind, monkeypatch):
    """Neither to statistics nor to training: their inputs are zeros, as are their gradients."""
    x = np.random.default_rng(0).normal(size=(ROWS, 3))
    y = (x[:, 0] > 0).astype(float)
    y[5] = np.nan
    x[6] = np.nan  # a row that holds nothing
    handed = {}
    hand_over = PrivateRows.hand_over
    monkeypatch.setattr(
        PrivateRows, "hand_over", lambda rows: handed.setdefault("rows", hand_over(rows))
    )
    estimator, asked = fitted(kind, x, y, monkeypatch)
    inputs, _ = handed["rows"].tensors
    assert (inputs[5:7] == 0).all()
    assert (inputs[:5].norm(dim=1) > 0).all()
    present = [value for (value, _), label in zip(asked.values, asked.labels, strict=True)
               if label == "column histograms"]  # fmt: skip
    columns = 3 + (kind is CliplessRegressor)
    assert present[0].sum() == columns * (ROWS - 2)
    network = estimator.network_.train()
    network.zero_grad()
    network(torch.zeros(2, inputs.shape[1])).square().sum().backward()
    for name, parameter in network.named_parameters():
        if name != "1.bias":  # which is not trained
            assert (parameter.grad == 0).all()


@pytest.mark.parametrize("kind", [CliplessClassifier, CliplessRegressor])
@pytest.mark.parametrize("empty", ["labels", "values", "both"])
def test_a_table_that_holds_nothing_is_fitted_all_the_same(kind, empty):
    x, y = np.ones((50, 2)), np.ones(50)
    if empty != "labels":
        x[:] = np.nan
    if empty != "values":
        y[:] = np.nan
    options = {"classes": [0, 1]} if kind is CliplessClassifier else {}
    assert np.isfinite(kind(**options).fit(x, y).predict(x)).all()


@pytest.mark.parametrize("dtype", ["Int64", "boolean", "Float64", "string", "object"])
def test_a_missing_label_does_not_change_the_type_of_the_classes(dtype):
    x = np.random.default_rng(0).normal(size=(400, 2))
    y = pd.Series(np.arange(400) % 2).astype(str if dtype == "string" else int).astype(dtype)
    one = CliplessClassifier().fit(x, y)
    y[7] = pd.NA
    two = CliplessClassifier().fit(x, y)
    assert one.classes_.dtype == two.classes_.dtype
    assert list(one.classes_) == list(two.classes_)
    assert len(one.classes_) == 2


def test_rare_classes_are_not_told():
    x = np.random.default_rng(0).normal(size=(ROWS, 2))
    y = np.where(x[:, 0] > 0, 1, 0)
    for secret in (3, 10**6, -5):
        y[17] = secret
        estimator = CliplessClassifier(2.0).fit(x, y)
        assert estimator.classes_.tolist() == [0, 1]
        assert "set of classes is public" not in " ".join(estimator.privacy_.caveats)


def test_classes_are_paid_for_in_epsilon_and_delta():
    x = np.random.default_rng(0).normal(size=(ROWS, 2))
    ledger = Ledger.in_memory(dataset_size=ROWS, relation=Relation.ZERO_OUT)
    estimator = CliplessClassifier(2.0, 1e-5, ledger=ledger).fit(x, (x[:, 0] > 0).astype(int))
    (entry,) = [each for each in ledger.entries() if each.label == "classes"]
    assert entry.mechanism.failure == pytest.approx(1e-6)
    assert entry.mechanism.noise_multiplier == estimator.rule_.class_noise
    assert estimator.privacy_.epsilon == epsilon(ledger.history(), 1e-5) <= 2.0
    given = Ledger.in_memory(dataset_size=ROWS, relation=Relation.ZERO_OUT)
    CliplessClassifier(2.0, ledger=given, classes=[0, 1]).fit(x, (x[:, 0] > 0).astype(int))
    assert all(mechanism.failure == 0 for mechanism, _ in given.history())


def test_labels_outside_the_given_classes_contribute_nothing():
    x = np.random.default_rng(0).normal(size=(ROWS, 2))
    y = np.where(x[:, 0] > 0, "a", "b").astype(object)
    y[:9] = ["c", None, 1, True, np.nan, pd.NA, pd.NaT, "d", b"e"]
    estimator = CliplessClassifier(classes=["a", "b"]).fit(x, y)
    assert list(estimator.classes_) == ["a", "b"]
    only = CliplessClassifier(classes=["a", "b"]).fit(x, np.full(ROWS, "a"))
    assert list(only.classes_) == ["a", "b"]
    # Classes are told apart by type: text is none of the numbers.
    apart = CliplessClassifier(classes=[True, 1, "1"]).fit(x, np.array(["1"] * ROWS, dtype=object))
    assert len(apart.classes_) == 3


@pytest.mark.parametrize("dtype", ["string", "Int64", "boolean", "Float64", "object", "category"])
def test_pandas_missing_values_in_columns_and_labels(dtype):
    values = {"string": ["a", "b"], "category": ["a", "b"], "object": ["a", 1]}.get(dtype, [0, 1])
    column = pd.Series([*values, pd.NA] * 200, dtype=dtype)
    table = pd.DataFrame({"a": column, "b": np.arange(600.0)})
    y = pd.Series([0, 1, 1] * 200)
    estimator = CliplessClassifier(random_state=0).fit(table, y)
    assert np.isfinite(estimator.decision_function(table)).all()
    labelled = CliplessClassifier(random_state=0).fit(table[["b"]], column)
    assert len(labelled.classes_) == 2
    assert 0 <= labelled.score(table[["b"]], column) <= 2 / 3


@pytest.mark.parametrize("kind", [CliplessClassifier, CliplessRegressor])
def test_random_state_fixes_initial_weights_and_no_noise(kind, table, monkeypatch):
    x, y = table
    from clipless.training import Trainer

    begun, fit = [], Trainer.fit

    def look(trainer, data):
        begun.append([each.detach().clone() for each in trainer.model.parameters()])
        return fit(trainer, data)

    monkeypatch.setattr(Trainer, "fit", look)
    # A line begins at zero: nothing of it is drawn.
    rule = replace(TabularRule.choose(rows=len(x), columns=5, epsilon=4.0), hidden=32)
    (one, first), (two, second) = (
        fitted(kind, x, y.astype(float), monkeypatch, rule=rule) for _ in range(2)
    )
    # The last bias is a released value, which has noise of its own.
    for before, after in zip(begun[0][:2], begun[1][:2], strict=True):
        assert torch.equal(before, after)
    for answer, again in zip(first.given, second.given, strict=True):
        assert (answer != again).double().mean() > 0.9
    networks = (list(estimator.network_.parameters())[:2] for estimator in (one, two))
    assert not any(torch.equal(a, b) for a, b in zip(*networks, strict=True))
