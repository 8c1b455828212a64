"""Whole models, with every loss, under attack; and random architectures."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from clipless import losses
from clipless import nn as lip
from clipless.audit import attack_bounds, class_labels, gaussian_targets
from tests.bounds.architectures import MODELS, linear_functional, mlp

SIGNS = torch.tensor([-1.0, 1.0])


def signs(count, generator):
    return SIGNS[torch.randint(2, (count,), generator=generator)]


def bits(count, generator):
    return torch.randint(2, (count, 3), generator=generator)


MULTICLASS = {
    "cross entropy": (losses.CrossEntropy(tau=20.0), class_labels(3)),
    "binary cross entropy": (losses.BinaryCrossEntropy(tau=20.0), bits),
    "cosine similarity": (losses.CosineSimilarity(0.05), class_labels(3)),
    "hinge": (losses.MulticlassHinge(5.0), class_labels(3)),
    "kr": (losses.KantorovichRubinstein(), class_labels(3)),
    "hinge kr": (losses.HingeKR(3.0, 5.0), class_labels(3)),
    "absolute error": (losses.AbsoluteError(), gaussian_targets(3, scale=5.0)),
    "huber": (losses.Huber(0.05), gaussian_targets(3, scale=5.0)),
    "squared error": (losses.SquaredError(2.0, 3.0), gaussian_targets(3, scale=5.0)),
    "one's own": (linear_functional(), gaussian_targets(3)),
}


@pytest.mark.parametrize("name", MODELS)
def test_whole_models_hold(name):
    build, shape, inputs = MODELS[name]
    result = attack_bounds(
        build(),
        loss=linear_functional(),
        input_shape=shape,
        targets=gaussian_targets(3),
        inputs=inputs,
        restarts=6,
        steps=60,
    )
    assert not result.violations()
    # The head's bound is tight in every model; deeper layers lose a little at every joint.
    head = list(result.ratios)[-1]
    assert max(result.ratios.values()) >= 0.75
    assert result.ratios[head] >= 0.5


@pytest.mark.parametrize("loss", MULTICLASS)
def test_every_loss_holds_on_a_network(loss):
    function, targets = MULTICLASS[loss]
    result = attack_bounds(
        mlp(), loss=function, input_shape=(6,), targets=targets, restarts=4, steps=50
    )
    assert not result.violations()
    assert max(result.ratios.values()) >= 0.75


def test_binary_losses_with_one_logit():
    model = nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(4, 1, bias=True))
    for loss in (
        losses.KantorovichRubinstein(),
        losses.MulticlassHinge(2.0),
        losses.HingeKR(2.0, 9.0),
    ):
        result = attack_bounds(model, loss=loss, input_shape=(4,), targets=signs, restarts=4)
        assert not result.violations()
        assert min(result.ratios.values()) >= 0.99


@pytest.mark.parametrize("name", MODELS)
def test_network_lipschitz_constant_and_output_bound(name):
    """Two random inputs never differ more at the output than the constant allows."""
    from clipless.bounds import sensitivity

    build, shape, inputs = MODELS[name]
    model = build().double()
    report = sensitivity(model, loss=1.0, input_shape=shape)
    generator = torch.Generator().manual_seed(0)
    if inputs is not None:
        assert report.lipschitz == math.inf
        output = model(inputs(500, generator))
        assert output.norm(dim=1).max() <= report.output_bound * (1 + 1e-9)
        return
    a = torch.randn(500, *shape, generator=generator, dtype=torch.float64)
    b = a + 10.0 ** torch.linspace(-6, 1, 500).reshape(-1, *[1] * len(shape)) * torch.randn(
        500, *shape, generator=generator, dtype=torch.float64
    )
    change = (model(a) - model(b)).flatten(1).norm(dim=1)
    distance = (a - b).flatten(1).norm(dim=1)
    assert (change <= report.lipschitz * distance * (1 + 1e-9)).all()
    assert model(100 * a).norm(dim=1).max() <= report.output_bound * (1 + 1e-9)


ACTIVATIONS = [lip.GroupSort(2), lip.MaxMin(), lip.Absolute(), nn.ReLU(), nn.Tanh(), nn.Sigmoid()]


@st.composite
def architectures(draw):
    """A random network on 1 x 6 x 6 images: convolutions, residuals, pooling, dense layers."""
    channels = draw(st.sampled_from([2, 4]))
    bias = draw(st.booleans())
    layers = [
        lip.BoundedInput(
            draw(st.sampled_from([0.5, 3.0])), draw(st.sampled_from(["clip", "sphere"]))
        ),
        lip.SpectralConv2d(
            1,
            channels,
            draw(st.integers(1, 4)),
            stride=draw(st.integers(1, 2)),
            padding="same",
            dilation=draw(st.integers(1, 2)),
            bias=bias,
            norm=draw(st.sampled_from([1.0, 1.7])),
        ),
    ]
    for _ in range(draw(st.integers(0, 2))):
        block = nn.Sequential(
            lip.SpectralConv2d(
                channels,
                channels,
                draw(st.sampled_from([1, 3])),
                padding="same",
                groups=draw(st.sampled_from([1, 2])),
            ),
            draw(st.sampled_from(ACTIVATIONS)),
        )
        mode = draw(st.sampled_from(["average", "add", "plain"]))
        layers.append(block if mode == "plain" else lip.Residual(block, mode=mode))
    layers.append(
        draw(
            st.sampled_from(
                [
                    lip.ScaledL2NormPool2d(2, 1),
                    lip.ScaledAvgPool2d(2, 1),
                    nn.MaxPool2d(2, 1),
                    lip.LayerCentering(),
                    lip.BallProjection(0.4),
                ]
            )
        )
    )
    layers.append(nn.Flatten())
    width = nn.Sequential(*layers)(torch.zeros(1, 1, 6, 6)).shape[1]
    for _ in range(draw(st.integers(0, 1))):
        layers += [lip.SpectralLinear(width, 6, bias=bias), draw(st.sampled_from(ACTIVATIONS))]
        width = 6
    return nn.Sequential(*layers, lip.SpectralLinear(width, 3))


@settings(max_examples=20)
@given(model=architectures(), seed=st.integers(0, 1000))
def test_random_architectures_hold(model, seed):
    result = attack_bounds(
        model,
        loss=losses.CrossEntropy(tau=5.0),
        input_shape=(1, 6, 6),
        targets=class_labels(3),
        restarts=2,
        steps=12,
        seed=seed,
    )
    assert not result.violations()
