"""What users do with the estimators."""

import pickle
import warnings
from dataclasses import replace

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import make_classification, make_regression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from clipless.sklearn import (
    CliplessClassifier,
    CliplessRegressor,
    RepeatedFitWarning,
    TabularRule,
    load,
)


def test_it_learns():
    x, y = make_classification(3000, n_informative=6, class_sep=2.0, random_state=0)
    fitted = CliplessClassifier(epsilon=1.0, random_state=0).fit(x[:2000], y[:2000])
    assert fitted.score(x[2000:], y[2000:]) > 0.85
    assert 0.99 < fitted.privacy_.epsilon <= 1.0
    assert fitted.privacy_.delta == 5e-5


def test_several_classes_are_learnt():
    x, y = make_classification(
        4000, n_informative=8, n_redundant=0, n_classes=4, n_clusters_per_class=1, class_sep=2.0,
        random_state=0,
    )  # fmt: skip
    fitted = CliplessClassifier(epsilon=2.0, random_state=0).fit(x[:3000], y[:3000])
    assert fitted.score(x[3000:], y[3000:]) > 0.8


def test_regression_is_learnt_in_the_targets_own_units():
    x, y = make_regression(4000, 8, noise=5.0, random_state=0)
    fitted = CliplessRegressor(epsilon=2.0, random_state=0).fit(x[:3000], 1000 + y[:3000])
    assert fitted.score(x[3000:], 1000 + y[3000:]) > 0.75


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", [CliplessClassifier, CliplessRegressor])
def test_saved_without_pickle(kind, table, tmp_path):
    x, y = table
    fitted = kind(random_state=0).fit(x, y.astype(float))
    path = tmp_path / "model.safetensors"
    fitted.save(path)
    restored = load(path)
    np.testing.assert_array_equal(restored.predict(x), fitted.predict(x))
    assert restored.privacy_ == fitted.privacy_
    assert b"pickle" not in path.read_bytes()
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged"):
        load(path)
    (tmp_path / "other").write_text("no")
    with pytest.raises(ValueError, match="not a saved estimator"):
        load(tmp_path / "other")


@pytest.mark.usefixtures("quick")
def test_text_labels_and_columns_survive_saving(tmp_path):
    x = np.array([["a", "u"], ["b", "v"]] * 100, dtype=object)
    fitted = CliplessClassifier(random_state=0).fit(x, ["no", "yes"] * 100)
    fitted.save(tmp_path / "model")
    assert list(load(tmp_path / "model").classes_) == ["no", "yes"]


@pytest.mark.usefixtures("quick")
def test_pipelines_cross_validation_and_clones(table):
    x, y = table
    pipeline = make_pipeline(FunctionTransformer(np.tanh), CliplessClassifier(random_state=0))
    with pytest.warns(RepeatedFitWarning, match="2 private models"):
        scores = cross_val_score(pipeline, x, y, cv=3)
    assert scores.shape == (3,)
    assert clone(pipeline[-1]).get_params()["epsilon"] == 1.0


@pytest.mark.usefixtures("quick")
def test_one_fit_warns_of_nothing(table):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RepeatedFitWarning)
        CliplessClassifier().fit(*table)


@pytest.mark.usefixtures("quick")
def test_no_two_fits_are_the_same(table):
    x, y = table
    one, two = (CliplessClassifier(random_state=3).fit(x, y).decision_function(x) for _ in "ab")
    assert (one != two).mean() > 0.9
    fresh = CliplessClassifier().fit(x, y)
    assert not np.array_equal(fresh.decision_function(x), one)
    assert not fresh.privacy_.insecure
    pickle.loads(pickle.dumps(fresh))


@pytest.mark.parametrize(("bent", "times"), [(False, 4), (True, 16)], ids=["line", "bent"])
def test_certified_radii_hold(table, bent, times):
    """No move of the numbers within the radius, in spreads, changes a prediction.

    Where features have pieces and products, steep in places, the radii are smaller.
    """
    x, y = table
    rule = TabularRule.choose(rows=len(x), columns=4, epsilon=50.0)
    if not bent:
        rule = replace(rule, knot_step=0.0, directions=0)
    fitted = CliplessClassifier(epsilon=50.0, random_state=0, rule=rule).fit(x, y)
    assert (fitted._encoder.directions is not None) == bent
    radius = fitted.certified_radius(x)
    assert (radius > 0).mean() > 0.9
    spread = fitted._encoder.spread.numpy()
    random = np.random.default_rng(0)
    base = fitted.predict(x)
    towards = -np.sign(fitted.decision_function(x))[:, None] * np.array([1.0, 0, 0, 0])
    for trial in range(30):
        step = towards if trial == 0 else random.normal(size=x.shape) + towards
        step = step / np.linalg.norm(step, axis=1, keepdims=True) * radius[:, None] * 0.999
        assert (fitted.predict(x + step * spread) == base).all()
    # The radii mean something: some times as far along the worst direction, many change.
    far = x + times * towards * radius[:, None] * spread
    assert (fitted.predict(far) != base).mean() > 0.3
