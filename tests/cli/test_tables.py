"""Every command on a run on a table, whose model is an estimator."""

import numpy as np
import pytest

from tests.cli.shell import here, refused


@pytest.fixture(scope="module")
def table_run(tmp_path_factory):
    place = tmp_path_factory.mktemp("table")
    random = np.random.default_rng(1)
    x = random.normal(size=(600, 3))
    label = np.where(x[:, 0] + x[:, 1] > 0, "yes", "no")
    kind = np.where(x[:, 2] > 0, "left", "right")
    rows = [f"{x[k, 0]:.4f},{x[k, 1]:.4f},{kind[k]},{label[k]}" for k in range(600)]
    (place / "table.csv").write_text("\n".join(["a,b,kind,answer", *rows]) + "\n")
    flags = ("--data", place / "table.csv", "--target", "answer", "--epsilon", "4")
    outcome = here("train", *flags, "--set", "steps=30", "--out", place / "run", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["metrics"]["accuracy"] > 0.8
    return place / "run"


def test_certify(table_run):
    flags = ("--attack", "--examples", "40", "--restarts", "1", "--attack-steps", "5")
    said = here("certify", table_run, *flags, "--json").json
    found = said["certified_accuracy"]
    assert found["radii"] == [0.0, 0.05, 0.1, 0.25, 0.5, 1.0]
    assert found["accuracies"] == sorted(found["accuracies"], reverse=True)
    assert found["unit"] == "private spreads of the columns"
    assert said["attack"]["broken"] == []


def test_audit(table_run):
    outcome = here("audit", table_run, "--attack-steps", "5", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["membership"]["members"] == 480
    assert refused(here("audit", table_run, "--canaries", "10"), 2, "tabular", "--canaries")


def test_the_rest(table_run):
    assert here("report", table_run, "--json").json["sound"] is True
    spent = here("budget", table_run, "--json").json
    assert 3.9 < spent["epsilon"] <= 4.0
    assert spent["steps"] == 30
    assert here("bounds", table_run).code == 0
    assert here("export", table_run, "--format", "weights").code == 0
    assert here("data", "check", table_run).code == 0
    assert refused(here("train", "--resume", "--out", table_run), 2, "cannot go on")


def test_bad_tables(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("a,answer\n" + "1,yes\n" * 40)
    flags = ("train", "--epsilon", "1", "--out", tmp_path / "run", "--data", path, "--target")
    assert refused(here(*flags, "anwser"), 3, "Did you mean 'answer'")
    assert refused(here(*flags, "answer"), 2, "two classes")
    assert not (tmp_path / "run").exists()
