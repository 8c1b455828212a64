"""Tables replayed on awkward neighbours: the estimators, and the command line on a file.

A table brings what tensors do not: labels, categories, types and gaps, of which nothing may be
learned but by queries that are paid for.
"""

import csv
import dataclasses
import datetime
import io
import json
import math
from decimal import Decimal

import numpy as np
import pytest

from clipless.audit import DataWithEmptyRecord, record, with_empty_record
from clipless.data.large import _table as large_table
from clipless.sklearn import CliplessClassifier, CliplessRegressor, TabularRule
from tests.audit.neighbours import assert_replays
from tests.cli.shell import here

pd = pytest.importorskip("pandas")

ROWS, LONE = 240, 11
"""How many rows the tables have, and which is the only one of its kind."""


def table(seed=0):
    """Numbers, dates, text and objects of several types, with gaps; labels, one of them rare."""
    random = np.random.default_rng(seed)
    a = random.normal(size=ROWS)
    kinds = random.choice(np.array(["left", "right", "middle"], dtype=object), ROWS)
    kinds[random.random(ROWS) < 0.1] = None
    kinds[LONE] = "nowhere else"
    days = pd.to_datetime("2024-01-01") + pd.to_timedelta(random.integers(0, 900, ROWS), "D")
    mixed = random.choice(np.array([1, True, 1.0, Decimal("1.0"), "1", None, 2], object), ROWS)
    features = pd.DataFrame(
        {
            "number": a,
            "gaps": np.where(random.random(ROWS) < 0.2, np.nan, random.integers(0, 9, ROWS)),
            "day": pd.Series(days),
            "kind": pd.Series(kinds, dtype=object),
            "mixed": pd.Series(mixed, dtype=object),
        }
    )
    labels = np.where(a + random.normal(size=ROWS) > 0, "yes", "no").astype(object)
    labels[LONE] = "maybe"
    return features, pd.Series(labels, dtype=object)


def changed(data, row, label=None, **values):
    """One row with other values, in columns of the same types."""
    features, target = (part.copy() for part in data)
    for column, value in values.items():
        place = features.columns.get_loc(column)
        if features.dtypes.iloc[place].kind == "O":
            column_values = features[column].to_numpy(dtype=object).copy()
            column_values[row] = value
            features[column] = pd.Series(column_values, dtype=object)
        else:
            features.iloc[row, place] = value
    if label is not None:
        target.iloc[row] = label
    types = [list(part.dtypes) if part.ndim == 2 else part.dtype for part in (features, target)]
    assert types == [list(data[0].dtypes), data[1].dtype]
    return features, target


def neighbours(data, last=ROWS - 1):
    """Rows that are emptied, and rows that hold what no other row does."""
    long_ago, late = pd.Timestamp("1700-01-01"), pd.Timestamp("2200-01-01")
    return {
        **{f"row {row} emptied": with_empty_record(data, row) for row in (0, 1, LONE, 100, last)},
        "a new category": changed(data, 5, kind="somewhere new"),
        "a new category first": changed(data, 0, kind="somewhere new"),
        "a new category last": changed(data, last, kind="somewhere new"),
        "no row of its kind": changed(data, LONE, kind="left"),
        "the other row of its kind": changed(data, 12, kind="nowhere else"),
        "a very long text": changed(data, 3, kind="x" * 10_000),
        "an empty text": changed(data, 3, kind=""),
        "a gap in text": changed(data, 0, kind=None),
        "a number in text": changed(data, 0, kind=3),
        "an extreme value": changed(data, 4, number=1e300),
        "an extreme negative value": changed(data, last, number=-1e300),
        "infinite": changed(data, 4, number=math.inf),
        "not a number": changed(data, 0, number=math.nan),
        "the last one is not a number": changed(data, last, number=math.nan),
        "a fraction among whole numbers": changed(data, 6, gaps=0.5),
        "no date": changed(data, 0, day=pd.NaT),
        "long ago": changed(data, last, day=long_ago),
        "far ahead": changed(data, 0, day=late),
        "true for one, first": changed(data, 0, mixed=True),
        "one for true, first": changed(data, 0, mixed=1),
        "a decimal first": changed(data, 0, mixed=Decimal("1.00")),
        "text for one": changed(data, 0, mixed="1"),
        "a date among objects": changed(data, 2, mixed=datetime.date(2024, 2, 29)),
        "everything at once": changed(
            data, 0, number=math.nan, gaps=1e300, day=pd.NaT, kind="somewhere new", mixed=None
        ),
    }


def labelled(data, last=ROWS - 1):
    """The same for labels."""
    return {
        "a new class": changed(data, 5, "never"),
        "a new class first": changed(data, 0, "never"),
        "a new class last": changed(data, last, "never"),
        "a class that sorts first": changed(data, 0, "\x00"),
        "no row of its class": changed(data, LONE, "yes"),
        "another row of its class": changed(data, 12, "maybe"),
        "the other label": changed(data, 0, "yes" if data[1].iloc[0] == "no" else "no"),
        "no label": changed(data, 0, math.nan),
        "a label of another type": changed(data, 0, 1),
    }


def rule(full, **choices):
    found = TabularRule.choose(rows=ROWS, columns=5, epsilon=8.0)
    batch = {"full_batch": full, "batch_size": ROWS if full else ROWS // 2}
    return dataclasses.replace(found, steps=3, hidden=8, **batch, **choices)


def published(estimator, path, features=None):
    """What a user has of a fitted estimator: all of it, and its file."""
    unseen = table(seed=1)[0]
    estimator.save(path)
    return {
        "weights": estimator.network_,
        "encoder": estimator._encoder.to_dict(),
        "predictions": estimator.predict(unseen if features is None else unseen[list(features)]),
        "classes": getattr(estimator, "classes_", None),
        "file": path.read_bytes(),
        "epsilon": estimator.privacy_.epsilon,
        "report": str(estimator.privacy_),
        "plan": estimator.privacy_.plan.to_dict(),
        "rule": estimator.rule_,
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("classes", [["no", "yes", "maybe"], None], ids=["declared", "found"])
def test_classifier(classes, tmp_path):
    data = table()

    def run(data):
        chosen = rule(full=classes is None)
        estimator = CliplessClassifier(8.0, classes=classes, rule=chosen)
        return published(estimator.fit(*data), tmp_path / "model")

    assert_replays(record(run, data), neighbours(data) | labelled(data))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_regressor(tmp_path):
    features, _ = table()
    data = features, pd.Series(np.random.default_rng(2).normal(size=ROWS))
    last = ROWS - 1

    def run(data):
        estimator = CliplessRegressor(8.0, rule=rule(full=False))
        return published(estimator.fit(*data), tmp_path / "model")

    others = neighbours(data) | {
        "a far target": changed(data, 0, 1e300),
        "a far negative target": changed(data, last, -1e300),
        "no target": changed(data, 3, math.nan),
        "an infinite target": changed(data, 3, math.inf),
    }
    assert_replays(record(run, data), others)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_arrays_of_numbers(tmp_path):
    """No names, no types but float64, labels as numbers."""
    random = np.random.default_rng(3)
    x = random.normal(size=(ROWS, 3))
    y = (x[:, 0] > 0).astype(np.int64)

    def run(data):
        estimator = CliplessClassifier(8.0, classes=[0, 1], rule=rule(full=True)).fit(*data)
        return {"weights": estimator.network_, "classes": estimator.classes_,
                "encoder": estimator._encoder.to_dict()}  # fmt: skip

    def other(row, value=None, label=None):
        inputs, labels = x.copy(), y.copy()
        inputs[row] = x[row] if value is None else value
        labels[row] = y[row] if label is None else label
        return inputs, labels

    others = {f"row {row} emptied": with_empty_record((x, y), row) for row in (0, 1, 120, ROWS - 1)}
    values = (0.0, 1e300, -1e300, 1e-300, math.nan, math.inf, -math.inf, 0.5)
    others |= {f"{value} in {row}": other(row, value) for value in values for row in (0, ROWS - 1)}
    others |= {f"label {label}": other(0, label=label) for label in (0, 1, 2, -1, 10**9)}
    assert_replays(record(run, (x, y)), others)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("classes", [["no", "yes", "maybe"], None], ids=["declared", "found"])
def test_table_in_pieces(classes, tmp_path, monkeypatch):
    """A parquet file that is read in pieces and kept on the disk, of which each holds few rows."""
    monkeypatch.setattr(large_table, "_ROWS", 37)
    features, target = table()
    data = features.drop(columns="mixed"), target

    def run(data):
        path = tmp_path / "table.parquet"
        frame = data[0].assign(answer=data[1].map(lambda each: None if each != each else each))
        frame.to_parquet(path, row_group_size=50)
        estimator = CliplessClassifier(8.0, classes=classes, rule=rule(full=classes is None))
        return published(estimator.fit(path, "answer"), tmp_path / "model", data[0])

    others = {
        name: other
        for name, other in (neighbours(table()) | labelled(table())).items()
        if not any(word in name for word in ("mixed", "object", "true", "decimal", "for one"))
        and name not in ("a number in text", "a label of another type", "everything at once")
    }
    assert len(others) > 20
    assert_replays(record(run, data), {name: _without_mixed(each) for name, each in others.items()})


def _without_mixed(neighbour):
    if not isinstance(neighbour, DataWithEmptyRecord):
        return neighbour[0].drop(columns="mixed"), neighbour[1]
    features, target = neighbour.data
    return with_empty_record((features.drop(columns="mixed"), target), neighbour.index)


# --- the command line ----------------------------------------------------------------------------

HEADER = ["number", "day", "kind", "gaps", "answer"]


def text_rows(seed=4):
    random = np.random.default_rng(seed)
    a = random.normal(size=ROWS)
    labels = np.where(a > 0, "yes", "no").astype(object)
    rows = []
    for k in range(ROWS):
        day = datetime.date(2024, 1, 1) + datetime.timedelta(days=int(random.integers(900)))
        gap = "" if random.random() < 0.3 else str(random.integers(5))
        kind = ["left", "right", "middle"][random.integers(3)]
        rows.append([f"{a[k]:.4f}", day.isoformat(), kind, gap, labels[k]])
    return rows


def trained_rows():
    """Which rows of the file are trained on, and not part of the public test set."""
    from clipless.data import split_rows

    chosen, _ = split_rows(ROWS, test_fraction=0.2, seed=0)
    return sorted(chosen.tolist())


def train_file(rows, folder, path, *flags):
    text = io.StringIO()
    csv.writer(text).writerows([HEADER, *rows])
    path.write_text(text.getvalue())
    done = here(
        "train", "--data", path, "--target", "answer", "--epsilon", "8", "--set", "steps=2",
        "--set", "hidden=8", *flags, "--out", folder / "run", "--json",
    )  # fmt: skip
    said = json.loads(done.out) if done.code == 0 else done.err
    if isinstance(said, dict):
        said.pop("seconds")
    return done.code, said


def file_neighbours(rows):
    places = trained_rows()
    first, last, lone, middle = places[0], places[-1], places[4], places[len(places) // 2]

    def other(place, **values):
        row = [values.get(name, old) for name, old in zip(HEADER, rows[place], strict=True)]
        return [*rows[:place], row, *rows[place + 1 :]]

    return {
        "a new category": other(middle, kind="somewhere new"),
        "a new category first": other(first, kind="somewhere new"),
        "a new category last": other(last, kind="somewhere new"),
        "a category with a comma": other(middle, kind='a "quoted", one'),
        "no category": other(first, kind=""),
        "the only one of its kind is gone": other(lone, kind="left"),
        "a number for a category": other(first, kind="7"),
        "text for a number": other(first, number="?"),
        "text for a number, last": other(last, number="many"),
        "a gap for a number": other(first, number=""),
        "an extreme number": other(last, number="1e300"),
        "beyond all numbers": other(middle, number="1e999"),
        "infinite": other(middle, number="inf"),
        "not a number": other(middle, number="nan"),
        "text for a date": other(first, day="tomorrow"),
        "no date": other(last, day=""),
        "a date that is none": other(middle, day="2024-02-30"),
        "another form of date": other(middle, day="1/2/2024"),
        "a fraction among whole numbers": other(first, gaps="0.5"),
        "true among whole numbers": other(first, gaps="True"),
        "a new class": other(middle, answer="maybe"),
        "a new class first": other(first, answer="maybe"),
        "a new class last": other(last, answer="0"),
        "a rare class is gone": other(lone, answer="yes"),
        "no class": other(first, answer=""),
        "a row of gaps": other(last, **dict.fromkeys(HEADER, "")),
        "a row of question marks": other(first, **dict.fromkeys(HEADER, "?")),
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("flags", [(), ("--set", "data.classes=['no', 'yes', 'rare']")],
                         ids=["found", "declared"])  # fmt: skip
def test_command_line(flags, tmp_path, quick_folders):
    rows = text_rows()
    lone = trained_rows()[4]
    rows[lone][2], rows[lone][4] = "nowhere else", "rare"

    def run(rows, folder):
        return train_file(rows, folder, tmp_path / "table.csv", *flags)

    recording = record(run, rows, with_folder=True)
    assert recording._outcome.result[0] == 0, recording._outcome.result
    assert_replays(recording, file_neighbours(rows))
    assert {"run/report.html", "run/ledger.jsonl", "run/plan.json", "run/config.json"} <= set(
        recording._outcome.files
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_audit_command(tmp_path, quick_folders):
    """`clipless audit --replay` reads, splits and trains on the file anew, with one row changed."""
    code, _ = train_file(text_rows(), tmp_path, tmp_path / "table.csv")
    assert code == 0
    flags = ("--examples", "20", "--no-bounds", "--replay", "2", "--replay-steps", "2", "--json")
    done = here("audit", tmp_path / "run", *flags)
    assert done.code == 0, done.err
    replays = done.json["replay"]
    assert len(replays) == 6
    assert any("is odd" in name for name in replays)
    assert all(each["passed"] for each in replays.values())
