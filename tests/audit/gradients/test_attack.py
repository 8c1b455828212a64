"""The attack itself: it must succeed where a bound is wrong, or its failures prove nothing."""

import pytest
from torch import nn

from clipless import losses
from clipless import nn as lip
from clipless.audit import attack_bounds, class_labels, gaussian_targets
from clipless.bounds import sensitivity
from tests.bounds.architectures import MODELS, linear_functional, mlp

TIGHT = {
    "linear": ([lip.SpectralLinear(6, 4, bias=True)], (6,), (4,)),
    "group sort": (
        [lip.SpectralLinear(6, 6), lip.GroupSort(2), lip.SpectralLinear(6, 4)], (6,), (4,)
    ),
    "residual": (
        [lip.Residual(lip.SpectralLinear(6, 6)), lip.SpectralLinear(6, 4)], (6,), (4,)
    ),
    "L2 pooling": (
        [
            lip.SpectralConv2d(2, 2, 1), lip.ScaledL2NormPool2d(2), nn.Flatten(),
            lip.SpectralLinear(8, 4),
        ],
        (2, 4, 4),
        (4,),
    ),
    "circular convolution": (
        [lip.SpectralConv2d(1, 2, 3, padding="same", padding_mode="circular")], (1, 4, 4), (2, 4, 4)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TIGHT)
def test_succeeds_against_bounds_that_are_ten_percent_too_small(name):
    layers, input_shape, output_shape = TIGHT[name]
    model = nn.Sequential(lip.BoundedInput(1.0), *layers)
    loss = linear_functional()
    true = sensitivity(model, loss=loss, input_shape=input_shape).gradient_bounds
    result = attack_bounds(
        model,
        loss=loss,
        input_shape=input_shape,
        targets=gaussian_targets(*output_shape),
        bounds={name: 0.9 * bound for name, bound in true.items()},
        steps=40,
    )
    assert set(result.violations()) == set(true)


def test_finds_a_wrong_constant_in_a_loss():
    """A loss that lies about its constant: the network's bounds are then exceeded."""
    honest = losses.CrossEntropy()
    liar = losses.PerExample(
        lambda output, target: honest.per_example(output[None], target[None])[0], lipschitz=1.0
    )
    result = attack_bounds(
        mlp(), loss=liar, input_shape=(6,), targets=class_labels(3), restarts=4, steps=60
    )
    assert result.violations()


def test_leaves_the_model_alone():
    build, shape, _ = MODELS["mlp"]
    model = build()
    before = {name: p.clone() for name, p in model.named_parameters()}
    attack_bounds(
        model, loss=linear_functional(), input_shape=shape, targets=gaussian_targets(3), steps=2
    )
    for name, parameter in model.named_parameters():
        assert parameter.equal(before[name])
        assert parameter.dtype == before[name].dtype
