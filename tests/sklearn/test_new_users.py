"""What a new user tries first: it works, or it says what to do."""

import datetime
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import scipy.sparse

from clipless.errors import PrivacyError
from clipless.privacy import LargeDelta, Ledger, Relation
from clipless.sklearn import CliplessClassifier, CliplessRegressor, ColumnWarning, TabularRule

pytestmark = pytest.mark.filterwarnings("ignore::clipless.sklearn.RepeatedFitWarning")

FORMATS = {
    "iso": "%Y-%m-%d",
    "day first": "%d/%m/%Y",
    "month first": "%m/%d/%Y %H:%M",
    "dotted": "%d.%m.%Y",
    "named": "%d-%b-%Y",
    "zone": "%Y-%m-%dT%H:%M:%S+00:00",
}


def days(rows=1500):
    random = np.random.default_rng(0)
    start = datetime.datetime(2000, 1, 1)
    return [start + datetime.timedelta(days=int(d)) for d in random.integers(0, 9000, rows)]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [object, "str"])
def test_dates_written_as_text_are_days(kind, dtype):
    dates = days()
    texts = pd.Series([day.strftime(FORMATS[kind]) for day in dates], dtype=dtype)
    y = np.array([day.year > 2012 for day in dates])
    fitted = CliplessClassifier(2.0, random_state=0).fit(pd.DataFrame({"since": texts}), y)
    assert fitted._schema.kinds == ("number",)
    if kind in ("day first", "month first"):  # for others it is noise that says so, and unused
        assert fitted._schema.day_first == ((0,) if kind == "day first" else ())
    days_since = fitted._read(pd.DataFrame({"since": texts}), reset=False).numbers[:, 0]
    midnights = [datetime.datetime(day.year, day.month, day.day) for day in dates]
    expected = [(day - datetime.datetime(2000, 1, 1)).days for day in midnights]
    assert days_since.tolist() == expected


def test_a_model_learns_from_dates(tmp_path):
    dates = days()
    frame = pd.DataFrame({"since": [day.strftime("%d/%m/%Y") for day in dates]})
    y = np.array([day.year > 2012 for day in dates])
    assert CliplessClassifier(2.0, random_state=0).fit(frame, y).score(frame, y) > 0.9


@pytest.mark.usefixtures("quick")
def test_words_stay_categories_and_one_date_among_them_changes_nothing():
    words = pd.DataFrame({"job": ["baker", "smith", "03/04/2020"] * 300})
    fitted = CliplessClassifier(2.0).fit(words, np.arange(900) % 3 == 0)
    assert fitted._schema.kinds == ("category",)


def test_a_quantity_as_target_of_a_classifier_is_refused_with_words():
    random = np.random.default_rng(0)
    x = random.normal(size=(40_000, 2))
    with pytest.raises(ValueError, match=r"quantity.*CliplessRegressor.*classes=\[\.\.\.\]"):
        CliplessClassifier(1.0).fit(x, random.integers(0, 100, 40_000))
    # A few frequent numbers among many rare ones, as prices are.
    y = np.where(random.random(40_000) < 0.3, random.integers(0, 3, 40_000), 0)
    y = np.where(random.random(40_000) < 0.7, random.integers(10, 10**6, 40_000), y)
    with pytest.raises(ValueError, match="quantity"):
        CliplessClassifier(1.0).fit(x, y)


def test_identifiers_as_target_are_refused_soon():
    x = np.random.default_rng(0).normal(size=(20_000, 2))
    with pytest.raises(ValueError, match="at least two classes"):
        CliplessClassifier(1.0).fit(x, np.arange(20_000))


@pytest.mark.usefixtures("quick")
def test_identifiers_are_left_out_or_named():
    random = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "id": np.arange(600),
            "age": random.normal(size=600),
            "customer_id": random.integers(0, 9, 600),
            "code": [f"x{k}" for k in range(600)],
        }
    )
    y = frame["age"] > 0
    with pytest.warns(ColumnWarning) as found:
        fitted = CliplessClassifier(2.0).fit(frame, y)
    said = " ".join(str(each.message) for each in found)
    assert "column 'id' is not used" in said
    assert "column 'customer_id' may hold identifiers" in said
    assert "column 'code' holds no value that many rows share" in said
    assert fitted._schema.kinds == ("ignored", "number", "number", "category")
    other = frame.assign(id=7)
    assert (fitted.predict(other) == fitted.predict(frame)).all()
    with pytest.warns(ColumnWarning):
        named = CliplessClassifier(2.0, categorical_features=["id"]).fit(frame, y)
    assert named._schema.kinds[0] == "category"
    alone = CliplessClassifier(2.0).fit(frame[["id"]], y)
    assert alone._schema.kinds == ("number",)


@pytest.mark.usefixtures("quick")
def test_deltas_above_a_tenth_of_one_over_the_rows_take_a_word(table):
    with pytest.raises(PrivacyError, match="LargeDelta"):
        CliplessClassifier(1.0, 1e-3).fit(*table)
    with pytest.warns(UserWarning, match=r"above 0\.1/N"):
        fitted = CliplessClassifier(1.0, LargeDelta(1e-3)).fit(*table)
    assert fitted.privacy_.delta == 1e-3
    for delta in (0.5, LargeDelta(0.5)):
        with pytest.raises(PrivacyError, match="at least 1/N"):
            CliplessClassifier(1.0, delta).fit(*table)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", [CliplessClassifier, CliplessRegressor])
@pytest.mark.parametrize("matrix", [scipy.sparse.csr_matrix, scipy.sparse.csc_array])
def test_sparse_matrices_are_tables(kind, matrix, table):
    x, y = table
    x = np.where(x > 0, x, 0.0)
    fitted = kind(2.0).fit(matrix(x), y)
    assert (fitted.predict(matrix(x)) == fitted.predict(x)).all()


def test_class_weights_move_decisions_and_cost_nothing():
    random = np.random.default_rng(0)
    x = random.normal(size=(4000, 3))
    y = np.where(x[:, 0] + random.normal(size=4000) > 1.8, "rare", "common")
    recalls, asked = {}, set()
    rule = replace(TabularRule.choose(rows=4000, columns=3, epsilon=2.0), steps=100)
    for weights in (None, "balanced", {"rare": 1e3}, {"common": 1e6}):
        ledger = Ledger.in_memory(dataset_size=4000, relation=Relation.ZERO_OUT)
        fitted = CliplessClassifier(
            2.0, classes=["common", "rare"], class_weight=weights, ledger=ledger, rule=rule
        ).fit(x, y)
        recalls[str(weights)] = float((fitted.predict(x[y == "rare"]) == "rare").mean())
        asked.add(ledger.releases)
    assert len(asked) == 1
    assert recalls["None"] < 0.5 < recalls["balanced"]
    assert recalls["{'rare': 1000.0}"] > 0.95
    assert recalls["{'common': 1000000.0}"] == 0.0
    for bad in ("even", {"rare": -1.0}, 3):
        with pytest.raises(ValueError, match="class_weight"):
            CliplessClassifier(class_weight=bad).fit(x, y)
