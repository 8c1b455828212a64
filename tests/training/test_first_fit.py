"""What people hand to a trainer on their first day, and what they are told."""

import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from clipless import PrivacyEngine, losses
from clipless import nn as lip
from clipless.training import Callback, LittleSignalWarning, Trainer, TrainingOptions


def model():
    return torch.nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(4, 2))


def trainer(**settings):
    given = {"noise_multiplier": 1.0, "batch_size": 50, "steps": 2, **settings}
    return Trainer(model(), losses.CrossEntropy(), **given)


def test_arrays_of_numpy_are_data():
    x = np.random.default_rng(0).normal(size=(200, 4))  # float64, as numpy has it
    y = (x[:, 0] > 0).astype(int)
    fitted = trainer()
    assert fitted.fit((x, y), validation_data=(x, y)).steps == 2
    assert fitted.predict(x).shape == (200, 2)


def test_float64_tensors_are_data():
    x = torch.randn(200, 4, dtype=torch.float64)
    assert trainer().fit((x, (x[:, 0] > 0).long())).steps == 2


def test_streams_lengths_and_text_are_refused_in_words():
    class Stream(IterableDataset):
        def __iter__(self):
            yield torch.zeros(4), 0

    with pytest.raises(TypeError, match="is a stream"):
        trainer().fit(Stream())
    with pytest.raises(ValueError, match="differ in number"):
        trainer().fit((torch.zeros(10, 4), torch.zeros(9).long()))
    with pytest.raises(TypeError, match="encode text"):
        trainer().fit((np.array([["a"] * 4] * 20), np.zeros(20, dtype=int)))


def test_arguments_of_opacus_and_a_missing_criterion_are_explained():
    with pytest.raises(TypeError, match="takes no max_grad_norm: gradients are not clipped"):
        PrivacyEngine().make_private(module=model(), max_grad_norm=1.0)
    with pytest.raises(TypeError, match="takes no max_grad_norm"):
        trainer(max_grad_norm=1.0)
    data = torch.utils.data.DataLoader(torch.zeros(9, 4), batch_size=3)
    network = model()
    with pytest.raises(TypeError, match=r"needs criterion: a loss of clipless\.losses"):
        PrivacyEngine().make_private(
            module=network, optimizer=torch.optim.SGD(network.parameters()), data_loader=data,
            noise_multiplier=1.0,
        )  # fmt: skip
    with pytest.raises(TypeError, match="needs criterion"):
        Trainer(model(), noise_multiplier=1.0, batch_size=50, steps=2)


def test_validate_lists_every_problem():
    network = torch.nn.Sequential(
        lip.BoundedInput(1.0), torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(),
        torch.nn.Linear(8, 2),
    )  # fmt: skip
    found = [str(each) for each in PrivacyEngine.validate(network, input_shape=(4,))]
    assert [each.split(":")[0] for each in found] == [
        "1 (Linear)", "2 (BatchNorm1d)", "4 (Linear)"
    ]  # fmt: skip
    both = PrivacyEngine.validate(network, criterion=torch.nn.CrossEntropyLoss())
    assert len(both) == 4
    assert PrivacyEngine.validate(model(), input_shape=(4,)) == []


def test_a_model_that_cannot_learn_is_announced():
    x = torch.randn(200, 4)
    data = (x, (x[:, 0] > 0).long())
    with pytest.warns(LittleSignalWarning, match="will not learn at this noise: signal over noise"):
        trainer(noise_multiplier=1e6).fit(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(noise_multiplier=1.0).fit(data)


def test_the_announcement_moves_no_generator_and_no_weight():
    torch.manual_seed(3)
    network = model()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    state = torch.random.get_rng_state()
    from clipless.training._signal import typical_gradients

    found = typical_gradients(network, losses.CrossEntropy(), (4,))
    assert set(found) == {"1.weight"}
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(p.grad is None for p in network.parameters())
    assert network.training


@pytest.mark.parametrize(("width", "during"), [(4, 1), (1200, 2)])
def test_small_steps_use_one_thread(width, during):
    """Two threads that wait for each other on a busy machine took thirteen times as long as one."""
    seen = []

    class Look(Callback):
        def on_step_end(self, trainer):
            seen.append(torch.get_num_threads())

    network = torch.nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(width, width))
    x = torch.zeros(60, width)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        Trainer(
            network, losses.CrossEntropy(), noise_multiplier=1.0, batch_size=30, steps=1,
            training=TrainingOptions(callbacks=[Look()]),
        ).fit((x, torch.zeros(60).long()))  # fmt: skip
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    assert (seen, after) == ([during], 2)
