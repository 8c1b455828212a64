"""Every rule under attack: never exceeded, and tight where the contract asks for it.

A layer is put between linear layers: the gradient of the one before it measures its Jacobian, the
gradient of the one behind it the norm of its output.
"""

import pytest
import torch
from torch import nn

from clipless import nn as lip
from clipless.audit import attack_bounds, gaussian_targets
from tests.bounds.architectures import linear_functional


class Fork(nn.Module):
    """Several branches of one tensor, combined by a function given as text-free code."""

    def __init__(self, combine, *branches):
        super().__init__()
        self.branches = nn.ModuleList(branches)
        self.combine = combine

    def forward(self, x):
        return self.combine(*(branch(x) for branch in self.branches))


def between(layer, width=8, out=None):
    """(layers, input shape, output shape) with `layer` acting on vectors."""
    return (
        [lip.SpectralLinear(width, width), layer, lip.SpectralLinear(out or width, 4)],
        (width,),
        (4,),
    )


def around_images(layer):
    """The same on images of two channels and 6 x 6 pixels."""
    size = layer(torch.zeros(1, 2, 6, 6)).shape[1:].numel()
    return (
        [lip.SpectralConv2d(2, 2, 1), layer, nn.Flatten(), lip.SpectralLinear(size, 4)],
        (2, 6, 6),
        (4,),
    )


def around_sequences(layer):
    size = layer(torch.zeros(1, 2, 12)).shape[1:].numel()
    return (
        [lip.SpectralConv1d(2, 2, 1), layer, nn.Flatten(), lip.SpectralLinear(size, 4)],
        (2, 12),
        (4,),
    )


def conv(*args, size=8, **options):
    layer = lip.SpectralConv2d(*args, **options)
    shape = (args[0], size, size)
    return [layer], shape, tuple(layer(torch.zeros(1, *shape)).shape[1:])


def conv1d(*args, size=12, **options):
    layer = lip.SpectralConv1d(*args, **options)
    return [layer], (args[0], size), tuple(layer(torch.zeros(1, args[0], size)).shape[1:])


def elementwise(function):
    return Fork(function, nn.Identity())


def linear():
    return lip.SpectralLinear(8, 8)


# name -> (what to attack, smallest ratio that the attack must reach for every parameter)
RULES = {
    "linear": (lambda: ([lip.SpectralLinear(8, 4, bias=True)], (8,), (4,)), 0.99),
    "linear on positions": (lambda: ([lip.SpectralLinear(8, 4, bias=True)], (5, 8), (5, 4)), 0.99),
    "linear, ball, norm 2": (
        lambda: ([lip.SpectralLinear(8, 8, norm=2.0, constraint="ball"), linear()], (8,), (8,)),
        0.99,
    ),
    "frobenius": (lambda: ([lip.FrobeniusLinear(8, 1, norm=0.5), nn.Identity()], (8,), (1,)), 0.99),
    "bias": (
        lambda: ([linear(), lip.SpectralLinear(8, 8, bias=True), linear()], (8,), (8,)),
        0.99,
    ),
    "conv 3x3 same": (lambda: conv(2, 4, 3, padding="same", bias=True), 0.85),
    "conv 3x3 valid": (lambda: conv(2, 4, 3, bias=True), 0.75),
    "conv stride 2": (lambda: conv(2, 4, 3, stride=2, padding="same", bias=True), 0.80),
    "conv stride = kernel": (lambda: conv(2, 4, 2, stride=2, bias=True), 0.99),
    "conv even kernel": (lambda: conv(2, 4, 4, padding="same"), 0.75),
    "conv dilation 2": (lambda: conv(2, 4, 3, padding="same", dilation=2), 0.6),
    "conv dilation = stride": (lambda: conv(1, 2, 3, padding="same", dilation=2, stride=2), 0.75),
    "conv circular": (lambda: conv(2, 4, 3, padding="same", padding_mode="circular"), 0.99),
    "conv circular stride": (
        lambda: conv(2, 4, 3, padding="same", padding_mode="circular", stride=2),
        0.85,
    ),
    "conv groups": (lambda: conv(4, 4, 3, padding="same", groups=2), 0.85),
    "conv depthwise": (lambda: conv(4, 4, 3, padding="same", groups=4), 0.85),
    "conv 1x1": (lambda: conv(4, 4, 1, bias=True), 0.99),
    "conv1d": (lambda: conv1d(2, 4, 5, padding="same", bias=True), 0.75),
    "conv1d stride 3": (lambda: conv1d(2, 4, 5, padding="same", stride=3), 0.85),
    "GroupSort(2)": (lambda: between(lip.GroupSort(2)), 0.99),
    "GroupSort(4)": (lambda: between(lip.GroupSort(4)), 0.99),
    "MaxMin": (lambda: between(lip.MaxMin()), 0.99),
    "FullSort": (lambda: between(lip.FullSort()), 0.99),
    "Absolute": (lambda: between(lip.Absolute()), 0.99),
    "Householder": (lambda: between(lip.Householder(8)), 0.99),
    "ReLU": (lambda: between(nn.ReLU()), 0.99),
    "LeakyReLU(2)": (lambda: between(nn.LeakyReLU(2.0)), 0.99),
    "ELU(1.5)": (lambda: between(nn.ELU(1.5)), 0.7),
    "Tanh": (lambda: between(nn.Tanh()), 0.8),
    "Sigmoid": (lambda: between(nn.Sigmoid()), 0.9),
    "Softplus": (lambda: between(nn.Softplus(beta=2.0)), 0.75),
    "GELU": (lambda: between(nn.GELU()), 0.9),
    "GELU tanh": (lambda: between(nn.GELU(approximate="tanh")), 0.9),
    "SiLU": (lambda: between(nn.SiLU()), 0.85),
    "Hardtanh": (lambda: between(nn.Hardtanh()), 0.9),
    "LayerCentering": (lambda: between(lip.LayerCentering()), 0.99),
    "BallProjection, wide": (lambda: between(lip.BallProjection(5.0)), 0.99),
    "BallProjection, narrow": (lambda: between(lip.BallProjection(0.7)), 0.3),
    "L2 pooling": (lambda: around_images(lip.ScaledL2NormPool2d(2)), 0.99),
    "L2 pooling, overlapping": (lambda: around_images(lip.ScaledL2NormPool2d(3, 2, 1)), 0.99),
    "average pooling, scaled": (lambda: around_images(lip.ScaledAvgPool2d(2)), 0.99),
    "average pooling, overlapping": (lambda: around_images(lip.ScaledAvgPool2d(3, 1, 1)), 0.8),
    "global L2": (lambda: around_images(lip.ScaledGlobalL2NormPool2d()), 0.99),
    "global average": (lambda: around_images(lip.ScaledGlobalAvgPool2d()), 0.99),
    "1-d L2 pooling": (lambda: around_sequences(lip.ScaledL2NormPool1d(3)), 0.99),
    "1-d average pooling": (lambda: around_sequences(lip.ScaledAvgPool1d(3)), 0.99),
    "1-d global L2": (lambda: around_sequences(lip.ScaledGlobalL2NormPool1d()), 0.99),
    "1-d global average": (lambda: around_sequences(lip.ScaledGlobalAvgPool1d()), 0.99),
    "torch max pooling": (lambda: around_images(nn.MaxPool2d(2)), 0.99),
    "torch max pooling, overlapping": (lambda: around_images(nn.MaxPool2d(3, 1, 1)), 0.95),
    "torch average pooling": (lambda: around_images(nn.AvgPool2d(2)), 0.99),
    "torch average pooling, padded": (lambda: around_images(nn.AvgPool2d(3, 2, 1)), 0.7),
    "torch adaptive pooling": (lambda: around_images(nn.AdaptiveAvgPool2d(2)), 0.99),
    "residual average": (lambda: between(lip.Residual(linear())), 0.99),
    "residual add": (lambda: between(lip.Residual(linear(), mode="add")), 0.99),
    "sum of branches": (lambda: between(Fork(lambda a, b: a + 2 * b, linear(), linear())), 0.99),
    "difference": (lambda: between(Fork(lambda a, b: a - b, linear(), linear())), 0.99),
    "concatenation": (
        lambda: between(Fork(lambda a, b: torch.cat([a, b], 1), linear(), linear()), out=16),
        0.7,
    ),
    "multiplication by a constant": (lambda: between(elementwise(lambda x: -3.0 * x)), 0.99),
    "adding a constant": (lambda: between(elementwise(lambda x: x + 0.5)), 0.99),
    "mean over positions": (
        lambda: (
            [lip.SpectralLinear(6, 6), elementwise(lambda x: x.mean(dim=1)), linear_head(6)],
            (5, 6),
            (4,),
        ),
        0.99,
    ),
    "sum over positions": (
        lambda: (
            [lip.SpectralLinear(6, 6), elementwise(lambda x: x.sum(1)), linear_head(6)],
            (5, 6),
            (4,),
        ),
        0.99,
    ),
    "largest over positions": (
        lambda: (
            [lip.SpectralLinear(6, 6), elementwise(lambda x: x.amax(dim=1)), linear_head(6)],
            (5, 6),
            (4,),
        ),
        0.99,
    ),
    "maximum of branches": (
        lambda: between(Fork(torch.maximum, linear(), linear())),
        0.65,
    ),
    "gradient clipping": (lambda: between(lip.ClipGradient(0.25)), 0.99),
    "shared layer": (lambda: (lambda one: between(nn.Sequential(one, one)))(linear()), 0.99),
}


def linear_head(width):
    return lip.SpectralLinear(width, 4)


@pytest.mark.parametrize("name", RULES)
def test_rule_is_a_tight_upper_bound(name):
    build, least = RULES[name]
    layers, input_shape, output_shape = build()
    model = nn.Sequential(lip.BoundedInput(2.0), *layers)
    result = attack_bounds(
        model,
        loss=linear_functional(),
        input_shape=input_shape,
        targets=gaussian_targets(*output_shape),
        restarts=4,
        steps=40,
    )
    assert not result.violations(tolerance=1e-6)
    assert min(result.ratios.values()) >= least, result.ratios


def test_a_3x3_convolution_on_a_28x28_image_is_tight():
    layer = lip.SpectralConv2d(1, 1, 3, padding="same", bias=True)
    result = attack_bounds(
        nn.Sequential(lip.BoundedInput(1.0), layer),
        loss=linear_functional(),
        input_shape=(1, 28, 28),
        targets=gaussian_targets(1, 28, 28),
        restarts=3,
        steps=25,
    )
    assert not result.violations()
    assert result.ratios["1.weight"] >= 0.85
    assert result.ratios["1.bias"] >= 0.99


@pytest.mark.parametrize("stride", [1, 2])
def test_fourier_certified_convolutions_hold(stride):
    """The larger kernels of the Fourier certificate: attacked without moving weights, which costs
    a certificate a step, but from a projected kernel that fills the ball."""
    first = lip.SpectralConv2d(1, 4, 3, padding="same", certificate_size=8)
    second = lip.SpectralConv2d(4, 4, 3, stride=stride, padding="same", certificate_size=8)
    size = 8 // stride
    result = attack_bounds(
        nn.Sequential(lip.BoundedInput(1.0), first, second),
        loss=linear_functional(),
        input_shape=(1, 8, 8),
        targets=gaussian_targets(4, size, size),
        restarts=4,
        steps=40,
        move_weights=False,
    )
    assert not result.violations()
    assert min(result.ratios.values()) >= 0.45
