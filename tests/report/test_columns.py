"""The columns of a table in the report: what a model makes of them, and nothing of a row."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from clipless.folders import RunFile, RunFolder
from clipless.report import build, write_report
from clipless.sklearn import CliplessClassifier, CliplessRegressor, TabularRule

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.usefixtures("quick"),
]


@pytest.fixture
def quick(monkeypatch):
    choose = TabularRule.choose
    monkeypatch.setattr(
        TabularRule,
        "choose",
        classmethod(lambda cls, **numbers: replace(choose(**numbers), steps=60)),
    )


@pytest.fixture(scope="module")
def table():
    random = np.random.default_rng(0)
    rows = 3000
    return pd.DataFrame(
        {
            "id": np.arange(rows),
            "strong": 100 + 10 * random.normal(size=rows),
            "useless": random.normal(size=rows),
            "kind": pd.Categorical(random.choice(["left", "right"], rows)),
        }
    )


def test_a_report_has_columns_and_partial_dependence(table, tmp_path):
    y = np.where(table["strong"] > 100, "above", "below")
    model = CliplessClassifier(8.0, run_dir=tmp_path / "run").fit(table, y)
    report = write_report(tmp_path / "run")
    names = [each["name"] for each in report.columns["columns"]]
    assert names[0] == "strong"
    assert set(names) == {"id", "strong", "useless", "kind"}
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Columns of the table" in page
    assert "not used" in page
    assert "Partial dependence on strong" in page
    assert "Partial dependence on kind" not in page
    described = {each["name"]: each for each in model.describe_columns()}
    values, (line,) = described["strong"]["values"], described["strong"]["outputs"]
    assert values[0] == pytest.approx(75, abs=5)
    assert values[-1] == pytest.approx(125, abs=5)
    assert line[0] > 1 > -1 > line[-1]  # log odds of "below", the second class
    flat = np.ptp(described["useless"]["outputs"])
    assert flat < 0.3 * np.ptp(line)
    assert json.loads((tmp_path / "run" / "report.json").read_text())["columns"]["classes"] == [
        "above",
        "below",
    ]


def test_it_is_the_mean_prediction_where_columns_are_apart(table, tmp_path):
    y = 3.0 * table["strong"] + 50
    model = CliplessRegressor(8.0).fit(table, y)
    described = {each["name"]: each for each in model.describe_columns()}
    values, (line,) = described["strong"]["values"], described["strong"]["outputs"]
    for place in (2, 10, 18):
        changed = table.assign(strong=values[place])
        assert line[place] == pytest.approx(model.predict(changed).mean(), abs=0.05 * np.ptp(line))


def test_other_runs_have_no_such_section_and_damage_is_told(table, tmp_path):
    y = np.where(table["useless"] > 0.5, 2, np.where(table["strong"] > 100, 1, 0))
    CliplessClassifier(8.0, classes=[0, 1, 2], run_dir=tmp_path).fit(table, y)
    folder = RunFolder(tmp_path)
    data = folder.read_json(RunFile.COLUMNS)
    assert [len(each.get("outputs", [])) for each in data["columns"]] == [0, 3, 3, 0]
    assert build(tmp_path).problems == ()
    data["columns"][1]["outputs"][0].pop()
    folder.write_json(RunFile.COLUMNS, data)
    report = build(tmp_path)
    assert report.columns is None
    assert [each.file for each in report.problems] == ["columns.json"]
    folder.file(RunFile.COLUMNS).unlink()
    write_report(tmp_path)
    assert "Columns of the table" not in (tmp_path / "report.html").read_text()
    assert build(tmp_path).problems == ()
