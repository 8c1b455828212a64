"""What a cell means depends on that cell alone."""

import datetime
import math
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest

from clipless.data import parse_cell, read_cell, read_cells
from clipless.data._cells import parse_cells

EQUAL_IN_PYTHON = [True, 1, 1.0, Decimal("1.0"), Decimal("1.00"), np.True_, np.int8(1)]
MISSING = [None, float("nan"), pd.NA, pd.NaT, Decimal("nan"), np.datetime64("NaT"), np.nan]


def names(column):
    positions, cells = read_cells(column)
    return [cells[place].name for place in positions]


@pytest.mark.parametrize("first", EQUAL_IN_PYTHON, ids=repr)
def test_values_that_python_calls_equal_do_not_take_each_others_names(first):
    alone = names(np.array(EQUAL_IN_PYTHON, dtype=object))
    assert names(np.array([first, *EQUAL_IN_PYTHON], dtype=object))[1:] == alone
    assert names(np.array(EQUAL_IN_PYTHON[::-1], dtype=object)) == alone[::-1]
    assert alone[0] == alone[5] == "boolean True"
    assert set(alone[1:5] + alone[6:]) == {"number 1"}


@pytest.mark.parametrize("value", MISSING, ids=repr)
def test_missing_values(value):
    assert read_cell(value).name is None
    assert math.isnan(read_cell(value).number)


@pytest.mark.parametrize(
    ("value", "name", "number"),
    [
        ("1", "text 1", math.nan),
        (b"a", "text a", math.nan),
        (-0.0, "number 0", 0.0),
        (Decimal("0.1"), "number 0.1", 0.1),
        (2**60 + 1, f"number {2**60 + 1}", 2.0**60),
        (10**400, "number inf", math.inf),
        (Decimal("-1e9999999"), "number -inf", -math.inf),
        (datetime.date(2000, 1, 3), "date 2000-01-03 00:00:00", 2.0),
        (pd.Timestamp("2000-01-03"), "date 2000-01-03 00:00:00", 2.0),
        (np.datetime64("2000-01-03"), "date 2000-01-03 00:00:00", 2.0),
        (pd.Timedelta("36h"), "number 1.5", 1.5),
        ([1], "text list [1]", math.nan),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_each_value_has_one_form(value, name, number):
    cell = read_cell(value)
    assert cell.name == name
    assert cell.number == number or (math.isnan(number) and math.isnan(cell.number))


def test_values_that_cannot_be_read_stop_nothing():
    class Bad:
        def __str__(self):
            raise RuntimeError

        __hash__ = None

    assert names([Bad(), 1]) == [None, "number 1"]


@pytest.mark.parametrize(
    "column",
    [
        pd.Series(["a", pd.NA, "b"], dtype="string"),
        pd.Series([1, pd.NA, 2], dtype="Int64"),
        pd.Series([True, pd.NA, False], dtype="boolean"),
        pd.Series(["a", None, "b"], dtype="category"),
        pd.Series([pd.NA, pd.NA, 1], dtype=object),
    ],
    ids=lambda column: str(column.dtype),
)
def test_pandas_missing_values(column):
    assert (np.array(names(column)) == None).tolist() == column.isna().tolist()  # noqa: E711


def test_fields_of_text_files():
    fields = ["41", "041", "1e3", ".5", "True", "", "n/a", "baker", "1_0", "0x1f", "2024-02-29",
              "2024-02-29 12:00", "2024-13-01", "-inf", "\u0661"]  # fmt: skip
    day = datetime.datetime(2024, 2, 29)
    expected = [41, 41, 1000, 0.5, True, None, None, "baker", "1_0", "0x1f", day,
                day.replace(hour=12), "2024-13-01", -math.inf, "\u0661"]  # fmt: skip
    assert [parse_cell(field) for field in fields] == expected
    assert parse_cells(fields).tolist() == expected
    assert type(parse_cells(["true", "1"])[0]) is bool
    assert type(parse_cells(["1", "true"])[0]) is int


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e99999999999999999999", math.inf), ("-1e99999999999999999999", -math.inf),
     ("1e-99999999999999999999", 0), ("0e99999999999999999999", 0), ("9" * 9999, math.inf)],
    ids=lambda each: str(each)[:12],
)  # fmt: skip
def test_numbers_beyond_all_decimals_are_numbers(text, value):
    """An error would tell that a row holds one."""
    assert parse_cell(text) == value


@pytest.mark.parametrize("kind", ["list", "object", "str", "string", "numpy"])
def test_text_is_read_alike_from_every_kind_of_column(kind):
    texts = ["b", "a", "b", "", "a", "c"]
    column = {
        "list": lambda: texts,
        "object": lambda: pd.Series(texts, dtype=object),
        "str": lambda: pd.Series(texts, dtype="str"),
        "string": lambda: pd.Series(texts, dtype="string"),
        "numpy": lambda: np.array(texts),
    }[kind]()
    positions, cells = read_cells(column)
    assert [cells[place] for place in positions] == [read_cell(text) for text in texts]
    assert len(cells) == 4


def test_missing_text_and_mixtures_are_read_one_by_one():
    for dtype in (object, "str", "string"):
        assert names(pd.Series(["a", None, "a"], dtype=dtype)) == ["text a", None, "text a"]
    mixed = np.array(["1", 1, True, 1.0], dtype=object)
    assert names(mixed) == ["text 1", "number 1", "boolean True", "number 1"]
