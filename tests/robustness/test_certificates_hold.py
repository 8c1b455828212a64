"""No certificate breaks: small networks of all kinds, at random and trained, under attack."""

import pytest
import torch
from torch import nn

from clipless import nn as lip
from clipless.robustness import AttackOptions, attack_certificates, certified_radius
from tests.robustness.networks import NETWORKS, binary, inputs, mlp, sphere_mlp, trained


@pytest.mark.parametrize("after_training", [False, True], ids=["random", "trained"])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_certificate_breaks(name, after_training):
    build, shape, scale = NETWORKS[name]
    x = inputs(shape, scale)
    model = trained(build(), x) if after_training else build()
    result = attack_certificates(
        model,
        x,
        arithmetic=torch.float32,
        attack=AttackOptions(steps=12, restarts=4, ladder=(1.1, 4.0, 25.0)),
    )
    assert result.broken == ()
    assert result.attacked >= 35
    assert len(result.ratios) >= 10
    assert result.ratios.min() >= 1


@pytest.mark.parametrize("name", ["mlp", "cnn", "raw pixels"])
def test_certificates_are_not_far_from_the_truth(name):
    """Radii ten times as large are broken for most: nobody 'fixed' soundness by shrinking them."""
    build, shape, scale = NETWORKS[name]
    x = inputs(shape, scale)
    model = trained(build(), x)
    result = attack_certificates(
        model,
        x,
        radii=8 * certified_radius(model, x),
        attack=AttackOptions(steps=15, restarts=4, ladder=()),
    )
    assert len(result.broken) > 30


def test_binary_logit_without_an_axis_and_dropout():
    x = inputs((6,), 1.0)
    model = binary()
    radii = certified_radius(model, x)
    # Dropout is off when decisions are made, so only the two layers count.
    assert torch.all(radii >= 0.99 * model.eval()(x).detach().abs())
    assert attack_certificates(model, x, attack=AttackOptions(restarts=3, steps=20)).broken == ()


def test_float32_costs_a_little_and_no_more():
    x = inputs((6,), 2.0)
    model = mlp()
    exact, coarse = (
        certified_radius(model, x, arithmetic=dtype) for dtype in (torch.float64, torch.float32)
    )
    assert torch.all(coarse <= exact)
    assert torch.all(coarse >= exact - 1.25e-4)  # products round by Frobenius norms: a bound
    assert torch.any(coarse < exact)


def test_convolutions_are_bounded_on_the_image_that_they_meet():
    """The patch count allows for images where all windows agree; here the Fourier bound is less."""
    torch.manual_seed(1)
    model = nn.Sequential(
        lip.BoundedInput(1.0), lip.SpectralConv2d(1, 8, 5, padding="same"), nn.Flatten(),
        lip.SpectralLinear(8 * 64, 2),
    )  # fmt: skip
    from clipless.robustness._network import read_network

    network = read_network(model, (1, 8, 8))
    kernel = model[1].weight.detach().double() * model[1].scale
    basis = torch.eye(64, dtype=torch.float64).reshape(64, 1, 8, 8)
    images = torch.nn.functional.conv2d(basis, kernel, padding=2)
    true = torch.linalg.matrix_norm(images.flatten(1), 2).item()
    assert true <= network.feature_lipschitz < 0.95
    assert network.feature_lipschitz < 1.2 * true


def test_a_sphere_is_better_than_its_global_constant_suggests():
    """Images eight times as large: a change of the raw image moves its direction an eighth."""
    model = sphere_mlp()
    x = inputs((6,), 1.0)
    torch.testing.assert_close(
        certified_radius(model, 8 * x), 8 * certified_radius(model, x), rtol=1e-9, atol=1e-9
    )
