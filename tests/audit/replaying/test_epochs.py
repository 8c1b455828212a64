"""Epochs in one order, replayed on neighbours: batches of a smaller rest, streams, run folders."""

from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from clipless import losses
from clipless.audit import record, with_empty_record
from clipless.privacy import FixedOrder, PrivacyOptions
from clipless.training import Trainer, TrainingOptions
from tests.audit.neighbours import assert_replays, neighbours, records, with_record
from tests.audit.replaying.test_replay import mlp, trained

ORDER = FixedOrder(dataset_size=40, batch_size=12)
STEPS = 9  # two passes of four steps, the last of them of four examples, and a step of the third


def correlated(loader, **options):
    return trained(loader, steps=STEPS, noise="correlated", **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"micro_batch_size": 5}, marks=pytest.mark.slow),
        pytest.param({"sampling": replace(ORDER, shuffle_seed=1)}, marks=pytest.mark.slow),
    ],
)
def test_passes_with_a_rest(options):
    data = records()

    def run(data):
        loader = DataLoader(TensorDataset(*data), batch_size=12)
        return correlated(loader, **{"sampling": "epochs"} | options)

    assert_replays(record(run, data), neighbours(data))


class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(zip(*self.data, strict=True))


def test_a_stream():
    data = records()

    def run(data):
        return correlated(DataLoader(Stream(data), batch_size=12), sampling=ORDER)

    assert_replays(record(run, data), neighbours(data))


def test_an_order_that_depends_on_the_data_is_found():
    """Shuffled by a number that follows from the records: all of them move when one does."""
    data = records()

    def run(data):
        x, y = data
        generator = torch.Generator().manual_seed(int(1e4 * float(x.sum())))
        order = torch.randperm(len(x), generator=generator)
        loader = DataLoader(TensorDataset(x[order], y[order]), batch_size=12)
        return correlated(loader, sampling="epochs")

    recording = record(run, data)
    assert not recording.replay(with_record(data, 3, 0.25)).passed


@pytest.mark.slow
@pytest.mark.usefixtures("quick_folders")
def test_a_trainer_and_its_folder():
    data = records()

    def run(data, folder):
        trainer = Trainer(
            mlp(), losses.CrossEntropy(tau=4.0), target_epsilon=4.0, batch_size=12, epochs=2,
            run_dir=folder, training=TrainingOptions(progress=False),
            options=PrivacyOptions(sampling="epochs", noise="correlated"),
        )  # fmt: skip
        result = trainer.fit(data)
        return {"weights": trainer.model.state_dict(), "epsilon": result.epsilon}

    recording = record(run, data, with_folder=True)
    others = neighbours(data) | {"another": with_empty_record(data, 13)}
    assert_replays(recording, others)
