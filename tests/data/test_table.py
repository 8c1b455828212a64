"""Tables through pandas: types kept, and troubles told in words."""

import gzip
import sys

import pytest

from clipless.data import DataFileError, DataNotFoundError, read_table

pandas = pytest.importorskip("pandas", reason="pandas is not installed")

CSV = "age,job,income\n41,baker,yes\n27,,no\n,smith,no\n"


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "T.CSV", "t.tsv"])
def test_text_tables(tmp_path, name):
    text = CSV.replace(",", "\t") if name.endswith("tsv") else CSV
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    features, target = read_table(path, target="income")
    assert list(features.columns) == ["age", "job"]
    assert features["age"].isna().tolist() == [False, False, True]
    assert target.tolist() == ["yes", "no", "no"]
    assert target.name == "income"


def test_another_separator(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(CSV.replace(",", ";"))
    assert list(read_table(path, target="income", separator=";")[0].columns) == ["age", "job"]
    with pytest.raises(DataFileError, match="single column: is the separator right"):
        read_table(path, target="income")


def test_parquet_tables_keep_their_types(tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    table = pandas.DataFrame({"a": [1, 2, 3], "b": pandas.Categorical(["x", "y", "x"])})
    table.to_parquet(tmp_path / "t.parquet")
    features, target = read_table(tmp_path / "t.parquet", target="a")
    assert features["b"].dtype == "category"
    assert target.tolist() == [1, 2, 3]
    (tmp_path / "broken.parquet").write_bytes((tmp_path / "t.parquet").read_bytes()[:-20])
    with pytest.raises(DataFileError, match=r"broken.parquet is not a readable parquet file"):
        read_table(tmp_path / "broken.parquet", target="a")


TROUBLES = {
    "no such column": (CSV, r"no column 'incom'. Did you mean 'income'\? It has age, job, income"),
    "empty": ("", "is empty"),
    "no rows": ("a,incom\n", "has columns, but no rows"),
    "target only": ("incom\n1\n", "no column besides the target"),
    "twice": ("incom,a,incom\n1,2,3\n", "has columns twice: incom"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_troubles_are_told(tmp_path, trouble):
    text, message = TROUBLES[trouble]
    path = tmp_path / "people.csv"
    path.write_text(text)
    with pytest.raises(DataFileError, match=f"people.csv.*{message}"):
        read_table(path, target="incom")


def test_files_that_are_no_tables(tmp_path):
    with pytest.raises(DataNotFoundError, match=r"there is no file .*nowhere.csv"):
        read_table(tmp_path / "nowhere.csv", target="y")
    (tmp_path / "notes.txt").write_text(CSV)
    with pytest.raises(DataFileError, match=r"notes.txt: the name must end in .csv"):
        read_table(tmp_path / "notes.txt", target="y")
    whole = gzip.compress(CSV.encode() * 50)
    for broken in (whole[:-20], whole[:30] + b"\xff\xff\xff" + whole[33:]):
        (tmp_path / "t.csv.gz").write_bytes(broken)
        with pytest.raises(DataFileError, match=r"t.csv.gz is not a readable text table"):
            read_table(tmp_path / "t.csv.gz", target="y")
    (tmp_path / "latin.csv").write_bytes("straße,y\n1,2\n".encode("latin1"))
    with pytest.raises(DataFileError, match=r"latin.csv is not a readable text table"):
        read_table(tmp_path / "latin.csv", target="y")


def test_missing_libraries_are_named(tmp_path, monkeypatch):
    (tmp_path / "t.csv").write_text(CSV)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    for library in ("pyarrow", "fastparquet"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match="parquet needs pyarrow: pip install 'clipless"):
        read_table(tmp_path / "t.parquet", target="y")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="tables need pandas"):
        read_table(tmp_path / "t.csv", target="income")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "row",
    [b"1,2,3,4", b"1", b",,", b"\xff\xfe,b,no", b"1e99999999999999999999,b,no", b"\x00,\x1a,no"],
    ids=repr,
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_one_row_holds_changes_no_other_row_and_is_never_spoken_of(tmp_path, row, place):
    """No error and no warning: whether there is one would tell of that row."""
    others = [b"41,baker,yes", b"27,,no"]
    path = tmp_path / "people.csv"
    path.write_bytes(b"\n".join([b"age,job,income", *others[:place], row, *others[place:]]) + b"\n")
    features, target = read_table(path, target="income")
    kept = [each for each in range(3) if each != place]
    assert features.iloc[kept].to_numpy().tolist() == [[41, "baker"], [27, None]]
    assert target.iloc[kept].tolist() == ["yes", "no"]
