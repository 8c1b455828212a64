"""The estimators know their training data through accounted mechanisms alone."""

import numpy as np
import pytest
import torch

from clipless.data._custody import PrivateRows
from clipless.errors import BudgetExhaustedError
from clipless.privacy import Ledger, Relation, epsilon
from clipless.sklearn import CliplessClassifier, CliplessRegressor, TabularRule
from clipless.training import Trainer

pytestmark = pytest.mark.usefixtures("quick")


class Recorded:
    """Records what the mechanisms answer, or answers from a record."""

    def __init__(self, monkeypatch, answers=None):
        self.answers, self.asked = [], 0
        release = PrivateRows._release

        def recording(rows, value, sensitivity, noise_multiplier, label):
            answer = release(rows, value, sensitivity, noise_multiplier, label)
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
        seen["options"] = (trainer._steps, trainer._batch_size, dict(trainer._options))
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
        numbers, codes = super()._read(table, reset=reset)
        self._mean = numbers.mean(0)
        return numbers, codes

    def _feature_scaling(self, scaling):
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
    ledger = Ledger.in_memory(dataset_size=300, relation=Relation.ADD_REMOVE)
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


def test_one_ledger_is_one_budget(table):
    x, y = table
    ledger = Ledger.in_memory(dataset_size=300, relation=Relation.ADD_REMOVE)
    CliplessClassifier(1.0, ledger=ledger).fit(x, y)
    with pytest.raises(BudgetExhaustedError):
        CliplessClassifier(1.0, ledger=ledger).fit(x, y)


def test_public_bounds_cost_nothing(table):
    x, y = table
    ledger = Ledger.in_memory(dataset_size=300, relation=Relation.ADD_REMOVE)
    bounds = np.array([[-4.0] * 4, [4.0] * 4])
    CliplessClassifier(ledger=ledger, feature_bounds=bounds).fit(x, y)
    assert "column means" not in [entry.label for entry in ledger.entries()]
    with pytest.raises(ValueError, match="feature_bounds"):
        CliplessClassifier(feature_bounds=[[0.0], [1.0]]).fit(x, y)


def test_the_report_names_what_is_taken_as_public(table):
    x, y = table
    caveats = " ".join(CliplessClassifier().fit(x, y).privacy_.caveats)
    assert "schema" in caveats
    assert "set of labels" in caveats
    named = " ".join(CliplessClassifier(classes=[False, True]).fit(x, y).privacy_.caveats)
    assert "set of labels" not in named
