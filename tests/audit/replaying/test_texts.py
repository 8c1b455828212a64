"""Texts replayed on awkward neighbours: the estimators, their cache of vectors, private scores."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from clipless.audit import record, with_empty_record
from clipless.privacy import Users
from clipless.sklearn import (
    CliplessClassifier,
    CliplessRegressor,
    CliplessTextClassifier,
    CliplessTextRegressor,
    HashedNgrams,
    TabularRule,
)
from tests.audit.neighbours import assert_replays
from tests.audit.replaying import test_tables as tables

ROWS, LONE = 120, 11
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def reviews(seed=0):
    """Short texts, one of which is the only one of its kind, and who liked it."""
    random = np.random.default_rng(seed)
    liked = random.random(ROWS) < 0.5
    nouns = random.choice(["film", "book", "song"], ROWS)
    texts = [f"a {'lovely' if yes else 'dull'} {n}" for yes, n in zip(liked, nouns, strict=True)]
    texts[LONE] = "nothing like any other"
    labels = pd.Series(np.where(liked, "yes", "no").astype(object), dtype=object)
    return pd.Series(texts, dtype=object), labels


def changed(data, row, text=None, label=None):
    texts, labels = (part.copy() for part in data)
    texts[row] = texts[row] if text is None else text
    labels[row] = labels[row] if label is None else label
    return texts, labels


def neighbours(data, last=ROWS - 1):
    emptied = {f"row {row} emptied": with_empty_record(data, row) for row in (0, 1, LONE, 60, last)}
    return emptied | {
        "a new word": changed(data, 5, "an unheard-of word"),
        "a new word first": changed(data, 0, "zyzzyva"),
        "a new word last": changed(data, last, "zyzzyva"),
        "the text of its neighbour": changed(data, 7, data[0][8]),
        "no text of its kind": changed(data, LONE, data[0][0]),
        "another text of its kind": changed(data, 12, data[0][LONE]),
        "a very long text": changed(data, 3, "lovely " * 3000),
        "a long word": changed(data, 3, "x" * 20_000),
        "an empty text": changed(data, 0, ""),
        "white space": changed(data, last, " \t\n"),
        "no letters": changed(data, 4, "?!... 12"),
        "no text": changed(data, 0, float("nan")),
        "the last is no text": changed(data, last, float("nan")),
        "a number": changed(data, 6, 3.5),
        "a list": changed(data, 6, np.array([1, 2])),
        "half of a pair": changed(data, 9, "\ud800"),
        "bytes": changed(data, 9, b"\xff"),
        "a null character": changed(data, 2, "\x00"),
        "the other label": changed(data, 0, label="yes" if data[1][0] == "no" else "no"),
        "a new class": changed(data, 5, label="never"),
        "a new class first": changed(data, 0, label="\x00"),
        "no label": changed(data, 0, label=float("nan")),
        "a label of another type": changed(data, last, label=1),
        "everything at once": changed(data, 0, float("nan"), "never"),
    }


def rule(**choices):
    found = TabularRule.choose_for_vectors(rows=ROWS, epsilon=8.0)
    return dataclasses.replace(found, steps=2, full_batch=True, batch_size=ROWS, **choices)


@pytest.mark.parametrize(
    "kept", [pytest.param(False, marks=pytest.mark.slow), True], ids=["without", "with a cache"]
)
def test_texts(kept, tmp_path):
    """The cache is private: what it holds of other texts changes nothing that is released."""
    data = reviews()
    cache = tmp_path / "vectors" if kept else None

    def run(data):
        estimator = CliplessTextClassifier(
            8.0, classes=["no", "yes"], rule=rule(), encoder=HashedNgrams(places=32), cache=cache
        ).fit(*data)
        estimator.save(tmp_path / "model")
        return {
            "weights": estimator.network_,
            "encoder": estimator._encoder.to_dict(),
            "predictions": estimator.predict(reviews(seed=1)[0]),
            "file": (tmp_path / "model").read_bytes(),
            "report": str(estimator.privacy_),
            "plan": estimator.privacy_.plan.to_dict(),
        }

    assert_replays(record(run, data), neighbours(data))


@pytest.mark.slow
def test_numbers_from_texts():
    texts, labels = reviews()
    data = texts, pd.Series((labels == "yes") * 3.0)

    def run(data):
        estimator = CliplessTextRegressor(8.0, rule=rule(), encoder=HashedNgrams(places=32))
        estimator.fit(*data)
        return {"weights": estimator.network_, "numbers": estimator._fitted_numbers(),
                "report": str(estimator.privacy_)}  # fmt: skip

    others = {
        name: (each[0], data[1])
        for name, each in neighbours((texts, labels)).items()
        if isinstance(each, tuple) and " label" not in name and " class" not in name
    }
    others |= {f"row {row} emptied": with_empty_record(data, row) for row in (0, LONE, ROWS - 1)}
    others |= {
        f"the target {value}": changed(data, 0, label=value) for value in (1e300, -1e300, np.inf)
    }
    assert_replays(record(run, data), others)


# --- private scores ------------------------------------------------------------------------------


def test_scores_of_texts_and_tables():
    """What a fitted estimator reaches on private rows: one release, whatever the rows hold."""
    data = reviews()
    fitted = CliplessTextClassifier(
        8.0, classes=["no", "yes"], rule=rule(), encoder=HashedNgrams(places=32)
    ).fit(*reviews(seed=1))

    def run(data):
        scores = fitted.score_privately(*data, epsilon=50.0)
        return dataclasses.asdict(scores), str(scores), scores.accuracy

    assert_replays(record(run, data), neighbours(data))


@pytest.mark.parametrize(
    "kind", [pytest.param(CliplessClassifier, marks=pytest.mark.slow), CliplessRegressor]
)
def test_scores_of_tables(kind):
    features, labels = tables.table()
    numbers = pd.Series(np.random.default_rng(2).normal(size=tables.ROWS))
    data = features, (labels if kind is CliplessClassifier else numbers)
    chosen = tables.rule(full=True)
    options = {"classes": ["no", "yes", "maybe"]} if kind is CliplessClassifier else {}
    fitted = kind(8.0, rule=chosen, **options).fit(*data)

    def run(data):
        scores = fitted.score_privately(*data, epsilon=50.0)
        return dataclasses.asdict(scores), str(scores)

    others = tables.neighbours(data)
    if kind is CliplessClassifier:
        others |= tables.labelled(data)
    else:
        others |= {f"the target {value}": tables.changed(data, 0, value)
                   for value in (1e300, -1e300, np.nan, np.inf, -np.inf)}  # fmt: skip
    assert_replays(record(run, data), others)


# --- people with several rows --------------------------------------------------------------------


@pytest.mark.slow
def test_people_with_several_texts():
    from clipless.audit import with_empty_user

    data = reviews()
    users = Users(np.arange(ROWS) // 4 % 23, records=3)
    chosen = dataclasses.replace(rule(), batch_size=users.number)

    def run(data):
        estimator = CliplessTextClassifier(
            8.0, classes=["no", "yes"], rule=chosen, encoder=HashedNgrams(places=32)
        ).fit(*data, users=users)
        return {"weights": estimator.network_, "report": str(estimator.privacy_)}

    others = {
        f"user {user} emptied": with_empty_user(data, users, user) for user in range(users.number)
    }
    for text in ("", "zyzzyva", float("nan"), "lovely " * 3000):
        texts, labels = (part.copy() for part in data)
        for row in users.of(2):
            texts[row], labels[row] = text, "no"
        others[f"all texts of one are {text!r:.12}"] = texts, labels
    assert_replays(record(run, data), others)
