"""Every command on a run on a table, whose model is an estimator."""

import numpy as np
import pytest

from clipless.data import split_rows
from clipless.folders import RunFile, RunFolder
from clipless.sklearn import load
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
    assert outcome.json["membership"]["members"] == len(split_rows(600)[0])
    assert refused(here("audit", table_run, "--canaries", "10"), 2, "tabular", "--canaries")


def test_the_rest(table_run):
    assert here("report", table_run, "--json").json["sound"] is True
    spent = here("budget", table_run, "--json").json
    assert 3.9 < spent["epsilon"] <= 4.0
    assert spent["steps"] == 30
    assert here("bounds", table_run).code == 0
    assert here("export", table_run, "--format", "weights").code == 0
    assert here("data", "check", table_run).code == 0
    assert refused(here("train", "--resume", "--out", table_run), 2, "nothing to go on with")


def test_a_table_in_pieces_goes_on_after_a_break(tmp_path, monkeypatch):
    """Several files, of which none is ever in memory; the run is broken off while it trains."""
    import pandas as pd

    from clipless.training._fit import Fit

    random = np.random.default_rng(0)
    x, kind = random.normal(size=600), random.choice(["left", "right"], 600)
    frame = pd.DataFrame({"a": x, "kind": kind, "answer": np.where(x > 0, "yes", "no")})
    frame[:250].to_parquet(tmp_path / "part-0.parquet")
    frame[250:].to_parquet(tmp_path / "part-1.parquet")
    flags = ("--data", tmp_path / "part-*.parquet", "--target", "answer", "--epsilon", "4",
             "--set", "steps=30", "--out", tmp_path / "run")  # fmt: skip
    batch, taken = Fit._batch, []

    def breaking(fit, each):
        taken.append(None)
        if len(taken) == 28:
            raise OSError("the power is cut")
        return batch(fit, each)

    with monkeypatch.context() as patch:
        patch.setattr(Fit, "_batch", breaking)
        assert here("train", *flags).code != 0
    done = here("train", "--resume", "--out", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    assert done.json["epsilon"] <= 4.0
    assert done.json["metrics"]["accuracy"] > 0.7
    run = RunFolder(tmp_path / "run")
    assert sum(run.read_ledger().counts().values()) == 30 + 6  # kinds, scaling, covariance, classes
    assert run.read_json(RunFile.DATA)["train"]["size"] == 480
    assert here("report", tmp_path / "run", "--json").json["sound"] is True
    assert here("data", "check", tmp_path / "run").code == 0
    (tmp_path / "part-1.parquet").write_bytes((tmp_path / "part-0.parquet").read_bytes())
    changed = here("data", "check", tmp_path / "run")
    assert changed.code != 0
    assert "not those of the run" in changed.err


def test_predict(table_run, tmp_path):
    import pandas as pd

    data, out = table_run.parent / "table.csv", tmp_path / "predicted.csv"
    assert here("predict", table_run, "--data", data, "--out", out, "--contributions").code == 0
    found, rows = pd.read_csv(out), pd.read_csv(data)
    estimator = load(RunFolder(table_run).file(RunFile.WEIGHTS))
    assert found["answer"].tolist() == estimator.predict(rows[["a", "b", "kind"]]).tolist()
    assert (found["answer"] == rows["answer"]).mean() > 0.8
    assert np.allclose(found["probability of yes"] + found["probability of no"], 1)
    parts = found[[f"contribution of {name}" for name in ("a", "b", "kind")]]
    assert np.corrcoef(parts["contribution of a"], rows["a"])[0, 1] > 0.9
    rows.drop(columns="b").to_csv(tmp_path / "less.csv")
    lacking = here("predict", table_run, "--data", tmp_path / "less.csv", "--out", out)
    assert refused(lacking, 2, "lacks the columns b")


def test_a_column_of_texts(tmp_path):
    import pandas as pd

    liked = np.random.default_rng(0).random(700) < 0.5
    texts = [f"a {'lovely' if yes else 'dreadful'} film" for yes in liked]
    table = pd.DataFrame({"age": range(700), "review": texts, "liked": liked})
    table.to_csv(tmp_path / "reviews.csv", index=False)
    flags = ("--data", tmp_path / "reviews.csv", "--target", "liked", "--epsilon", "3")
    run = tmp_path / "run"
    trained = here("train", *flags, "--text", "review", "--out", run, "--json")
    assert trained.code == 0, trained.err
    assert trained.json["metrics"]["accuracy"] > 0.95
    table.drop(columns="liked").to_csv(tmp_path / "new.csv", index=False)
    out = tmp_path / "out.csv"
    assert here("predict", run, "--data", tmp_path / "new.csv", "--out", out).code == 0
    assert (pd.read_csv(out)["liked"] == liked).mean() > 0.95
    assert here("certify", run, "--json").json["certified_accuracy"]["unit"].startswith("unit")
    assert refused(here("train", *flags, "--text", "revue", "--out", tmp_path / "x"), 2, "'revue'")
    assert refused(
        here("train", *flags, "--encoder", "folder", "--out", tmp_path / "x"), 2, "--text"
    )


def test_bad_tables(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("a,answer\n" + "1,yes\n" * 40)
    flags = ("train", "--epsilon", "1", "--out", tmp_path / "run", "--data", path, "--target")
    assert refused(here(*flags, "anwser"), 3, "Did you mean 'answer'")
    assert refused(here(*flags, "answer"), 2, "too few", "classes=[...]")
    assert not (tmp_path / "run").exists()
    path.write_text("a,answer\n" + "1,yes\n" * 400 + "1,no\n")
    assert refused(here(*flags, "answer"), 2, "two classes", "yes")
    assert (tmp_path / "run" / "ledger.jsonl").exists()  # which says what it cost to find out
    named = ("--set", "data.classes=yes,no", "--set", "steps=5")
    again = (*flags[:4], tmp_path / "named", *flags[5:], "answer", *named, "--no-report")
    assert here(*again).code == 0


def test_gaps_dates_rare_classes_and_odd_fields(tmp_path):
    """A column is what most of its fields are; one that is not is a gap, and nobody hears of it."""
    random = np.random.default_rng(0)
    lines = ["age,job,since,active,answer"]
    for k in range(800):
        age = "" if k % 9 == 0 else str(random.integers(18, 90))
        day = f"20{k % 20:02}-01-{1 + k % 28:02}"
        lines.append(f"{age},{['baker', 'smith'][k % 2]},{day},{k % 3 == 0},{k % 2}")
    lines[3] = "old,7,yesterday,maybe,a label of my own"
    path = tmp_path / "people.csv"
    path.write_text("\n".join(lines) + "\n")
    flags = ("--data", path, "--target", "answer", "--epsilon", "4", "--set", "steps=5")
    outcome = here("train", *flags, "--out", tmp_path / "run", "--no-report", "--json")
    assert outcome.code == 0, outcome.err
    estimator = load(tmp_path / "run" / "model.safetensors")
    assert estimator._schema.kinds == ("number", "category", "number", "number")
    assert estimator.classes_.tolist() == [0, 1]
    assert "my own" not in outcome.out + outcome.err
