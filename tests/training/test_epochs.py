"""The trainer over ordinary epochs: of tensors, loaders and streams; killed and resumed."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from clipless import losses
from clipless import nn as lip
from clipless.errors import PrivacyError
from clipless.privacy import Correlated, FixedOrder, PrivacyOptions
from clipless.training import Callback, Trainer, TrainingOptions

X = torch.randn(110, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
ORDER = FixedOrder(dataset_size=110, batch_size=20)
STEPS = 18  # three passes of six steps, the last of each of ten examples


def trainer(folder=None, *, sampling="epochs", noise="correlated", callbacks=(), **options):
    torch.manual_seed(1)
    model = torch.nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(4, 2))
    training = {name: options.pop(name) for name in ("checkpoint_every",) if name in options}
    return Trainer(
        model, losses.CrossEntropy(tau=10.0), run_dir=folder, epochs=3,
        **{"target_epsilon": 3.0, "batch_size": 20} | options,
        options=PrivacyOptions(sampling=sampling, noise=noise),
        training=TrainingOptions(
            callbacks=callbacks, progress=False,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9), **training,
        ),
    )  # fmt: skip


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


def test_tensors_are_shuffled_once_and_loaders_read_as_they_are():
    tensors = trainer()
    assert tensors.fit((X, Y)).steps == STEPS
    assert tensors.engine.plan.sampling.shuffle_seed == 0
    loader = trainer(batch_size=None)
    loader.fit(DataLoader(TensorDataset(X, Y), batch_size=20, drop_last=True))
    assert loader.engine.plan.sampling == FixedOrder(
        dataset_size=110, batch_size=20, drop_last=True
    )
    with pytest.raises(PrivacyError, match="shuffles anew"):
        trainer(batch_size=None).fit(DataLoader(TensorDataset(X, Y), batch_size=20, shuffle=True))


def test_a_stream():
    for data in (Stream(), DataLoader(Stream(), batch_size=20)):
        result = trainer(sampling=ORDER, batch_size=None).fit(data)
        assert (result.steps, result.stopped) == (STEPS, "finished")
        assert 2.99 < result.epsilon <= 3.0
    with pytest.raises(TypeError, match="FixedOrder"):
        trainer().fit(Stream())


def test_noise_is_optimised_for_the_schedule_and_the_average_that_are_used():
    found = trainer()
    found.fit((X, Y))
    told = found._noise(DataLoader(TensorDataset(X, Y), batch_size=20))
    assert told.average == 0.98
    assert len(told.learning_rates) == STEPS
    assert told.learning_rates[9] == pytest.approx(0.5)
    plain, _ = Correlated().chosen(found.optimizer, ORDER, steps=STEPS)
    assert plain != found.engine.plan.strategy
    assert found.engine.plan.strategy_error < 0.7


class KilledError(Exception):
    pass


class KillAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer):
        if trainer.step == self.step:
            raise KilledError


@pytest.mark.parametrize("step", [3, 8, 12, 17])
def test_a_killed_run_ends_as_it_would_have_and_pays_nothing_twice(tmp_path, step):
    folder = tmp_path / "run"
    killed = trainer(folder, callbacks=[KillAt(step)], checkpoint_every=4)
    with pytest.raises(KilledError):
        killed.fit((X, Y))
    weights = killed.model.state_dict()
    seen = {}

    class Look(Callback):
        def on_step_end(self, trainer):
            if trainer.step == step:
                seen.update({k: v.clone() for k, v in trainer.model.state_dict().items()})

    again = trainer(folder, callbacks=[Look()], checkpoint_every=4)
    result = again.fit((X, Y))
    assert (result.steps, result.stopped) == (STEPS, "finished")
    assert again.engine.ledger.releases == 3
    assert 2.99 < result.epsilon <= 3.0
    if step % 4:  # with a checkpoint at the very step there is nothing to repeat
        assert all(torch.equal(weights[name], each) for name, each in seen.items())
    assert np.isfinite(result.epsilon)
