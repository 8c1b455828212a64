"""Tables in which people have several rows: what is protected is a person."""

import numpy as np
import pandas as pd
import pytest

from clipless.audit import record, with_empty_user
from clipless.privacy import Users
from clipless.sklearn import CliplessClassifier, CliplessRegressor

SIZES = [1, 10, 1000, *[2] * 200]


def table():
    rng = np.random.default_rng(0)
    ids = rng.permutation(np.repeat(np.arange(len(SIZES)), SIZES))
    users = Users(ids, records=8)
    count = len(ids)
    features = pd.DataFrame(
        {
            "age": rng.normal(size=count),
            "dose": rng.normal(5, 3, size=count),
            "ward": rng.choice(["x", "y", "z"], count),
        }
    )
    target = pd.Series(features.age + rng.normal(0, 0.5, size=count) > 0)
    for user in range(3):
        features.loc[users.of(user)] = [100.0, -100.0, "x"]
        target[users.of(user)] = False
    return users, features, target


@pytest.mark.parametrize("kind", [CliplessClassifier, CliplessRegressor])
def test_a_fit_on_neighbours_that_differ_by_a_person(kind):
    users, features, target = table()
    if kind is CliplessRegressor:
        target = target * 3.0
    rule = kind(epsilon=4.0)
    rule._read(features, reset=True)
    rule = rule._choose_rule(users.number)
    short = type(rule)(**{**vars(rule), "steps": 3})

    def fit(data):
        found = kind(epsilon=4.0, random_state=0, rule=short).fit(*data, users=users)
        return {"weights": found.network_, "privacy": found.privacy_.to_dict()}

    recording = record(fit, (features, target))
    for user in (0, 1, 2):
        result = recording.replay(with_empty_user((features, target), users, user))
        assert result.passed, result
        assert max(result.largest.values()) > 0.9
    plan = recording._outcome.result["privacy"]["plan"]
    assert (plan["user_records"], plan["sampling"]["dataset_size"]) == (8, 203)


def test_ids_that_do_not_fit_are_refused():
    _, features, target = table()
    with pytest.raises(ValueError, match="ids for 2 rows"):
        CliplessClassifier().fit(features, target, users=[1, 2])
