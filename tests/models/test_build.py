"""Building, exporting and training the models."""

import time

import pytest
import torch

import clipless
from clipless import losses, models
from clipless import nn as lip
from clipless.privacy import PrivacyOptions
from clipless.training import LayerAdam, Trainer, TrainingOptions
from tests.models.small import DEFAULT, config


@pytest.mark.parametrize("name", models.names())
@pytest.mark.parametrize("classes", [1, 7])
def test_shapes(name, classes):
    described = config(name, classes=classes)
    output = models.build(described)(torch.randn(5, *described.input_shape))
    assert output.shape == (5, classes)
    assert output.isfinite().all()


@pytest.mark.parametrize("name", models.names())
def test_the_input_guard_comes_first(name):
    described = config(name)
    model = models.build(described)
    assert isinstance(model[0], lip.BoundedInput)
    assert model[0].norm == described.guard_norm
    bad = torch.full((2, *described.input_shape), float("nan"))
    bad[1] = 1e30
    output = model(bad)
    assert output[0].equal(torch.zeros(3))
    assert output.norm(dim=1).max() <= described.guard_norm * (1 + 1e-5)


@pytest.mark.parametrize("name", models.names())
def test_the_same_seed_gives_the_same_model(name):
    first, second, third = (
        [p.detach() for p in seeded(name, seed).parameters()] for seed in (3, 3, 4)
    )
    assert all(map(torch.equal, first, second))
    assert not any(map(torch.equal, first, third))


def seeded(name, seed):
    torch.manual_seed(seed)
    return models.build(config(name))


@pytest.mark.parametrize("name", models.names())
def test_examples_do_not_touch_each_other(name):
    described = config(name)
    model = models.build(described)
    x = torch.randn(4, *described.input_shape)
    other = torch.cat([x[:1], 3 * torch.randn(3, *described.input_shape)])
    assert torch.allclose(model(x)[0], model(other)[0], atol=1e-6)
    assert torch.allclose(model(x)[:1], model(x[:1]), atol=1e-6)


@pytest.mark.parametrize("name", models.names())
def test_exports_to_plain_torch(name):
    described = config(name, clip_gradient=0.1, output_bias=0.5)
    model = models.build(described).eval()
    plain = clipless.to_torch(model)
    x = 3 * torch.randn(6, *described.input_shape)
    with torch.no_grad():
        assert torch.allclose(plain(x), model(x), atol=1e-6)
    assert not any(type(part).__module__.startswith("clipless") for part in plain.modules())


@pytest.mark.parametrize("name", models.names())
def test_building_is_quick(name):
    described = config(name, DEFAULT, classes=10)
    best = min(_seconds(lambda: models.build(described)) for _ in range(3))
    assert best < 1.0


def _seconds(action):
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


@pytest.mark.parametrize("name", models.names())
def test_a_few_private_steps_lower_the_loss(name):
    """With hardly any noise: the gradients that arrive are those of the loss."""
    described = config(name, classes=2)
    model = models.build(described)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(64, *described.input_shape, generator=generator)
    y = (torch.arange(64) % 2).long()
    x = x.reshape(64, -1)
    x[:, : x.shape[1] // 2] *= (1 + 2 * y[:, None]) / 3  # the first half of the entries tells
    data = (x.reshape(64, *described.input_shape), y)
    criterion = losses.CrossEntropy(tau=20.0)
    trainer = Trainer(
        model,
        criterion,
        noise_multiplier=0.01,
        target_delta=1e-4,
        batch_size=64,
        steps=12,
        options=PrivacyOptions(sampling="full_batch"),
        training=TrainingOptions(
            optimizer=lambda parameters: LayerAdam(parameters, lr=0.02),
            average=None,
            accountant="rdp",
            progress=False,
        ),
    )
    before = trainer.evaluate(data)["loss"]
    trainer.fit(data)
    assert trainer.evaluate(data)["loss"] < 0.9 * before
    assert all(each.holds for each in clipless.certify(model).values())


def test_one_output_trains_as_binary_logit():
    model = models.build("mlp", input_shape=4, classes=1, output_bias=1.0)
    x = torch.randn(200, 4)
    y = (x[:, 0] > 0).float()
    trainer = Trainer(
        model,
        losses.BinaryCrossEntropy(tau=20.0),
        noise_multiplier=0.1,
        target_delta=1e-4,
        batch_size=200,
        steps=20,
        options=PrivacyOptions(sampling="full_batch"),
        training=TrainingOptions(accountant="rdp", progress=False),
    )
    trainer.fit((x, y))
    assert ((trainer.predict(x)[:, 0] > 0) == (y > 0)).float().mean() > 0.85


def test_an_mlp_takes_images_and_a_linear_model_is_one():
    assert models.build("mlp", input_shape=(3, 8, 8), classes=2)(torch.rand(2, 3, 8, 8)).shape == (
        2,
        2,
    )
    linear = models.build("mlp", input_shape=5, classes=2, hidden=())
    assert len(list(linear.parameters())) == 1
