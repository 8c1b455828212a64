"""Checkpoints: whole or absent, damage is noticed, nothing is unpickled."""

import json
import pickle
import random

import numpy as np
import pytest
import safetensors.torch
import torch

from clipless.folders import CheckpointStore, UnreadableCheckpointError, read_checkpoint
from clipless.training import generator_states, restore_generators
from clipless.training._state import from_files, to_files
from tests.privacy.runs import mlp
from tests.training.small import DATA, STEPS, trainer


def equal(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second) and first.dtype == second.dtype
    if isinstance(first, dict):
        return list(first) == list(second) and all(equal(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return type(first) is type(second) and all(map(equal, first, second))
    return first == second and type(first) is type(second)


def test_state_survives_the_disk():
    shared = torch.arange(6.0).reshape(2, 3)
    tree = {
        "numbers": [1, -2.5e-300, True, None, "text"],
        "tuple": (1, (2.0, [])),
        7: {"transposed": shared.T, "again": shared, "scalar": torch.tensor(3, dtype=torch.uint8)},
        "odd": {"tensor": "a name", "tuple": 1},
        "half": torch.randn(3).bfloat16(),
    }
    assert equal(from_files(to_files(tree, name="x"), name="x"), tree)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_optimizer_states_survive(make):
    net = mlp()
    optimizer = make(net.parameters(), lr=0.1)
    net(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    assert equal(from_files(to_files(state, name="optimizer"), name="optimizer"), state)


def test_what_cannot_be_kept_is_refused_by_name():
    with pytest.raises(TypeError, match=r"state\.hook is a function"):
        to_files({"hook": lambda: None}, name="state")


def test_generators_are_restored():
    states = from_files(to_files(generator_states(), name="x"), name="x")
    drawn = torch.rand(3), np.random.rand(3), random.random()
    restore_generators(states)
    again = torch.rand(3), np.random.rand(3), random.random()
    assert torch.equal(drawn[0], again[0])
    assert (drawn[1] == again[1]).all()
    assert drawn[2] == again[2]


def test_only_the_last_are_kept(tmp_path):
    store = CheckpointStore(tmp_path / "new", keep=3)
    assert store.newest() is None
    for step in (1, 2, 2, 5, 3):
        store.save({"a": b"%d" % step}, step=step)
    assert [path.name[-2:] for path in store.paths()] == ["02", "05", "03"]
    assert store.newest() == {"a": b"3"}
    assert sorted(path.name for path in store.folder.iterdir()) == [p.name for p in store.paths()]
    with pytest.raises(ValueError, match="keep"):
        CheckpointStore(tmp_path, keep=0)


@pytest.mark.parametrize("stage", ["write", "manifest", "rename", "remove"])
def test_a_crash_while_saving_leaves_the_earlier_ones(tmp_path, monkeypatch, stage):
    store = CheckpointStore(tmp_path, keep=1)
    store.save({"a": b"1", "b": b"1"}, step=1)
    from clipless.folders import _checkpoints as _checkpoint

    class Crash(BaseException):
        pass

    def crash(*args, **kwargs):
        raise Crash

    def crash_at(name):
        write = _checkpoint.write_file
        return lambda path, data: crash() if path.name == name else write(path, data)

    with monkeypatch.context() as patch:
        if stage == "write":
            patch.setattr(_checkpoint, "write_file", crash_at("b"))
        elif stage == "manifest":
            patch.setattr(_checkpoint, "write_file", crash_at("manifest.json"))
        elif stage == "rename":
            patch.setattr(_checkpoint.Path, "rename", crash)
        else:
            patch.setattr(_checkpoint.shutil, "rmtree", crash)
        with pytest.raises(Crash):
            store.save({"a": b"2", "b": b"2"}, step=2)
    for path in store.paths():
        read_checkpoint(path)
    assert store.newest() == (
        {"a": b"2", "b": b"2"} if stage == "remove" else {"a": b"1", "b": b"1"}
    )
    store.save({"a": b"3"}, step=3)
    assert [path.name for path in store.folder.iterdir()] == [store.paths()[-1].name]


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "manifest", "version"])
def test_damage_is_named_and_the_one_before_is_taken(tmp_path, damage):
    store = CheckpointStore(tmp_path, keep=2)
    store.save({"weights": b"first" * 10}, step=1)
    path = store.save({"weights": b"second" * 10}, step=2)
    file = path / ("manifest.json" if damage in ("manifest", "version") else "weights")
    data = file.read_bytes()
    if damage == "truncate":
        file.write_bytes(data[:-7])
    elif damage == "flip":
        file.write_bytes(data[:5] + b"?" + data[6:])
    elif damage == "delete":
        file.unlink()
    elif damage == "manifest":
        file.write_bytes(data[:-7])
    else:
        file.write_bytes(data.replace(b'"version": 1', b'"version": 9'))
    with pytest.raises(UnreadableCheckpointError, match=file.name):
        read_checkpoint(path)
    with pytest.warns(UserWarning, match=file.name):
        assert store.newest() == {"weights": b"first" * 10}


def test_what_is_in_a_run_folder(tmp_path):
    trained = trainer(tmp_path)
    trained.fit(DATA)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["plan"] == trained.engine.plan.to_dict()
    assert plan["belongs_to"]["dataset_size"] == 100
    assert plan["belongs_to"]["model"]["1.weight"] == "(8, 6) of torch.float32"
    path = CheckpointStore(tmp_path / "checkpoints").paths()[-1]
    assert path.name.endswith(f"step-{STEPS:08d}")
    assert path.stat().st_mode & 0o077 == 0
    saved = safetensors.torch.load_file(path / "weights.safetensors")
    assert {name: torch.equal(saved[name], each) for name, each in
            trained.model.state_dict().items()} == dict.fromkeys(saved, True)  # fmt: skip
    averaged = safetensors.torch.load_file(path / "average.safetensors")
    for name, each in trained.average.averaged_parameters().items():
        assert torch.equal(averaged[name], each)
    ledger = (tmp_path / "ledger.jsonl").read_text()
    assert ledger.startswith((path / "ledger.jsonl").read_text())


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    trainer(tmp_path, steps=5).fit(DATA)

    def refuse(*args, **kwargs):
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert trainer(tmp_path, steps=5).fit(DATA).resumed_from == 5
