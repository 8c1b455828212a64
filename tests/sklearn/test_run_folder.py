"""A fit that keeps a run folder: it goes on after a break, and pays for nothing twice."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from clipless.errors import BudgetExhaustedError, PrivacyError
from clipless.folders import RunFile, RunFolder
from clipless.privacy import Ledger, default_delta, epsilon
from clipless.report import build
from clipless.sklearn import (
    CliplessClassifier,
    CliplessRegressor,
    CliplessTextClassifier,
    _base,
    load,
)
from clipless.statistics import KeptAnswers

pytestmark = [
    pytest.mark.usefixtures("quick"),
    pytest.mark.filterwarnings("ignore::clipless.sklearn.RepeatedFitWarning"),
]


class BreakError(Exception):
    pass


def broken(monkeypatch, estimator, data, *, after, **options):
    """Fit until so many queries were answered, or steps taken, and let it end there."""
    what, count = after
    taken = []

    def stopping(method):
        def counted(*args, **kwargs):
            if len(taken) == count:
                raise BreakError
            taken.append(None)
            return method(*args, **kwargs)

        return counted

    with monkeypatch.context() as patch:
        if what == "answers":
            patch.setattr(KeptAnswers, "keep", stopping(KeptAnswers.keep))
        else:
            from clipless.training._fit import Fit

            patch.setattr(Fit, "_batch", stopping(Fit._batch))
        with pytest.raises(BreakError):
            estimator.fit(*data, **options)


@pytest.mark.parametrize("after", [("answers", 0), ("answers", 2), ("steps", 5), ("steps", 9)])
@pytest.mark.parametrize("kind", [CliplessClassifier, CliplessRegressor])
def test_a_fit_goes_on_where_it_was(kind, after, table, tmp_path, monkeypatch):
    monkeypatch.setattr(_base, "_CHECKPOINT_EVERY", 4)
    x, y = table
    data = (x, y if kind is CliplessClassifier else x[:, 0])
    folder = tmp_path / "run"
    broken(monkeypatch, kind(4.0, run_dir=folder), data, after=after)
    kept = (folder / "statistics.jsonl").read_text().splitlines()
    model = kind(4.0, run_dir=folder).fit(*data)
    assert (folder / "statistics.jsonl").read_text().splitlines()[: len(kept)] == kept
    whole = kind(4.0).fit(*data)
    # An answer that was not kept is asked again and paid for; nothing else is.
    twice = after[0] == "answers"
    assert model.privacy_.releases == whole.privacy_.releases + twice
    assert model.n_iter_ == 12
    assert model.privacy_.epsilon <= 4.0
    again = load(folder / "model.safetensors")
    assert np.array_equal(again.predict(x), model.predict(x))
    assert build(folder).sound


def test_a_repeated_part_ends_at_the_same_weights(table, tmp_path, monkeypatch):
    """Steps after the last checkpoint have the noise they had: none of them is paid for twice."""
    monkeypatch.setattr(_base, "_CHECKPOINT_EVERY", 4)
    folder = tmp_path / "run"
    broken(monkeypatch, CliplessClassifier(run_dir=folder), table, after=("steps", 7))
    model = CliplessClassifier(run_dir=folder).fit(*table)
    steps = sum(count for mechanism, count in RunFolder(folder).read_ledger().counts().items())
    assert steps == model.privacy_.releases == CliplessClassifier().fit(*table).privacy_.releases


def test_text_and_arguments(table, tmp_path):
    texts = ["a good film", "a bad film"] * 60
    folder = tmp_path / "text"
    model = CliplessTextClassifier(classes=[0, 1], run_dir=folder).fit(texts, [1, 0] * 60)
    assert (
        load(folder / "model.safetensors").predict(texts).tolist() == model.predict(texts).tolist()
    )
    with pytest.raises(ValueError, match="holds a fitted estimator"):
        CliplessTextClassifier(classes=[0, 1], run_dir=folder).fit(texts, [1, 0] * 60)
    with pytest.raises(ValueError, match="either a ledger or run_dir"):
        CliplessClassifier(run_dir=tmp_path, ledger=Ledger.in_memory(
            dataset_size=300, relation="zero_out")).fit(*table)  # fmt: skip


def test_another_fit_is_refused_before_anything_is_asked(table, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    broken(monkeypatch, CliplessClassifier(run_dir=folder), table, after=("steps", 2))
    spent = RunFolder(folder).read_ledger().counts()
    x, y = table
    for model, data, word in [
        (CliplessClassifier(2.0, run_dir=folder), (x, y), "epsilon"),
        (CliplessRegressor(run_dir=folder), (x, x[:, 0]), "estimator"),
        (CliplessClassifier(run_dir=folder), (x[:, :3], y), "columns"),
        (CliplessClassifier(run_dir=folder, classes=[True, False]), (x, y), "classes"),
    ]:
        with pytest.raises(PrivacyError, match=f"belongs to another fit.*{word}"):
            model.fit(*data)
    assert RunFolder(folder).read_ledger().counts() == spent


def test_kept_answers_survive_a_torn_line(tmp_path):
    path = tmp_path / "answers.jsonl"
    matrix = torch.randn(3, 3, dtype=torch.float64)
    kept = KeptAnswers(path, {"rows": 3})
    kept.keep("matrix", matrix)
    kept.keep("names", {"text a": 3.25})
    kept.keep("lost", torch.zeros(2, dtype=torch.float64))
    text = path.read_bytes()
    path.write_bytes(text[:-5])
    again = KeptAnswers(path, {"rows": 3})
    assert len(again) == 2
    assert torch.equal(again.take("matrix"), matrix)
    with pytest.raises(PrivacyError, match="where 'other' is asked"):
        again.take("other")
    assert again.take("names") == {"text a": 3.25}
    assert again.take("lost") is None
    again.keep("lost", torch.zeros(2, dtype=torch.float64))
    assert path.read_bytes() == text
    with pytest.raises(PrivacyError, match="differs in rows"):
        KeptAnswers(path, {"rows": 4})


def test_a_fit_is_not_gone_on_with_for_other_units(table, tmp_path, monkeypatch):
    x, y = table
    folder = tmp_path / "run"
    broken(monkeypatch, CliplessClassifier(run_dir=folder), table, after=("answers", 2))
    spent = RunFolder(folder).read_ledger().counts()
    both, ids = (np.concatenate([x, x]), np.concatenate([y, y])), np.tile(np.arange(len(x)), 2)
    with pytest.raises(PrivacyError, match="was begun for single examples"):
        CliplessClassifier(run_dir=folder).fit(*both, users=ids)
    assert RunFolder(folder).read_ledger().counts() == spent


def test_answers_without_their_lines_are_not_given_again(table, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    broken(monkeypatch, CliplessClassifier(run_dir=folder), table, after=("answers", 2))
    ledger = (folder / "ledger.jsonl").read_text()
    (folder / "ledger.jsonl").unlink()
    with pytest.raises(PrivacyError, match="does not count: 2 of 2"):
        CliplessClassifier(run_dir=folder).fit(*table)
    (folder / "ledger.jsonl").write_text(ledger)
    CliplessClassifier(run_dir=folder).fit(*table)


def test_answers_that_cannot_be_kept_use_up_the_budget_and_no_more(table, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    for _ in range(200):
        try:
            broken(monkeypatch, CliplessClassifier(run_dir=folder), table, after=("answers", 0))
        except BudgetExhaustedError:
            break
    else:
        pytest.fail("no budget was checked")
    spent = tuple(RunFolder(folder).read_ledger().counts().items())
    assert 0.2 < epsilon(spent, default_delta(len(table[0]))) <= 1.0
    assert not RunFolder(folder).has(RunFile.PLAN)


def test_an_answer_is_not_paid_for_where_it_cannot_be_kept(table, tmp_path, monkeypatch):
    folder = tmp_path / "run"

    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(KeptAnswers, "require_writable", full)
    with pytest.raises(OSError, match="No space"):
        CliplessClassifier(run_dir=folder).fit(*table)
    assert not RunFolder(folder).read_ledger().counts()


KILLED = """
import os, signal, sys
import numpy as np
from clipless.sklearn import CliplessClassifier
from clipless.training._fit import Fit
batch, steps = Fit._batch, []
def counted(self, each):
    steps.append(None)
    if len(steps) == 60:
        os.kill(os.getpid(), signal.SIGKILL)
    return batch(self, each)
if sys.argv[3] == "kill":
    Fit._batch = counted
model = CliplessClassifier(4.0, run_dir=sys.argv[1]).fit(sys.argv[2], "y")
print(model.privacy_.releases, len(steps))
"""


@pytest.mark.slow
def test_a_killed_fit_of_a_file_goes_on_in_another_process(table, tmp_path):
    import pandas as pd

    x, y = table
    frame = pd.DataFrame(x, columns=list("abcd")).assign(y=y)
    frame.to_parquet(tmp_path / "a.parquet")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run"), str(tmp_path / "a.parquet")]
    assert subprocess.run([*command, "kill"], check=False).returncode == -9
    done = subprocess.run([*command, "go on"], check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(4 + 250), "0"]
