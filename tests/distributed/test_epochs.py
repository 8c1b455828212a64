"""Epochs with correlated noise in two processes: the same data, noise at its owners, resuming."""

import copy

import pytest
import torch
import torch.distributed as dist

from clipless import PrivacyEngine
from tests.distributed.group import together
from tests.distributed.runs import final_weights, private_run
from tests.privacy.epochs import watched
from tests.privacy.runs import Run, examples, mlp

STEPS = 12
OPTIONS = {
    "data": examples(23), "batch_size": 5, "sampling": "epochs", "noise": "correlated",
    "steps": STEPS,
}  # fmt: skip


def whole_run(wrapper):
    run = private_run(mlp, wrapper, engine=PrivacyEngine(), **OPTIONS)
    key = run.engine.session.noise._key
    watcher, taken = watched(run, STEPS)
    return {
        "noise": watcher.noise, "taken": taken, "key": key, "weights": final_weights(run),
        "releases": run.engine.ledger.releases, "epsilon": run.engine.get_epsilon(),
        "strategy": run.engine.plan.strategy,
    }  # fmt: skip


@pytest.mark.parametrize("wrapper", ["bare", pytest.param("ddp", marks=pytest.mark.slow)])
def test_two_processes_share_each_batch_and_correlate_what_they_own(wrapper):
    results = together(whole_run, 2, wrapper)
    first, second = results
    for a, b in zip(first["weights"], second["weights"], strict=True):
        assert torch.equal(a, b)
    batches = [sorted(a + b) for a, b in zip(first["taken"], second["taken"], strict=True)]
    assert batches[:5] == batches[5:10]
    assert [each for batch in batches[:5] for each in batch] == list(range(23))
    assert first["releases"] == second["releases"] == 3
    assert first["key"] != second["key"]
    matrix = torch.from_numpy(first["strategy"].matrix())
    for each in results:  # C times what a process added is white
        white = matrix @ each["noise"]
        assert white[:, :].std().item() == pytest.approx(1.0, abs=0.15)
        released = each["noise"]
        near = (released[1:] * released[:-1]).mean() / released.square().mean()
        assert near < -0.2


def saved_and_resumed(folder):
    ledger = folder / "ledger.jsonl"
    run = private_run(mlp, engine=PrivacyEngine(ledger=ledger), **OPTIONS).steps(3)
    state = copy.deepcopy(run.engine.state_dict())
    run.engine.gather_optimizer_state()
    optimizer = copy.deepcopy(run.optimizer.state_dict()) if dist.get_rank() == 0 else None
    box = [optimizer]
    dist.broadcast_object_list(box)
    model = copy.deepcopy(run.inner.state_dict())
    run.steps(4)
    weights = final_weights(run)
    run.engine.close()
    other = mlp()
    other.load_state_dict(model)
    sgd = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
    sgd.load_state_dict(box[0])
    again = Run(
        model=other, optimizer=sgd, resume_from=state, engine=PrivacyEngine(ledger=ledger),
        **OPTIONS,
    ).steps(4)  # fmt: skip
    same = [torch.equal(a, b) for a, b in zip(weights, other.parameters(), strict=True)]
    first, releases = again.engine.session._book.first, again.engine.ledger.releases
    again.steps(STEPS - 7)
    return same, first, releases, again.engine.ledger.releases


def test_a_run_of_two_processes_repeats_and_goes_on(tmp_path):
    for same, first, releases, last in together(saved_and_resumed, 2, tmp_path):
        assert all(same)
        assert (first, releases, last) == (0, 2, 3)
