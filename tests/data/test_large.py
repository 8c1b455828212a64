"""Tables that are read in pieces: what they hold does not depend on where they come from."""

import datetime
import gc
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow
import pytest
import torch
from pyarrow import dataset, feather, parquet

from clipless.data import (
    DataFileError,
    DataNotFoundError,
    LargeTable,
    Repeated,
    Scratch,
    as_large_table,
    read_cell,
)
from clipless.data.large import _table

ROWS = 50


@pytest.fixture
def short_pieces(monkeypatch):
    monkeypatch.setattr(_table, "_ROWS", 7)


def frame():
    random = np.random.default_rng(0)
    found = pd.DataFrame(
        {
            "age": random.integers(18, 90, ROWS),
            "weight": random.normal(70, 9, ROWS),
            "city": random.choice(["Paris", "Lyon", "Nice"], ROWS),
            "since": pd.date_range("2020-01-01", periods=ROWS, freq="D"),
            "paid": random.random(ROWS) < 0.5,
        }
    )
    found.loc[3, "weight"] = np.nan
    found.loc[4, "city"] = None
    return found


def sources(folder):
    """The same table by every kind of source."""
    import duckdb
    import polars

    table = frame()
    arrow = pyarrow.Table.from_pandas(table, preserve_index=False)
    parquet.write_table(arrow, folder / "a.parquet", row_group_size=13)
    parquet.write_table(arrow.slice(0, 20), folder / "part-0.parquet")
    parquet.write_table(arrow.slice(20), folder / "part-1.parquet")
    feather.write_feather(arrow, folder / "a.arrow", compression="uncompressed")
    path = str(folder / "a.parquet")
    return {
        "file": path,
        "pattern": str(folder / "part-*.parquet"),
        "paths": [folder / "part-0.parquet", folder / "part-1.parquet"],
        "arrow file": folder / "a.arrow",
        "arrow table": arrow,
        "dataset": dataset.dataset(path),
        "duckdb": duckdb.read_parquet(path),
        "duckdb query": duckdb.sql(f"select * from '{path}' order by since"),
        "polars": polars.read_parquet(path),
        "polars lazily": polars.scan_parquet(path),
    }


def cells(table, columns=None):
    """All values of a table by column, each in its one form."""
    found = {}
    for piece in table.pieces(columns):
        for name, column in piece.items():
            if isinstance(column, Repeated):
                column = [column.values[place] for place in column.places]
            found.setdefault(name, []).extend(read_cell(value) for value in column)
    return found


def expected(table):
    return {name: [read_cell(value) for value in table[name]] for name in table}


KINDS = (
    "file", "pattern", "paths", "arrow file", "arrow table", "dataset", "duckdb", "duckdb query",
    "polars", "polars lazily",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_holds_the_same_rows(kind, tmp_path, short_pieces):
    table = LargeTable(sources(tmp_path)[kind])
    assert table.names == tuple(frame().columns)
    assert len(table) == ROWS
    assert cells(table) == expected(frame())
    assert cells(table, ["city", "age"]) == expected(frame()[["city", "age"]])
    kinds = [str(table.types[name].dtype) for name in ("age", "weight", "since", "paid")]
    assert kinds == ["int64", "float64", "datetime64[us]", "bool"]
    assert max(len(piece["age"]) for piece in table.pieces()) <= 7


def test_text_tables_are_read_as_in_memory(tmp_path, short_pieces):
    path = tmp_path / "people.csv"
    path.write_text(
        "age,job,since,paid\n41,baker,2020-02-01,true\n"
        + "".join(f"{age},cook,03/04/2021,false,extra\n" for age in range(20))
        + '1e3,"a\nb",n/a,\n,,,\n7\n'
    )
    from clipless.data import read_rows

    table = LargeTable(path)
    assert cells(table) == expected(read_rows(path))
    assert len(table) == 24
    assert {str(kind) for kind in table.types.dtypes} == {"object"}


def test_rows_can_be_left_out(tmp_path, short_pieces):
    table = LargeTable(sources(tmp_path)["file"])
    kept = np.arange(ROWS) % 3 == 1
    kept[7:14] = False  # a whole piece
    part = table.where(kept)
    assert len(part) == kept.sum()
    assert cells(part) == expected(frame()[kept])
    with pytest.raises(DataFileError, match="has changed"):
        list(LargeTable(sources(tmp_path)["file"], rows=np.ones(ROWS + 1, dtype=bool)).pieces())


def test_odd_values_of_one_row_stop_nobody(tmp_path):
    broken = pyarrow.array([b"Paris", b"\xff\xfe"]).view(pyarrow.string())
    dates = pyarrow.array([2_000_000_000, None], pyarrow.int32()).view(pyarrow.date32())
    far = pyarrow.array([2**62, 0], pyarrow.int64()).view(pyarrow.timestamp("s", tz="Asia/Tokyo"))
    days = pyarrow.array([datetime.date(2020, 1, 2), datetime.date(9999, 1, 1)])
    truth = pyarrow.array([True, None])
    table = LargeTable(
        pyarrow.table({"city": broken, "day": dates, "at": far, "on": days, "paid": truth})
    )
    (piece,) = table.pieces()
    assert [piece["city"].values[place] for place in piece["city"].places] == [
        "Paris",
        "\\xff\\xfe",
    ]
    assert np.isnat(piece["day"]).tolist() == [False, True]
    assert piece["day"][0] > np.datetime64("9999-01-01")
    assert piece["at"][0] > np.datetime64("9999-01-01")
    assert piece["on"].tolist()[0] == datetime.datetime(2020, 1, 2)
    assert str(table.types["on"].dtype) == "datetime64[us]"


def test_what_is_no_table_is_refused(tmp_path):
    assert as_large_table(np.zeros((2, 2))) is None
    assert as_large_table(frame()) is None
    with pytest.raises(TypeError, match="cannot be read in pieces"):
        LargeTable(np.zeros((2, 2)))
    with pytest.raises(DataNotFoundError, match=r"no-.*parquet"):
        LargeTable(tmp_path / "no-*.parquet")
    (tmp_path / "a.parquet").write_text("no parquet")
    with pytest.raises(DataFileError, match="cannot be read"):
        LargeTable(tmp_path / "a.parquet")
    (tmp_path / "a.xlsx").write_text("")
    with pytest.raises(DataFileError, match=r"must end in \.parquet"):
        LargeTable(tmp_path / "a.xlsx")
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    (tmp_path / "b.csv").write_text("a,c\n1,2\n")
    with pytest.raises(DataFileError, match="other columns"):
        LargeTable(str(tmp_path / "*.csv"))
    (tmp_path / "a.csv").write_text("a,b\n")
    assert len(LargeTable(tmp_path / "a.csv")) == 0


def test_scratch_files_have_no_name_and_end_with_their_tensors(tmp_path):
    def opened():
        maps = Path("/proc/self/maps").read_text().splitlines()
        return [line for line in maps if str(tmp_path) in line]

    column = Scratch(tmp_path).column()
    for piece in torch.arange(20_000, dtype=torch.int16).split(999):
        column.append(piece)
    with pytest.raises(ValueError, match=r"torch.int64"):
        column.append(torch.zeros(1, dtype=torch.int64))
    found = column.finish()
    assert torch.equal(found, torch.arange(20_000, dtype=torch.int16))
    assert list(tmp_path.iterdir()) == []
    assert len(opened()) == 1
    del found, column
    gc.collect()
    assert opened() == []
    with pytest.raises(OSError, match="scratch space"):
        Scratch(tmp_path).require_room(1 << 60, "rows")


def test_what_was_read_of_a_file_does_not_stay_in_memory(tmp_path):
    count = 2_000_000
    parquet.write_table(pyarrow.table({"x": np.random.default_rng(0).random(count)}),
                        tmp_path / "a.parquet", row_group_size=50_000)  # fmt: skip
    before = pyarrow.total_allocated_bytes()
    most = max(
        pyarrow.total_allocated_bytes() - before
        for _ in LargeTable(tmp_path / "a.parquet").pieces()
    )
    assert most < 8 * count / 2  # the file is 8 bytes a row


def _raw(kind, width, value):
    """Five cells of an Arrow type, the second of which holds any bits."""
    cells = np.zeros(5, dtype=width)
    cells[1] = value
    return pyarrow.Array.from_buffers(kind, 5, [None, pyarrow.py_buffer(cells.tobytes())])


@pytest.mark.parametrize(
    ("kind", "width", "value"),
    [
        (pyarrow.time64("us"), "i8", 25 * 3600 * 10**6),
        (pyarrow.time32("ms"), "i4", 10**9),
        (pyarrow.timestamp("us"), "i8", 2**60),
        (pyarrow.timestamp("s"), "i8", 2**60),
        (pyarrow.date32(), "i4", 2**31 - 1),
        (pyarrow.duration("s"), "i8", 2**62),
    ],
)
def test_one_cell_out_of_range_is_a_gap_and_stops_no_other(kind, width, value):
    good, bad = _raw(kind, width, 5), _raw(kind, width, value)

    def columns(cells):
        places = pyarrow.array([0, 1, 0, 0, 0], pyarrow.int32())
        found = {"plain": cells, "coded": pyarrow.DictionaryArray.from_arrays(places, cells)}
        if not pyarrow.types.is_duration(kind):
            found["nested"] = pyarrow.StructArray.from_arrays([cells], ["field"])
        return pyarrow.table(found)

    def values(cells):
        (piece,) = LargeTable(columns(cells)).pieces()
        return {
            name: [str(each) for each in (
                column.values[column.places] if isinstance(column, Repeated) else column)]
            for name, column in piece.items()
        }  # fmt: skip

    expected, found = values(good), values(bad)
    for name, cells in found.items():
        assert [*cells[:1], *cells[2:]] == [*expected[name][:1], *expected[name][2:]]
        assert len(cells) == 5
