"""Figures of the classifier."""

from dataclasses import replace

import numpy as np
import pytest

from clipless.sklearn import CliplessClassifier, TabularRule

pytest.importorskip("matplotlib")


def table(rows, seed):
    x = np.random.default_rng(seed).normal(size=(rows, 3))
    return x, (x[:, 0] > 0).astype(int)


def test_one_fit_for_each_epsilon_and_chance_as_a_line():
    x, y = table(600, 0)
    test = table(200, 1)
    rule = replace(TabularRule.choose(rows=600, columns=3, epsilon=1.0), steps=100)
    classifier = CliplessClassifier(classes=[0, 1], rule=rule)
    figure = classifier.plot_privacy_utility(x, y, test=test, epsilons=(1.0, 8.0))
    (axes,) = figure.axes
    curve, chance = axes.get_lines()
    assert curve.get_xdata().tolist() == [1.0, 8.0]
    assert curve.get_ydata()[1] > 0.75
    share = max(np.mean(test[1]), 1 - np.mean(test[1]))
    assert chance.get_ydata()[0] == pytest.approx(share)
    assert not hasattr(classifier, "network_")  # the estimator itself is not fitted by this


def test_a_ledger_does_not_pay_for_trying_out(tmp_path):
    classifier = CliplessClassifier(classes=[0, 1], ledger=tmp_path / "ledger.jsonl")
    with pytest.raises(ValueError, match="ledger"):
        classifier.plot_privacy_utility(*table(100, 0), test=table(50, 1))
    assert not (tmp_path / "ledger.jsonl").exists()


def test_calibration_counts_right_predictions():
    x, y = table(600, 0)
    classifier = CliplessClassifier(epsilon=8.0, classes=[0, 1]).fit(x, y)
    (axes,) = classifier.plot_calibration(x, y, bins=1).axes
    (point,) = axes.get_lines()[1].get_xydata()
    assert point[0] == pytest.approx(classifier.predict_proba(x).max(axis=1).mean(), rel=1e-5)
    assert point[1] == pytest.approx(classifier.score(x, y))
