"""Compiled runs: one example stays within its bound, and misuse is refused as it always is."""

import math

import pytest
import torch
from torch import nn

from clipless import nn as lip
from clipless.errors import CliplessError, ConstraintError, PrivacyError
from tests.privacy.compiled_runs import BACKEND, PRECISIONS, clipped, compiled
from tests.privacy.misuse_helpers import assert_close, bounded_or_refused, gradients_of, refused
from tests.privacy.runs import SHAPES, Run, cnn, examples, mlp, residual

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize(
    ("build", "precision", "where"),
    [(cnn, "float32", "cpu"), (cnn, "float32", "accelerator"), (cnn, "bfloat16", "accelerator"),
     (residual, "bfloat16", "cpu"), (clipped, "bfloat16", "cpu")],
)  # fmt: skip
def test_one_example_stays_within_its_sensitivity(build, precision, where, monkeypatch, request):
    if where == "accelerator":
        request.getfixturevalue("accelerated")
    monkeypatch.setattr(
        "tests.privacy.misuse_helpers.Run",
        lambda *a, **k: Run(*a, **{**k, "compile": BACKEND, "precision": precision}),
    )
    shape = SHAPES.get(build, (6,))
    assert not bounded_or_refused(lambda run: run.step(), build=build, shape=shape)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_bound_is_reached_and_not_exceeded(precision, accelerated):
    model = nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(64, 2, norm=20.0))
    with torch.no_grad():  # far on the wrong side for the example of class 1
        model[1].weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, 64) * 14 / 8)
    x, y = torch.full((1, 64), 10.0), torch.tensor([1])
    run = Run(
        model, (x, y), batch_size=1, sampling="full_batch", noise_multiplier=0.0, lr=0.0,
        compile=BACKEND, precision=precision,
    )  # fmt: skip
    run.step()
    sensitivity = run.engine.plan.sensitivities["1.weight"]
    ratio = gradients_of(model)["1.weight"].norm().item() / sensitivity
    assert 0.9 < ratio <= 1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_poisoned_rows_count_for_nothing_else(precision):
    x, y = examples(16)
    poisoned = x.clone()
    poisoned[3] = math.nan
    cleaned = x.clone()
    cleaned[3] = 0.0
    found = []
    for data in (poisoned, cleaned):
        torch.manual_seed(1)
        run = compiled(
            data=(data, y), batch_size=16, sampling="full_batch", noise_multiplier=0.0,
            precision=precision,
        )  # fmt: skip
        run.step()
        found.append(gradients_of(run.model))
    assert_close(found[0], found[1])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_noise_has_the_planned_variance(precision, accelerated):
    layers = lip.BoundedInput(1e-3), lip.SpectralLinear(6, 600), lip.SpectralLinear(600, 3)
    run = compiled(nn.Sequential(*layers), noise_multiplier=1e4, lr=0.0, precision=precision)
    drawn = {name: [] for name in run.engine.plan.noise_deviations}
    for _ in range(8):
        run.step()
        for name, gradient in gradients_of(run.model).items():
            drawn[name].append(gradient.flatten())
    for name, deviation in run.engine.plan.noise_deviations.items():
        values = torch.cat(drawn[name]) / deviation
        assert abs(values.std().item() - 1) < 4 / math.sqrt(2 * values.numel())


# --- misuse --------------------------------------------------------------------------------------


def twice(run):
    x, y = run.batch()
    run.backward(x, y)
    run.backward(x, y)


def second_backward(run):
    x, y = run.batch()
    loss = run.criterion(run.model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()


def other_loss(run):
    x, _ = run.batch()
    run.model(x).square().sum().backward()


def partial(run):
    x, y = run.batch()
    run.backward(x[:5], y[:5])


def multiplied(run):
    x, y = run.batch()
    (2 * run.criterion(run.model(x), y)).backward()


def reshaped(run):
    x, y = run.batch()
    run.criterion(run.model(x).flip(0), y).backward()


def layer_alone(run):
    run.batch()
    run.model[1](torch.randn(4, 6)).sum().backward()


def edited(run):
    run.steps(1)
    with torch.no_grad():
        run.model[1].weight.mul_(3)
    run.step()


def edited_in_between(run):
    x, y = run.batch()
    loss = run.criterion(run.model(x), y)
    with torch.no_grad():
        run.model[1].weight.mul_(0.5)
    loss.backward()


def without_a_batch(run):
    run.optimizer.step()


def hooked(run):
    run.model[1].register_forward_hook(lambda module, inputs, output: output.mean(0, keepdim=True))
    run.step()


MISUSE = {
    twice: (PrivacyError, "once"),
    second_backward: (PrivacyError, "second time"),
    other_loss: (PrivacyError, "criterion"),
    partial: (PrivacyError, "rows"),
    multiplied: (PrivacyError, "multiplied"),
    reshaped: (PrivacyError, "something else"),
    layer_alone: (PrivacyError, "outside the model"),
    edited: (ConstraintError, "1.weight"),
    edited_in_between: (PrivacyError, "edited between"),
    without_a_batch: (PrivacyError, "without a batch"),
    hooked: (CliplessError, "hook"),
}


@pytest.mark.parametrize("misuse", MISUSE, ids=lambda m: m.__name__)
def test_refusals(misuse, accelerated):
    run = compiled(mlp())
    before = run.engine.ledger.releases
    error, words = MISUSE[misuse]
    with refused(words, error=error):
        misuse(run)
    assert run.engine.ledger.releases <= before + 1


def test_changes_between_steps_are_followed(accelerated):
    run = compiled(clipped()).steps(1)
    before = run.engine.plan.noise_deviations["1.weight"]
    run.model[-1].norm = 0.05
    run.steps(2)
    assert run.engine.plan.noise_deviations["1.weight"] < before
    assert run.engine.session.compiled
