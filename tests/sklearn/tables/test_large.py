"""Estimators on tables that are read in pieces: what they learn, ask and refuse."""

import numpy as np
import pandas as pd
import pyarrow
import pytest
import torch

from clipless.data import LargeTable, Scratch, read_table
from clipless.data.large import _table
from clipless.privacy import Ledger, Relation
from clipless.sklearn import CliplessClassifier, CliplessRegressor, CliplessTextClassifier
from clipless.sklearn.tables import _large
from clipless.sklearn.tables._table import columns_of, encode, read_schema
from clipless.statistics import PrivateRows, _private_rows

pytestmark = [
    pytest.mark.usefixtures("quick", "short_pieces"),
    pytest.mark.filterwarnings("ignore::clipless.sklearn.RepeatedFitWarning"),
]
ROWS = 900


@pytest.fixture
def short_pieces(monkeypatch):
    """Many pieces, as of a large table."""
    monkeypatch.setattr(_table, "_ROWS", 101)
    monkeypatch.setattr(_private_rows, "_WRITTEN", 97)
    monkeypatch.setattr(_private_rows, "_CHUNK", 103)


def frame(rows=ROWS):
    random = np.random.default_rng(0)
    x = random.normal(size=rows)
    found = pd.DataFrame(
        {
            "x": x.astype(np.float32),
            "n": random.integers(0, 9, rows).astype(np.int16),
            "city": random.choice(["Paris", "Lyon", "Nice"], rows),
            "y": np.where(x + random.normal(size=rows) > 0, "yes", "no"),
        }
    )
    found.loc[5, "city"] = None
    found.loc[6, "x"] = np.nan
    found.loc[7, "y"] = None
    found.loc[8, ["x", "city"]] = None
    return found


@pytest.fixture
def path(tmp_path):
    frame().to_parquet(tmp_path / "a.parquet", row_group_size=90)
    return tmp_path / "a.parquet"


class Same:
    """Gives the queries of a second fit the noise of the first, and keeps what is handed over."""

    def __init__(self, monkeypatch):
        self.answers, self.asked, self.rows = [], [], []
        self.place = None
        release, hand_over = PrivateRows._release, PrivateRows.hand_over

        def released(rows, value, *query):
            self.asked.append((value.clone(), *query))
            if self.place is None:
                self.answers.append(release(rows, value, *query))
                return self.answers[-1].clone()
            release(rows, value, *query)
            self.place += 1
            return self.answers[self.place - 1].clone()

        def handed(rows):
            self.rows.append(hand_over(rows))
            return self.rows[-1]

        monkeypatch.setattr(PrivateRows, "_release", released)
        monkeypatch.setattr(PrivateRows, "hand_over", handed)

    def again(self):
        first, self.asked, self.place = self.asked, [], 0
        return first


@pytest.mark.parametrize("kind", [CliplessClassifier, CliplessRegressor])
@pytest.mark.parametrize("text", [False, True], ids=["parquet", "csv"])
def test_queries_and_inputs_are_those_of_the_table_in_memory(kind, text, path, monkeypatch):
    if text:
        table, path = frame(), path.with_suffix(".csv")
        table["day"] = "03/04/2021"
        table.loc[ROWS - 1, "day"] = "25/04/2021"
        table.to_csv(path, index=False)
    target = "n" if kind is CliplessRegressor else "y"
    features, y = read_table(path, target=target)
    same = Same(monkeypatch)
    one = kind(4.0, random_state=0).fit(features, y)
    first = same.again()
    two = kind(4.0, random_state=0).fit(path, target)
    assert one._schema == two._schema
    assert len(first) == len(same.asked)
    for (value, *query), (other, *again) in zip(first, same.asked, strict=True):
        assert query == again
        torch.testing.assert_close(value, other, rtol=1e-12, atol=1e-9)
    for ours, theirs in zip(same.rows[1].tensors, same.rows[0].tensors, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert (same.rows[1].tensors[0][7] == 0).all() == (kind is CliplessClassifier)  # no label
    assert one.privacy_.plan == two.privacy_.plan
    assert list(getattr(one, "classes_", [])) == list(getattr(two, "classes_", []))
    if kind is CliplessRegressor:
        np.testing.assert_allclose(two.predict(path), two.predict(features), atol=1e-5)
    else:
        assert np.array_equal(two.predict(path), two.predict(features))
    assert two.feature_names_in_.tolist() == list(features.columns)


def test_other_sources_and_names_of_columns(path, tmp_path):
    import duckdb
    import polars

    for source in (duckdb.read_parquet(str(path)), polars.scan_parquet(path),
                   polars.read_parquet(path), LargeTable(path, scratch=tmp_path)):  # fmt: skip
        model = CliplessClassifier(4.0, classes=["no", "yes"]).fit(source, "y")
        assert model.classes_.tolist() == ["no", "yes"]
        assert len(model.predict(source)) == ROWS
    with pytest.raises(ValueError, match=r"has no column 'z' to predict\. It has x, n, city, y"):
        CliplessClassifier().fit(path, "z")
    with pytest.raises(ValueError, match="y is the name of the column"):
        CliplessClassifier().fit(path, np.zeros(ROWS))
    with pytest.raises(ValueError, match="lacks columns"):
        model.predict(pyarrow.table({"x": [1.0], "city": ["Paris"]}))
    (tmp_path / "empty.csv").write_text("a,y\n")
    with pytest.raises(ValueError, match="no rows"):
        CliplessClassifier(classes=[0, 1]).fit(tmp_path / "empty.csv", "y")


def test_texts_are_not_read_in_pieces(path):
    with pytest.raises(ValueError, match="one text for each row"):
        CliplessTextClassifier(classes=["no", "yes"]).fit(str(path), "y")


def test_numbers_keep_their_precision_and_short_ones_are_stored_short(tmp_path):
    def stored(**columns):
        table = LargeTable(pyarrow.table({**columns, "y": [True, False]}))
        types = table.types.drop(columns="y")
        schema = read_schema(*columns_of(types), None)
        rows = _large.read_large(table, "y", schema, numeric=False)
        exact = encode(columns_of(pd.DataFrame(columns))[0], schema).numbers
        assert torch.equal(rows.table.numbers.double(), exact)
        return rows.table.numbers.dtype

    assert stored(a=np.array([0.1, 7e30], np.float32), b=np.array([True, False])) == torch.float32
    assert stored(a=np.array([1e9, 1e9 + 1]), b=np.array([1, 2], np.int8)) == torch.float64
    assert stored(a=np.array([2**31 - 1, 3], np.int32)) == torch.float64


def test_functions_of_rows_on_the_disk_are_composed_and_checked(tmp_path):
    x = torch.arange(500.0, dtype=torch.float64).reshape(250, 2)
    present = torch.arange(250) % 7 != 0
    ledger = Ledger.in_memory(dataset_size=250, relation=Relation.ZERO_OUT)
    rows = PrivateRows(x, ledger=ledger, present=present, scratch=Scratch(tmp_path))
    mapped = rows.map_rows(lambda x: (x + 1,)).where(lambda x: x[:, 0] < 400)
    mapped = mapped.map_rows(lambda x: (x.float(), x[:, 0].long()))
    assert mapped.shapes == ((2,), ())
    kept = (present & (x[:, 0] + 1 < 400))[:, None]
    inputs, numbers = mapped.hand_over().tensors
    assert torch.equal(inputs, torch.where(kept, x + 1, 0).float())
    assert torch.equal(numbers, torch.where(kept[:, 0], x[:, 0] + 1, 0).long())
    assert torch.equal(rows.hand_over().tensors[0], torch.where(present[:, None], x, 0))
    with pytest.raises(Exception, match="among other"):
        rows.map_rows(lambda x: (x - x.mean(),))
    with pytest.raises(Exception, match="among other"):
        mapped.where(lambda x, y: y > y.float().mean())
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_before_anything_is_written(path, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Disk", (), {"free": 1000}))
    with pytest.raises(OSError, match="scratch space"):
        CliplessClassifier(classes=["no", "yes"]).fit(path, "y")


def test_steps_are_taken_in_parts_of_bounded_size(path, monkeypatch):
    """And the parts of a step are one release, with the plan of the whole."""
    from clipless.sklearn import _base

    whole = CliplessClassifier(4.0, classes=["no", "yes"]).fit(path, "y")
    monkeypatch.setattr(_base, "_ROWS_AT_ONCE", 64)
    parts = CliplessClassifier(4.0, classes=["no", "yes"]).fit(path, "y")
    assert parts.n_iter_ == whole.n_iter_
    assert parts.privacy_.epsilon == pytest.approx(whole.privacy_.epsilon, rel=1e-6)
    assert parts.privacy_.releases == whole.privacy_.releases
