"""The estimators know their training data through accounted mechanisms alone."""

import threading

import numpy as np
import pytest
import torch

from clipless.accounting import RenyiFilter
from clipless.errors import BudgetExhaustedError, PrivacyError
from clipless.privacy import Ledger, Relation, epsilon
from clipless.sklearn import CliplessClassifier, CliplessRegressor, RepeatedFitWarning, TabularRule
from clipless.statistics import PrivateRows
from clipless.training import Trainer

pytestmark = pytest.mark.usefixtures("quick")


class Recorded:
    """Records what the mechanisms answer, or answers from a record."""

    def __init__(self, monkeypatch, answers=None):
        self.answers, self.asked = [], 0
        release = PrivateRows._release

        def recording(rows, *query):
            answer = release(rows, *query)
            if answers is not None:
                answer = answers[self.asked].clone()
            self.asked += 1
            self.answers.append(answer)
            return answer

        monkeypatch.setattr(PrivateRows, "_release", recording)


def choices_before_training(estimator, x, y, monkeypatch):
    """Everything that training is given besides the rows themselves."""
    seen = {}

    def look(trainer, data):
        seen["weights"] = {k: v.clone() for k, v in trainer.model.state_dict().items()}
        seen["options"] = (trainer._batch_size, trainer._target_delta, trainer._options)
        raise StopIteration

    monkeypatch.setattr(Trainer, "fit", look)
    with pytest.raises(StopIteration):
        estimator.fit(x, y)
    seen["encoder"] = estimator._encoder.to_dict()
    seen["rule"] = estimator.rule_
    return seen


def assert_same(one, other):
    for part in ("weights", "encoder"):
        assert one[part].keys() == other[part].keys()
        for name in one[part]:
            assert torch.equal(one[part][name], other[part][name]), name
    assert one["options"] == other["options"]
    assert one["rule"] == other["rule"]


class Sneaky(CliplessClassifier):
    """Takes a mean behind the ledger's back."""

    def _read(self, table, *, reset):
        rows = super()._read(table, reset=reset)
        self._mean = rows.numbers.mean(0)
        return rows

    def _take_target(self, scaling):
        scaling.center.copy_(self._mean)
        return scaling


@pytest.mark.parametrize("kind", [CliplessClassifier, CliplessRegressor, Sneaky])
def test_choices_depend_on_the_data_through_the_answers_alone(kind, monkeypatch):
    """Given the same answers, completely different data lead to the same choices.

    So neighbouring data sets differ in what is chosen before training by no more than the
    mechanisms allow: whatever is chosen is a function of their answers.
    """
    random = np.random.default_rng(0)
    # Enough rows for the covariance to be asked for.
    first, second = random.normal(size=(1600, 3)), 5 * random.normal(size=(1600, 3)) + 2
    y = np.arange(1600) % 2
    with monkeypatch.context() as patch:
        recorded = Recorded(patch)
        one = choices_before_training(kind(random_state=0), first, y, patch)
    with monkeypatch.context() as patch:
        Recorded(patch, recorded.answers)
        other = choices_before_training(kind(random_state=0), second, y[::-1], patch)
    assert len(recorded.answers) == (5 if kind is not CliplessRegressor else 4)
    if kind is Sneaky:
        with pytest.raises(AssertionError):
            assert_same(one, other)
    else:
        assert_same(one, other)


def test_everything_is_in_one_ledger_and_within_the_budget(table):
    x, y = table
    ledger = Ledger.in_memory(dataset_size=300, relation=Relation.ZERO_OUT)
    fitted = CliplessClassifier(1.5, 1e-4, ledger=ledger, random_state=0).fit(x, y)
    labels = [entry.label for entry in ledger.entries() if entry.mechanism is not None]
    assert labels[:4] == ["column histograms", "column means", "column spreads", "class counts"]
    assert set(labels[4:]) == {"training step"}
    assert fitted.privacy_.epsilon == epsilon(ledger.history(), 1e-4) <= 1.5
    assert ledger.releases == 4 + fitted.n_iter_


def test_a_covariance_that_would_be_noise_is_not_asked_for():
    rule = TabularRule.choose(rows=1000, columns=4, epsilon=1.0)
    asked = [rows for rows in (100, 1000, 10_000) if rule.decorrelates(rows=rows, features=9)]
    assert asked == [10_000]
    assert not rule.decorrelates(rows=10**9, features=5000)  # a matrix of 25 million numbers


@pytest.mark.parametrize("kind", [CliplessClassifier, CliplessRegressor])
def test_one_ledger_is_one_budget(kind, table):
    """A fit that does not fit into the budget is refused before anything is asked."""
    x, y = table
    ledger = Ledger.in_memory(dataset_size=300, relation=Relation.ZERO_OUT)
    kind(1.0, 1e-4, ledger=ledger).fit(x, y)
    spent, releases = epsilon(ledger.history(), 1e-4), ledger.releases
    assert spent <= 1.0
    for _ in range(3):
        with pytest.raises(BudgetExhaustedError):
            kind(1.0, 1e-4, ledger=ledger).fit(x, y)
    assert ledger.releases == releases
    assert epsilon(ledger.history(), 1e-4) == spent


@pytest.mark.parametrize("kind", [CliplessClassifier, CliplessRegressor])
@pytest.mark.parametrize("rows", [300, 1600])
@pytest.mark.parametrize("typed", [True, False])
def test_all_queries_are_known_before_the_first(kind, rows, typed, monkeypatch):
    """What is checked against the budget is what a fit then asks, whatever it is answered."""
    x = np.random.default_rng(0).normal(size=(rows, 3))
    y = (x[:, 0] > 0).astype(int)
    ledger = Ledger.in_memory(dataset_size=rows, relation=Relation.ZERO_OUT)
    estimator = kind(ledger=ledger)
    planned = []
    queries = kind._queries
    monkeypatch.setattr(
        kind, "_queries", lambda *given: planned.append(queries(*given)) or planned[-1]
    )
    # Columns of objects are put to a vote; here it says that none of them holds numbers.
    estimator.fit(x if typed else x.astype(str).astype(object), y)
    entries = [each for each in ledger.entries() if each.mechanism is not None]
    asked = [each.mechanism for each in entries if each.label != "training step"]
    assert [(each.noise_multiplier, each.failure) for each in asked] == planned[0]
    labels = [each.label for each in entries if each.label != "training step"]
    assert ("feature covariance" in labels) == (rows == 1600 and typed)
    assert ("column kinds" in labels) == (not typed)
    assert "column means" in labels


def test_public_bounds_cost_nothing(table):
    x, y = table
    ledger = Ledger.in_memory(dataset_size=300, relation=Relation.ZERO_OUT)
    bounds = np.array([[-4.0] * 4, [4.0] * 4])
    CliplessClassifier(ledger=ledger, feature_bounds=bounds).fit(x, y)
    assert "column means" not in [entry.label for entry in ledger.entries()]
    with pytest.raises(ValueError, match="feature_bounds"):
        CliplessClassifier(feature_bounds=[[0.0], [1.0]]).fit(x, y)


def test_the_report_names_what_is_taken_as_public(table):
    x, y = table
    caveats = " ".join(CliplessClassifier().fit(x, y).privacy_.caveats)
    assert "schema" in caveats
    assert "set of classes is public" in caveats  # by the type of y: booleans
    released = " ".join(CliplessClassifier().fit(x, y.astype(int)).privacy_.caveats)
    assert "found by a noisy count" in released
    named = CliplessClassifier(classes=[0, 1]).fit(x, y.astype(int)).privacy_.caveats
    assert "set of classes is public" in " ".join(named)


def test_fits_of_several_threads_share_a_budget_and_do_not_exceed_it(table):
    """Each found room before the others had asked anything: 12.5 was spent of 8."""
    x, y = table
    ledger = Ledger.in_memory(dataset_size=len(x), relation=Relation.ZERO_OUT)
    refused = []

    def fit():
        try:
            CliplessClassifier(1.0, 1e-4, ledger=ledger).fit(x, y)
        except BudgetExhaustedError as error:
            refused.append(error)

    threads = [threading.Thread(target=fit) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 2
    assert epsilon(ledger.history(), 1e-4) <= 1.0


@pytest.mark.parametrize("options", [{}, {"classes": [0, 1], "delta": 1e-6}])
def test_what_a_filter_does_not_cover_is_refused_before_the_first_query(table, options):
    x, y = table
    declared = RenyiFilter(epsilon=4.0, delta=1e-4, order=8.0)
    size, relation = len(x), Relation.ZERO_OUT
    ledger = Ledger.in_memory(dataset_size=size, relation=relation, filter=declared)
    with pytest.raises(PrivacyError):
        CliplessClassifier(4.0, ledger=ledger, **options).fit(x, y.astype(int))
    assert ledger.releases == 0


def test_fits_that_fail_after_a_query_count_as_well(table):
    x, _ = table
    with pytest.raises(ValueError, match="at least two classes"):
        CliplessClassifier().fit(x, np.zeros(len(x), dtype=int))
    with pytest.warns(RepeatedFitWarning), pytest.raises(ValueError, match="is spent"):
        CliplessClassifier().fit(x, np.zeros(len(x), dtype=int))


def test_wide_tables_of_few_rows_are_treated_as_vectors_and_others_are_not():
    def clip(rows, columns):
        return TabularRule.choose(rows=rows, columns=columns, epsilon=1.0).product_clip

    assert clip(5_485, 384) == TabularRule.choose_for_vectors(rows=5_485, epsilon=1.0).product_clip
    assert clip(50 * 384, 384) == clip(5_485, 127) == 0.5
    x = np.random.default_rng(0).normal(size=(400, 130))
    fitted = CliplessClassifier(4.0, classes=[0, 1, 2], random_state=0).fit(x, np.arange(400) % 3)
    assert len(fitted.network_) == 2
    assert fitted.predict_proba(x[:3]).shape == (3, 3)
    assert fitted.contributions(x[:3]).shape == (3, 3, 130)
