"""Tables as they come: they work, or fail with words a data scientist understands."""

import datetime

import numpy as np
import pandas as pd
import pytest

from clipless.sklearn import CliplessClassifier, CliplessRegressor

pytestmark = pytest.mark.usefixtures("quick")


def mixed(rows=200):
    random = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "age": random.integers(18, 90, rows),
            "income": np.where(random.random(rows) < 0.2, np.nan, random.lognormal(10, 1, rows)),
            "city": random.choice(["Paris", "Lyon", None], rows),
            "plan": pd.Categorical(random.choice(["basic", "pro"], rows)),
            "since": [datetime.datetime(2020, 1, 1) + datetime.timedelta(days=int(d))
                      for d in random.integers(0, 999, rows)],
            "active": random.random(rows) < 0.5,
            "constant": 1.0,
        }
    )  # fmt: skip


def test_strings_missing_values_dates_and_constants():
    frame = mixed()
    y = frame["age"] > 50
    classifier = CliplessClassifier(random_state=0).fit(frame, y)
    assert classifier.predict_proba(frame).shape == (200, 2)
    assert np.isfinite(classifier.decision_function(frame)).all()
    assert list(classifier.feature_names_in_) == list(frame.columns)
    # A category that was never seen, and one that is missing, are values like any other.
    strange = frame.assign(city="Atlantis", income=np.nan)
    assert np.isfinite(classifier.predict_proba(strange)).all()


def test_rows_encode_alike_whatever_is_around_them():
    frame = mixed()
    classifier = CliplessClassifier(random_state=0).fit(frame, frame["age"] > 50)
    together = classifier.decision_function(frame)
    alone = np.concatenate([classifier.decision_function(frame.iloc[[i]]) for i in range(5)])
    np.testing.assert_allclose(alone, together[:5], atol=1e-5)


def test_object_arrays_hold_text_and_numbers():
    x = np.array([["a", 1.0], ["b", None], ["a", 3.0], ["c", 4.0]] * 100, dtype=object)
    classifier = CliplessClassifier(random_state=0).fit(x, [0, 1, 0, 1] * 100)
    assert classifier._schema.categorical == (True, False)
    assert classifier.predict(x).shape == (400,)


def test_numbers_can_be_declared_categories():
    x = np.random.default_rng(0).integers(0, 5, (100, 2))
    fitted = CliplessClassifier(categorical_features=[1], random_state=0).fit(x, x[:, 1] > 2)
    assert fitted._schema.categorical == (False, True)
    with pytest.raises(ValueError, match="neither the name of a column nor a position"):
        CliplessClassifier(categorical_features=[7]).fit(x, x[:, 1] > 2)


@pytest.mark.parametrize(
    "labels",
    [["no", "yes"], [False, True], [-1, 1], [0.0, 1.0], np.array(["x", "y"], dtype=object)],
    ids=str,
)
def test_labels_of_any_type(labels, table):
    x, above = table
    y = np.asarray(labels)[above.astype(int)]
    fitted = CliplessClassifier(random_state=0).fit(x, y)
    assert set(fitted.predict(x)) <= set(y)
    assert fitted.classes_.dtype == y.dtype


def test_more_than_two_classes(table):
    x, _ = table
    y = np.digitize(x[:, 0], [-0.5, 0.5])
    fitted = CliplessClassifier(random_state=0).fit(x, y)
    probabilities = fitted.predict_proba(x)
    assert probabilities.shape == (300, 3)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)


def test_more_features_than_rows():
    x = np.random.default_rng(0).normal(size=(20, 100))
    assert CliplessClassifier(random_state=0).fit(x, x[:, 0] > 0).predict(x).shape == (20,)


def test_two_rows():
    fitted = CliplessClassifier(classes=[0, 1]).fit([[0.0], [1.0]], [0, 1])
    assert fitted.privacy_.epsilon <= 1.0
    assert CliplessRegressor(random_state=0).fit([[0.0], [1.0]], [0.0, 1.0]).predict([[0.5]]).size


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        ([[1.0], [2.0]], [1, 1], r"n_samples=2 are too few .* classes=\[...\]"),
        (np.zeros((300, 1)), [1] * 300, r"at least two classes, .* 1 label\(s\) .* \(1\)"),
        (np.zeros((300, 1)), np.arange(300) / 7, r"Unknown label type: .* CliplessRegressor"),
        ([[1.0], [2.0]], None, "requires y to be passed"),
        ([[1.0], [2.0]], [0, 1, 1], "inconsistent numbers of samples"),
        (np.zeros((0, 3)), [], "0 sample"),
        (pd.DataFrame(index=range(3)), [0, 1, 0], r"0 feature\(s\)"),
        (pd.DataFrame({"a": [1 + 2j, 1j]}), [0, 1], "Complex data not supported"),
    ],
    ids=["two rows", "one class", "a quantity", "no labels", "lengths", "no rows", "no columns",
         "complex"],
)  # fmt: skip
def test_what_cannot_work_says_why(x, y, words):
    with pytest.raises(ValueError, match=words):
        CliplessClassifier().fit(x, y)


def test_classes_that_make_no_sense_are_refused(table):
    x, y = table
    for classes, words in (([0, 0.0], "twice"), ([0], "two classes"), ([0, None], "missing")):
        with pytest.raises(ValueError, match=words):
            CliplessClassifier(classes=classes).fit(x, y)


@pytest.mark.parametrize("epsilon", [0, -1.0, float("nan"), float("inf"), "1"])
def test_epsilon_must_be_a_number(epsilon, table):
    with pytest.raises(ValueError, match="epsilon must be"):
        CliplessClassifier(epsilon).fit(*table)


@pytest.mark.parametrize("gap", [False, True])
def test_arrow_columns_with_and_without_gaps(gap):
    arrow = pytest.importorskip("pyarrow")
    day, span = datetime.date(2024, 2, 29), datetime.timedelta(days=1)
    columns = {"day": ([day], arrow.date32()), "date": ([day], arrow.date64()),
               "span": ([span], arrow.duration("us")), "flag": ([True], arrow.bool_())}  # fmt: skip
    frame = pd.DataFrame(
        {
            name: pd.Series(value * 199 + [None if gap else value[0]], dtype=pd.ArrowDtype(kind))
            for name, (value, kind) in columns.items()
        }
    )
    fitted = CliplessClassifier().fit(frame, np.arange(200) % 2 == 0)
    assert fitted._schema.kinds == ("number",) * 4


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("odd", [[1], [1, 2], [[1], [2, 3]], (1,), np.ones(1), np.array(1), {}])
@pytest.mark.parametrize("row", [0, 50])
def test_a_label_that_is_a_list_stops_nothing(odd, row):
    """Whether a fit fails, or warns, would tell of that row."""
    y = [0, 1] * 100
    y[row] = odd
    x = np.random.default_rng(0).normal(size=(200, 2))
    assert CliplessClassifier(classes=[0, 1]).fit(x, y).classes_.tolist() == [0, 1]
