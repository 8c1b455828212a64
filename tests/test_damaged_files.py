"""Saved files that are not what they should be: our own errors, which name file and line."""

import json
import random
import shutil

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from clipless.data import DataFileError, read_idx
from clipless.errors import CliplessError, DamagedFileError, LedgerError
from clipless.folders import StepLog
from clipless.ledger import read_ledger
from clipless.ledger._writing import DIGEST_MARK, digest_of
from clipless.privacy import Plan
from clipless.runs import open_run, read_config_file
from clipless.runs.data._arrays import read_arrays
from clipless.sklearn import CliplessClassifier, load
from clipless.training._run_folder import SavedRun, TrainerFolder
from tests.cli.shell import here
from tests.damage import RAW, damaged, damaged_bytes


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damage") / "run"
    flags = ("--data", "digits", "--epsilon", "3", "--steps", "4", "--batch-size", "200")
    outcome = here("train", *flags, "--set", "hidden=8", "--no-report", "--out", folder)
    assert outcome.code == 0, outcome.err
    return folder


def some(cases, count):
    cases = list(cases)
    return random.Random(0).sample(cases, min(count, len(cases)))


def accepted_or_named(read, name, error=CliplessError):
    """Nothing but our own errors, with the name of the file."""
    message = None
    try:
        read()
    except error as caught:
        message = str(caught)
    assert message is None or name in message
    return message is None


def test_plans(run, tmp_path):
    path, results = tmp_path / "plan.json", []
    plan = json.loads((run / "plan.json").read_bytes())["plan"]
    for data in damaged_bytes(json.dumps(plan).encode()):
        path.write_bytes(data)
        results.append(accepted_or_named(lambda: str(Plan.load(path)), "plan.json"))
    assert sum(results) < 0.1 * len(results)  # all but other numbers are refused


@pytest.mark.parametrize("field", ["gradient_bound", "size", "name"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "x", None, True])
def test_a_plan_with_bounds_that_are_none_is_refused(run, tmp_path, field, value):
    plan = json.loads((run / "plan.json").read_bytes())["plan"]
    if field == "name" and value == "x":
        value = ["x"]
    plan["parameters"][0][field] = value
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(DamagedFileError, match="backup"):
        Plan.load(tmp_path / "plan.json")


def test_ledgers_with_true_digests(run, tmp_path):
    """Headers and numbers that no ledger has, in lines whose digests are right."""
    path = tmp_path / "ledger.jsonl"
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    for line in lines:
        del line["digest"]
    refused = 0
    for index, line in enumerate(lines):
        for changed in damaged(line):
            text, previous = [], ""
            for fields in (*lines[:index], changed, *lines[index + 1 :]):
                body = json.dumps(fields)[:-1]
                previous = digest_of(body, previous)
                text.append(f'{body}{DIGEST_MARK}{previous}"}}\n')
            path.write_text("".join(text))
            named = "ledger.jsonl, line"
            refused += not accepted_or_named(lambda: read_ledger(path), named, LedgerError)
    assert refused > 100
    for data in RAW.values():
        path.write_bytes(data)
        assert not accepted_or_named(lambda: read_ledger(path), "ledger.jsonl", LedgerError)


@pytest.mark.parametrize("name", ["config.json", "plan.json", "result.json", "model.safetensors"])
def test_run_folders(run, tmp_path, name):
    folder = shutil.copytree(run, tmp_path / "run")
    data = (folder / name).read_bytes()
    cases = [*RAW.values(), data[:100], data[:-3]]
    if name.endswith(".json"):
        cases += some(damaged_bytes(data), 40)
    for case in cases:
        (folder / name).write_bytes(case)
        accepted_or_named(lambda: open_run(folder), str(folder))
    for command in ("report", "budget", "bounds"):
        (folder / name).write_bytes(b"[" * 100_000)
        outcome = here(command, folder)
        assert outcome.code != 70, outcome.err
        assert "Traceback" not in outcome.err


def test_estimators(tmp_path):
    path = tmp_path / "model.safetensors"
    x = np.random.default_rng(0).normal(size=(200, 3))
    CliplessClassifier(random_state=0).fit(x, x[:, 0] > 0).save(path)
    whole = path.read_bytes()
    with safe_open(str(path), framework="pt") as file:
        header = json.loads(file.metadata()["clipless"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def read():
        return load(path).privacy_.to_dict()

    for changed in some(damaged(header), 300):
        safetensors.torch.save_file(tensors, path, metadata={"clipless": json.dumps(changed)})
        accepted_or_named(read, str(path), DamagedFileError)
    for name in tensors:
        for other in (torch.zeros(0), tensors[name].flatten()[:1], None):
            rest = {key: part for key, part in tensors.items() if key != name}
            rest |= {} if other is None else {name: other.clone()}
            safetensors.torch.save_file(rest, path, metadata={"clipless": json.dumps(header)})
            accepted_or_named(read, str(path), DamagedFileError)
    for data in (*RAW.values(), whole[:8], whole[:99], whole[:-5], b"\xff" * 8 + whole[8:]):
        path.write_bytes(data)
        assert not accepted_or_named(read, str(path), DamagedFileError)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nothing")


def test_checkpoints_of_another_making(run, monkeypatch):
    """Whole by their digests, but their contents are none of ours."""
    folder = TrainerFolder(run, keep=2)
    files = folder.checkpoints.newest()
    SavedRun(files)
    for name in ("state.json", "optimizer.json", "weights.safetensors", "state.safetensors"):
        for data in RAW.values():
            monkeypatch.setattr(
                type(folder.checkpoints), "newest", lambda self, name=name, data=data: {
                    **files, name: data
                }
            )  # fmt: skip
            accepted_or_named(lambda: folder.saved({}, resume=True), str(run))


@pytest.mark.parametrize("compressed", [False, True])
def test_arrays_with_bytes_that_were_changed(tmp_path, compressed):
    path, generator = tmp_path / "data.npz", random.Random(0)
    save = np.savez_compressed if compressed else np.savez
    save(path, x=np.ones((20, 4), "float32"), y=np.arange(20) % 3)
    whole = path.read_bytes()
    for _ in range(600):
        data = bytearray(whole)
        for _ in range(generator.choice([1, 2, 8])):
            data[generator.randrange(len(data))] = generator.randrange(256)
        path.write_bytes(data)
        accepted_or_named(lambda: read_arrays(path), "data.npz", DataFileError)


def test_idx_headers_of_many_axes(tmp_path):
    path = tmp_path / "images.idx"
    for axes in range(1, 256):
        path.write_bytes(bytes([0, 0, 8, axes]) + (1).to_bytes(4, "big") * axes + b"x")
        accepted_or_named(lambda: read_idx(path), "images.idx", DataFileError)
    path.write_bytes(bytes([0, 0, 8, 60]) + bytes(4) + b"\xff" * 4 * 59)
    assert not accepted_or_named(lambda: read_idx(path), "images.idx", DataFileError)


def test_metrics_that_were_damaged_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = ['{"kind": "step", "step": 1}', '{"kind": "epoch", "step": 2, "loss": 0.3}']
    bad = ['{"kind": "step"}', '{"step": 1}', "[]", "1", "{", '{"kind": "step", "step": "x"}']
    path.write_text("\n".join([bad[0], good[0], *bad, good[1], '{"kind": "step", "step": 9}']))
    assert StepLog(path, kind="metrics").lines_until(5) == [json.loads(line) for line in good]


@pytest.mark.parametrize("ending", ["toml", "yaml", "json"])
def test_configurations(tmp_path, ending):
    path = tmp_path / f"run.{ending}"
    for data in RAW.values():
        path.write_bytes(data)
        accepted_or_named(lambda: read_config_file(path), path.name)
