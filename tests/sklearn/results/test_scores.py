"""Private scores: one release of counts, and what follows from it."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from clipless.errors import BudgetExhaustedError
from clipless.privacy import Ledger, Relation
from clipless.sklearn import CliplessClassifier, CliplessRegressor, load
from clipless.sklearn.results._scores import BINS, PrivateScores, bin_centers, bin_edges, bins_of
from clipless.statistics import PrivateRows

pytestmark = pytest.mark.filterwarnings("ignore::clipless.sklearn.RepeatedFitWarning")


def data(rows=6000):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 3))
    chance = 1 / (1 + np.exp(-2 * x[:, 0] - x[:, 1] + 1))
    return x, random.random(rows) < chance


@pytest.fixture(scope="module")
def fitted():
    x, y = data()
    return CliplessClassifier(3.0, random_state=0).fit(x[:3000], y[:3000])


def exact(probability, y):
    """The scores that counts without noise give."""
    chosen = probability > 0.5
    confusion = [[(chosen[y == side] == guess).sum() for guess in (0, 1)] for side in (0, 1)]
    histogram = [np.bincount(bins_of(probability[y == side]), minlength=BINS) for side in (0, 1)]
    return PrivateScores(
        classes=(False, True), rows=len(y), epsilon=np.inf, delta=0.0, deviation=0.0,
        confusion=np.array(confusion, float), histogram=np.array(histogram, float),
    )  # fmt: skip


def test_bins_hold_what_lies_between_their_edges():
    probability = np.random.default_rng(0).random(10_000)
    places, edges = bins_of(probability), bin_edges()
    for place in range(1, BINS - 1):
        inside = probability[places == place]
        assert (inside >= edges[place - 1]).all()
        assert (inside <= edges[place]).all()
    assert bins_of(np.array([0.0, 1.0])).tolist() == [0, BINS - 1]
    assert 0.5 in edges
    assert ((bin_centers()[1:-1] - edges[:-1]) > 0).all()


def test_counts_without_noise_give_the_scores_of_scikit_learn(fitted):
    x, y = data()
    x, y = x[3000:], y[3000:]
    probability = fitted.predict_proba(x)[:, 1]
    scores = exact(probability, y)
    assert scores.accuracy == fitted.score(x, y)
    assert abs(scores.auroc - roc_auc_score(y, probability)) < 0.005
    for name in ("accuracy", "auroc"):
        low, high = scores.interval(name)
        assert low < getattr(scores, name) < high < low + 0.08
    threshold = scores.threshold(recall=0.9)
    assert (probability[y] > threshold).mean() >= 0.9
    assert (probability[y] > bin_edges()[list(bin_edges()).index(threshold) + 1]).mean() < 0.9
    threshold = scores.threshold(precision=0.9)
    assert y[probability > threshold].mean() >= 0.9
    best = max(((probability > edge) == y).mean() for edge in bin_edges())
    assert ((probability > scores.threshold()) == y).mean() == best


def test_scores_are_one_release_of_the_stated_sensitivity(fitted, monkeypatch):
    x, y = data()
    x, y = x[3000:], y[3000:].tolist()
    seen, release = [], PrivateRows._release

    def recorded(rows, value, *query):
        seen.append((value.clone(), query[0]))
        return release(rows, value, *query)

    monkeypatch.setattr(PrivateRows, "_release", recorded)
    ledger = Ledger.in_memory(dataset_size=len(x), relation=Relation.ZERO_OUT)
    scores = fitted.score_privately(x, y, epsilon=1.0, ledger=ledger)
    assert ledger.releases == 1
    assert 0.99 < scores.epsilon <= 1.0
    for label in (None, "never", not y[0]):
        fitted.score_privately(x, [label, *y[1:]], epsilon=1.0)
    (value, bound), (empty, _), (strange, _), (_, _) = seen
    assert (value - empty).norm() == pytest.approx(bound)
    assert (strange == empty).all()
    assert abs(scores.accuracy - fitted.score(x, y)) < 0.02
    assert scores.deviation == pytest.approx(4.75, abs=0.5)
    with pytest.raises(BudgetExhaustedError):
        fitted.score_privately(x, y, epsilon=1.0, ledger=ledger)
    assert "accuracy" in str(scores)
    assert "confusion" in str(scores)


def test_intervals_cover_what_they_are_about(fitted):
    x, y = data(60_000)
    probability = fitted.predict_proba(x)[:, 1]
    true = {"accuracy": ((probability > 0.5) == y).mean(), "auroc": roc_auc_score(y, probability)}
    random = np.random.default_rng(1)
    inside = dict.fromkeys(true, 0)
    for _ in range(40):
        few = random.choice(60_000, 1500, replace=False)
        clean = exact(probability[few], y[few])
        noisy = PrivateScores(
            **{**vars(clean), "deviation": 5.0,
               "confusion": clean.confusion + 5 * random.normal(size=(2, 2)),
               "histogram": clean.histogram + 5 * random.normal(size=(2, BINS))},
        )  # fmt: skip
        for name, value in true.items():
            low, high = noisy.interval(name)
            inside[name] += low <= value <= high
    assert all(count >= 33 for count in inside.values()), inside


def test_calibration_follows_the_counts_and_decisions_follow_the_threshold(tmp_path):
    x, y = data()
    model = CliplessClassifier(3.0, random_state=0).fit(x[:3000], y[:3000])
    scores = exact(model.predict_proba(x[3000:])[:, 1], y[3000:])
    decisions = model.decision_function(x)

    def log_loss():
        probability = model.predict_proba(x[3000:])[np.arange(3000), y[3000:].astype(int)]
        return -np.log(probability).mean()

    before = log_loss()
    model.calibrate(scores)
    assert log_loss() <= before + 1e-3
    with pytest.raises(ValueError, match="calibrated already"):
        model.calibrate(scores)
    probability = model.predict_proba(x)[:, 1]
    for threshold in (0.1, 0.5, 0.9):
        model.decision_threshold_ = threshold
        assert (model.predict(x) == (probability > threshold)).all()
        radii = model.certified_radius(x[:50])
        model.decision_threshold_ = float(probability[0])
        assert model.certified_radius(x[:1])[0] < 1e-6  # on the border
    assert (radii > 0).all()
    model.decision_threshold_ = 0.2
    model.save(tmp_path / "model")
    again = load(tmp_path / "model")
    assert (again.predict(x) == (probability > 0.2)).all()
    assert np.array_equal(again.predict_proba(x), model.predict_proba(x))
    assert np.array_equal(model.decision_function(x), decisions)


def test_more_than_two_classes_have_a_confusion_matrix():
    x, _ = data()
    y = np.digitize(x[:, 0], [-0.5, 0.5])
    model = CliplessClassifier(3.0, classes=[0, 1, 2], random_state=0).fit(x[:3000], y[:3000])
    scores = model.score_privately(x[3000:], y[3000:], epsilon=2.0)
    assert scores.confusion.shape == (3, 3)
    assert scores.auroc is None
    assert abs(scores.accuracy - model.score(x[3000:], y[3000:])) < 0.02
    with pytest.raises(ValueError, match="two classes"):
        scores.threshold()


def test_errors_of_a_regressor():
    x, _ = data()
    y = 3 * x[:, 0] + np.random.default_rng(2).normal(size=len(x))
    model = CliplessRegressor(3.0, random_state=0).fit(x[:3000], y[:3000])
    found = model.score_privately(x[3000:], y[3000:], epsilon=1.0)
    error = y[3000:] - model.predict(x[3000:])
    assert found.mean_absolute_error == pytest.approx(np.abs(error).mean(), rel=0.1)
    assert found.root_mean_squared_error == pytest.approx((error**2).mean() ** 0.5, rel=0.1)
    assert abs(found.r2 - model.score(x[3000:], y[3000:])) < 0.05
    assert found.epsilon <= 1.0
