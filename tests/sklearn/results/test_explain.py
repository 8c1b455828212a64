"""Importances and contributions: from released numbers, and adding up."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from clipless.sklearn import CliplessClassifier, CliplessRegressor, TabularRule

pytestmark = pytest.mark.filterwarnings("ignore::clipless.sklearn.RepeatedFitWarning")


def table(rows=3000):
    random = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "age": random.normal(40, 10, rows),
            "id": range(rows),
            "noise": random.normal(size=rows),
            "job": random.choice(["baker", "smith"], rows),
        }
    )
    return frame, 0.1 * (frame["age"] - 40) + 2.0 * (frame["job"] == "baker")


def test_importances_find_the_columns_that_count_and_cost_nothing():
    frame, target = table()
    fitted = CliplessClassifier(3.0, random_state=0).fit(frame, target > 1)
    releases = fitted.privacy_.releases
    found = dict(zip(frame.columns, fitted.feature_importances_, strict=True))
    assert sum(found.values()) == pytest.approx(1)
    assert found["id"] == 0  # not used
    assert found["noise"] < 0.15 < min(found["age"], found["job"])
    assert np.array_equal(fitted.feature_importances_, list(found.values()))
    assert fitted.privacy_.releases == releases


def test_contributions_add_up_to_the_output():
    frame, target = table()
    rule = TabularRule.choose(rows=len(frame), columns=4, epsilon=3.0)
    line = CliplessClassifier(3.0, random_state=0, rule=replace(rule, knot_step=0, directions=0))
    for model, output, straight in (
        # A class that two columns decide: what age adds depends on the job.
        (
            CliplessClassifier(3.0, random_state=0).fit(frame, target > 1),
            "decision_function",
            False,
        ),
        (line.fit(frame, target > 1), "decision_function", True),
        (CliplessRegressor(3.0, random_state=0).fit(frame, target), "predict", True),
    ):
        outputs = getattr(model, output)(frame[:200])
        parts = model.contributions(frame[:200])
        assert parts.shape == (200, 4)
        rest = outputs - parts.sum(axis=1)
        assert np.ptp(rest) < 1e-3 * np.ptp(outputs)  # the reference's, the same for all rows
        assert not parts[:, 1].any()
        assert np.corrcoef(parts[:, 0], frame["age"][:200])[0, 1] > (0.9 if straight else 0.7)
        assert np.allclose(model.contributions(frame[7:8])[0], parts[7], atol=1e-4)


def test_contributions_of_several_classes_are_one_for_each():
    frame, target = table()
    y = np.digitize(target, [0, 2])
    fitted = CliplessClassifier(3.0, classes=[0, 1, 2], random_state=0).fit(frame, y)
    parts = fitted.contributions(frame[:20])
    assert parts.shape == (20, 3, 4)
    rest = fitted.decision_function(frame[:20]) - parts.sum(axis=2)
    assert np.ptp(rest, axis=0).max() < 1e-2
