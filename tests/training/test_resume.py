"""Resuming: the same weights, nothing paid twice, and nothing that belongs to somebody else."""

import json
import shutil

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from clipless import losses
from clipless import nn as lip
from clipless.errors import LedgerError, PrivacyError
from clipless.folders import CheckpointStore
from clipless.privacy import Users, epsilon
from clipless.training import Callback, LayerAdam
from tests.privacy.runs import examples
from tests.training.ledgers import without
from tests.training.small import (
    DATA,
    STEPS,
    VALIDATION,
    Look,
    StopAt,
    counted,
    same,
    trainer,
    weights,
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    trained = trainer(folder)
    result = trained.fit(DATA, VALIDATION)
    return folder, trained, result


def crash(folder, step, **options):
    """A run that dies without saving anything after `step`."""
    crashed = trainer(folder, **{"callbacks": [StopAt(step)]} | options)
    with pytest.raises(RuntimeError, match="stop"):
        crashed.fit(DATA, VALIDATION)
    return crashed


@pytest.mark.parametrize("step", [1, 5, 6, 13, 23])
@pytest.mark.parametrize("every", [None, 4])
def test_a_crashed_run_repeats_its_steps(tmp_path, uninterrupted, step, every):
    look = Look()
    crash(tmp_path, step, checkpoint_every=every, callbacks=[look, StopAt(step)])
    assert counted(tmp_path) == step
    trained = trainer(tmp_path, checkpoint_every=every, callbacks=[look])
    result = trained.fit(DATA, VALIDATION)
    interval = every or 5
    assert result.resumed_from == (step - 1) // interval * interval
    assert sorted(look.seen) == [*range(1, STEPS + 1)]
    assert result.steps == counted(tmp_path) == STEPS
    assert result.epsilon == uninterrupted[2].epsilon
    assert [line["step"] for line in result.history] == [5, 10, 15, 20, 24]


def test_metrics_have_no_doubles(tmp_path, uninterrupted):
    crash(tmp_path, 13)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "st')
    trainer(tmp_path).fit(DATA, VALIDATION)
    read = [
        [(line["kind"], line.get("step")) for line in map(json.loads, lines)]
        for lines in (
            (folder / "metrics.jsonl").read_text().splitlines()
            for folder in (tmp_path, uninterrupted[0])
        )
    ]
    assert read[0] == read[1]


def test_lost_steps_are_repeated_and_not_paid_twice(tmp_path):
    look = Look()
    for stop in (3, 8, 9, 17):
        crash(tmp_path, stop, callbacks=[look, StopAt(stop)])
        assert counted(tmp_path) == stop
    result = trainer(tmp_path, callbacks=[look]).fit(DATA)
    assert result.stopped == "finished"
    assert result.steps == counted(tmp_path) == STEPS
    assert result.epsilon <= 3.0


def test_what_a_killed_run_had_reserved_is_spent(tmp_path):
    """After a kill the ledger counts a whole block, of which anything may have been released."""
    options = {"checkpoint_every": 100, "target_epsilon": None, "noise_multiplier": 2.0}
    look = Look()
    crash(tmp_path, 9, **options, callbacks=[look, StopAt(9)])
    path = tmp_path / "ledger.jsonl"
    lines = path.read_text().splitlines()
    assert json.loads(lines[-1])["kind"] == "refund"
    path.write_text("".join(f"{line}\n" for line in lines[:-1]))  # as if nothing was given back
    assert counted(tmp_path) == 15  # 1 + 2 + 4 + 8

    class Count(Callback):
        def on_step_end(self, trainer):
            assert trainer.engine.ledger.releases == 15 + max(0, trainer.step - 9)

    result = trainer(tmp_path, **options, callbacks=[look, Count()]).fit(DATA)
    assert result.steps == STEPS
    assert counted(tmp_path) == STEPS + 6


def test_a_step_that_left_no_digest_is_taken_anew(tmp_path):
    """It may have been seen, with its noise: it gets another sample and other noise."""
    options = {"checkpoint_every": 100, "target_epsilon": None, "noise_multiplier": 2.0}
    look = Look()
    crash(tmp_path, 9, **options, callbacks=[look, StopAt(9)])
    path = tmp_path / "ledger.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [each["kind"] for each in lines[-2:]] == ["release", "refund"]
    last = len(lines) - 1
    without(path, [last])
    again = Look()
    trainer(tmp_path, **options, callbacks=[again]).fit(DATA)
    assert all(same(look.seen[step], again.seen[step]) for step in range(1, 9))
    assert not same(look.seen[9], again.seen[9])
    assert counted(tmp_path) == STEPS + 1


def test_epsilon_is_that_of_the_ledger_while_steps_are_repeated(tmp_path):
    crash(tmp_path, 9)
    shown = []

    class Look(Callback):
        def on_step_end(self, trainer):
            shown.append((trainer.step, trainer.engine.get_epsilon()))

    trained = trainer(tmp_path, callbacks=[Look()])
    trained.fit(DATA)
    mechanism, delta = trained.engine.plan.mechanism, trained.engine.plan.delta
    assert shown[0] == (6, epsilon([(mechanism, 9)], delta))
    assert shown[-1] == (24, epsilon([(mechanism, 24)], delta))


def test_control_c_loses_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, callbacks=[StopAt(7, KeyboardInterrupt)]).fit(DATA)
    assert counted(tmp_path) == 7
    trained = trainer(tmp_path)
    assert trained.fit(DATA, VALIDATION).resumed_from == 7
    assert counted(tmp_path) == STEPS


def test_a_finished_run_is_not_trained_again(tmp_path):
    first = trainer(tmp_path)
    expected = first.fit(DATA, VALIDATION)
    again = trainer(tmp_path)
    result = again.fit(DATA, VALIDATION)
    assert result.resumed_from == STEPS
    assert result.metrics == expected.metrics
    assert counted(tmp_path) == STEPS
    assert first.fit(DATA, VALIDATION).resumed_from == STEPS  # the same trainer, too


def test_a_run_that_met_its_budget_stays_there(tmp_path):
    options = {"noise_multiplier": 1.5, "target_epsilon": 1.0, "steps": 500}
    first = trainer(tmp_path, **options).fit(DATA)
    again = trainer(tmp_path, **options).fit(DATA)
    assert first.stopped == again.stopped == "budget"
    assert first.steps == again.steps == counted(tmp_path)


class Noisy(Dataset):
    """Augments each example with numbers from a global generator."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return DATA[0][index] + 0.1 * torch.randn(6), DATA[1][index]


def test_dropout_and_augmentation_are_repeated(tmp_path):
    look = Look()

    def make(*callbacks):
        torch.manual_seed(3)
        net = torch.nn.Sequential(
            lip.BoundedInput(1.0), lip.SpectralLinear(6, 8), torch.nn.Dropout(0.2),
            lip.GroupSort(2), lip.SpectralLinear(8, 3))  # fmt: skip
        return trainer(tmp_path, model=net, checkpoint_every=4, callbacks=[look, *callbacks])

    with pytest.raises(RuntimeError, match="stop"):
        make(StopAt(11)).fit(Noisy())
    assert make().fit(Noisy()).resumed_from == 8
    assert counted(tmp_path) == STEPS


def test_steps_that_cannot_be_repeated_are_thrown_away_and_paid_again(tmp_path):
    options = {"target_epsilon": None, "noise_multiplier": 2.0}
    before, after = Look(), Look()
    crash(tmp_path, 9, callbacks=[before, StopAt(9)], **options)
    other = examples(100, seed=7)  # as many examples, but others
    trained = trainer(tmp_path, callbacks=[after], **options)
    with pytest.warns(UserWarning, match=r"step 5, repeated, does not come out as it did"):
        result = trained.fit(other)
    assert [*after.seen] == [*range(6, STEPS + 1)]
    assert not same(after.seen[6], before.seen[6])
    assert result.steps == STEPS
    assert counted(tmp_path) == STEPS + 4
    assert not trained.engine.ledger.insecure


def test_paying_again_ends_at_the_budget(tmp_path):
    crash(tmp_path, 9)
    with pytest.warns(UserWarning, match="fresh samples and noise"):
        result = trainer(tmp_path).fit(examples(100, seed=7))
    assert result.stopped == "budget"
    assert counted(tmp_path) >= STEPS
    assert result.epsilon <= 3.0
    again = trainer(tmp_path).fit(examples(100, seed=7))
    assert again.stopped == "budget"
    assert again.epsilon == result.epsilon


def test_two_copies_of_a_folder_part_where_their_record_ends(tmp_path):
    """Noise that both would draw, for other weights or data, could be subtracted."""
    look = Look()
    crash(tmp_path / "one", 9, callbacks=[look, StopAt(9)])
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    seen = {}
    for name in ("one", "two"):
        own = Look()
        result = trainer(tmp_path / name, callbacks=[own]).fit(DATA)
        assert result.steps == counted(tmp_path / name) == STEPS
        assert all(same(own.seen[step], look.seen[step]) for step in range(6, 10))
        seen[name] = own.seen
    assert not any(same(seen["one"][s], seen["two"][s]) for s in range(10, STEPS + 1))


def test_a_damaged_checkpoint_is_left_out(tmp_path):
    look = Look()
    crash(tmp_path, 13, callbacks=[look, StopAt(13)])
    newest = CheckpointStore(tmp_path / "checkpoints").paths()[-1]
    file = newest / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.warns(UserWarning, match=r"weights\.safetensors was damaged"):
        result = trainer(tmp_path, callbacks=[look]).fit(DATA, VALIDATION)
    assert result.resumed_from == 5
    assert counted(tmp_path) == STEPS


def test_without_any_checkpoint_nothing_is_begun_anew(tmp_path):
    crash(tmp_path, 7)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(PrivacyError, match="none of its checkpoints"):
        trainer(tmp_path).fit(DATA)
    assert counted(tmp_path) == 7


def test_a_kill_before_the_first_checkpoint_begins_anew(tmp_path):
    class Kill(BaseException):
        pass

    def die(*args, **kwargs):
        raise Kill

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointStore, "save", die)
        with pytest.raises(Kill):
            trainer(tmp_path).fit(DATA)
    assert trainer(tmp_path).fit(DATA).steps == STEPS


@pytest.mark.parametrize(
    ("options", "data", "named"),
    [
        ({"target_epsilon": 8.0}, DATA, r"target_epsilon: 3\.0 then, 8\.0 now"),
        ({"steps": 30}, DATA, "steps: 24 then, 30 now"),
        ({"batch_size": 25}, DATA, r"sampling: .*rate=0\.2.* then, .*rate=0\.25.* now"),
        ({}, examples(90), "dataset_size: 100 then, 90 now"),
        ({"criterion": losses.MulticlassHinge()}, DATA, "loss: "),
        ({"noise": "global"}, DATA, "noise: optimal then, global now"),
        ({"optimizer": torch.optim.SGD}, DATA, "optimizer: LayerAdam then, SGD now"),
        ({"optimizer": lambda p: LayerAdam(p, lr=1.0)}, DATA, r"lr: 0\.005 then, 1\.0 now"),
        ({"average": 0.5}, DATA, r"average: decay 0\.98 from 1 then, decay 0\.5"),
        ({"scheduler": None}, DATA, "scheduler: cosine then, None now"),
        (
            {"model": torch.nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(6, 3))},
            DATA,
            r"model 1\.weight: \(8, 6\) of torch.float32 then, \(3, 6\) of torch.float32 now",
        ),
    ],
    ids=lambda value: None if isinstance(value, tuple) else str(value)[:30],
)
def test_the_folder_of_another_run_is_refused(tmp_path, uninterrupted, options, data, named):
    folder = shutil.copytree(uninterrupted[0], tmp_path / "run")
    before = counted(folder)
    other = trainer(folder, **options)
    initial = weights(other)
    with pytest.raises(PrivacyError, match=named):
        other.fit(data)
    assert same(initial, weights(other))
    assert counted(folder) == before


def test_resuming_can_be_ruled_out(tmp_path):
    assert trainer(tmp_path, resume=False).fit(DATA).steps == STEPS
    with pytest.raises(PrivacyError, match="holds a run already"):
        trainer(tmp_path, resume=False).fit(DATA)


def test_an_older_or_missing_ledger_is_refused(tmp_path):
    crash(tmp_path, 13)
    ledger = tmp_path / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines[:6]))
    with pytest.raises(LedgerError, match="replaced by an older one"):
        trainer(tmp_path).fit(DATA)
    ledger.unlink()
    with pytest.raises(LedgerError, match="it is not the run's"):
        trainer(tmp_path).fit(DATA)
    ledger.write_text("".join(lines))
    assert trainer(tmp_path).fit(DATA).steps == STEPS


def test_two_processes_cannot_train_one_run(tmp_path):
    class Second(Callback):
        def on_step_end(self, trained):
            if trained.step == 7:
                with pytest.raises(LedgerError, match="in use"):
                    trainer(tmp_path).fit(DATA)

    assert trainer(tmp_path, callbacks=[Second()]).fit(DATA).steps == STEPS


def test_resuming_with_workers(tmp_path):
    class Rows(Dataset):
        def __len__(self):
            return 100

        def __getitem__(self, index):
            return DATA[0][index], DATA[1][index]

    def data():
        return DataLoader(Rows(), batch_size=20, num_workers=1)

    look = Look()
    with pytest.raises(RuntimeError, match="stop"):
        trainer(tmp_path, callbacks=[look, StopAt(8)]).fit(data())
    assert trainer(tmp_path, callbacks=[look]).fit(data(), VALIDATION).resumed_from == 5
    assert counted(tmp_path) == STEPS


def test_a_folder_is_not_gone_on_with_under_another_grouping_of_users(tmp_path):
    def users_of(ids):
        return {"unit": Users(ids), "batch_size": 10, "checkpoint_every": 4}

    pairs = [number // 2 for number in range(100)]
    crash(tmp_path, 9, **users_of(pairs))
    spent = counted(tmp_path)
    for others in ([number % 50 for number in range(100)], [0, *pairs[:-1]]):
        with pytest.raises(PrivacyError, match="belongs to another run"):
            trainer(tmp_path, **users_of(others)).fit(DATA)
    assert counted(tmp_path) == spent
    names = [f"user {number}" for number in pairs]
    assert trainer(tmp_path, **users_of(names)).fit(DATA).resumed_from == 8
