"""Pooling: 1-Lipschitz for every window, stride and padding, at zeros and tiny values too."""

import itertools
import math

import pytest
import torch

from clipless import nn as lip
from clipless.bounds import sensitivity
from clipless.errors import UnsupportedOperationError
from tests.nn.operators import jacobian_norm, norm_of

AVERAGE = {1: lip.ScaledAvgPool1d, 2: lip.ScaledAvgPool2d}
EUCLIDEAN = {1: lip.ScaledL2NormPool1d, 2: lip.ScaledL2NormPool2d}
GLOBAL = [
    lip.ScaledGlobalAvgPool1d,
    lip.ScaledGlobalAvgPool2d,
    lip.ScaledGlobalL2NormPool1d,
    lip.ScaledGlobalL2NormPool2d,
]
FORMS = [
    (k, s, p)
    for k, s, p in itertools.product((1, 2, 3, 4), (None, 1, 2, 3, 5), (0, 1, 2))
    if 2 * p <= k
]


@pytest.mark.parametrize(("kernel", "stride", "padding"), FORMS)
def test_average_pooling_is_one_lipschitz(kernel, stride, padding):
    for length in (4, 7, 9):
        layer = AVERAGE[1](kernel, stride, padding)
        assert norm_of(layer, (2, length)) <= 1 + 1e-12
    layer = AVERAGE[2](kernel, stride, padding)
    assert norm_of(layer, (1, 6, 5)) <= 1 + 1e-12


@pytest.mark.parametrize(("kernel", "stride", "padding"), FORMS)
def test_euclidean_pooling_is_one_lipschitz(kernel, stride, padding):
    layer = EUCLIDEAN[2](kernel, stride, padding)
    for example in (torch.randn(1, 5, 6), torch.ones(1, 5, 6), torch.randn(1, 5, 6).relu()):
        assert jacobian_norm(layer, example.double()) <= 1 + 1e-12
    x = torch.randn(20, 2, 9, dtype=torch.float64)
    pooled = EUCLIDEAN[1](kernel, stride, padding)(x)
    assert (pooled.flatten(1).norm(dim=1) <= x.flatten(1).norm(dim=1) * (1 + 1e-12)).all()


def test_mixed_windows():
    layer = lip.ScaledAvgPool2d((3, 2), stride=(1, 2), padding=(1, 0))
    assert (layer.window, layer.multiplicity) == (6, 3)
    assert norm_of(layer, (2, 5, 6)) <= 1 + 1e-12


def test_values():
    x = torch.tensor([[[[3.0, 4.0], [0.0, 0.0]]]])
    assert lip.ScaledAvgPool2d(2)(x).item() == pytest.approx(3.5)  # 7 / 4 * 2
    assert lip.ScaledL2NormPool2d(2)(x).item() == pytest.approx(5.0)
    assert lip.ScaledGlobalAvgPool2d()(x).item() == pytest.approx(3.5)
    assert lip.ScaledGlobalL2NormPool2d()(x).item() == pytest.approx(5.0)


@pytest.mark.parametrize("axes", [1, 2])
def test_euclidean_pooling_without_overlap_keeps_the_norm(axes):
    x = torch.randn(3, 4, *[6] * axes, dtype=torch.float64)
    pooled = EUCLIDEAN[axes](2)(x)
    torch.testing.assert_close(pooled.flatten(1).norm(dim=1), x.flatten(1).norm(dim=1))


def test_the_bounds_are_reached():
    """Tight: a constant window for averages, any window for Euclidean norms."""
    assert norm_of(lip.ScaledAvgPool2d(2), (1, 4, 4)) == pytest.approx(1)
    assert norm_of(lip.ScaledAvgPool1d(3, 1, 1), (1, 60)) > 0.99
    example = torch.randn(1, 4, 4, dtype=torch.float64)
    assert jacobian_norm(lip.ScaledL2NormPool2d(2), example) == pytest.approx(1)


SCALES = [0.0, 5e-324, 1e-320, 1e-200, 1e-160, 1e-45, 1e-30, 1e-16, 1e-15, 1e-8, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    "layer",
    [
        lip.ScaledL2NormPool2d(2),
        lip.ScaledL2NormPool2d(3, 1, 1),
        lip.ScaledGlobalL2NormPool2d(),
        lip.ScaledL2NormPool2d(1),
    ],
    ids=repr,
)
def test_euclidean_pooling_near_zero(layer, scale, dtype):
    """The root has an infinite slope at zero: neither NaN nor a Jacobian above one may come out."""
    tolerance = 1e-6 if dtype == torch.float64 else 1e-5
    for example in (torch.ones(1, 4, 4), torch.randn(1, 4, 4), torch.eye(4)[None]):
        scaled = (example.double() * scale).to(dtype)
        assert torch.isfinite(layer(scaled[None])).all()
        assert jacobian_norm(layer, scaled) <= 1 + tolerance


def test_one_zero_window_among_others_has_a_zero_derivative():
    x = torch.ones(1, 1, 4, 4, dtype=torch.float64)
    x[..., :2, :2] = 0
    x.requires_grad_()
    lip.ScaledL2NormPool2d(2)(x).sum().backward()
    assert torch.equal(x.grad[..., :2, :2], torch.zeros(1, 1, 2, 2, dtype=torch.float64))
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("layer", GLOBAL)
@pytest.mark.parametrize("size", [(1,), (7,), (3, 5), (1, 1)])
def test_global_pooling(layer, size):
    pool = layer()
    example = torch.randn(4, *size, dtype=torch.float64)
    assert pool(example[None]).shape == (1, 4)
    assert jacobian_norm(pool, example) == pytest.approx(1)
    assert jacobian_norm(pool, torch.zeros_like(example)) <= 1 + 1e-12


def test_global_pooling_needs_positions():
    for layer in GLOBAL:
        with pytest.raises((IndexError, RuntimeError)):
            layer()(torch.zeros(2, 3))


def test_naive_average_without_counted_padding_reaches_twice_its_row():
    def uncounted(x):
        return torch.nn.functional.avg_pool2d(x, 2, padding=1, count_include_pad=False)

    assert norm_of(uncounted, (1, 2, 2)) == pytest.approx(2 * math.sqrt(1 / 4))
    assert norm_of(lip.ScaledAvgPool2d(2, padding=1), (1, 2, 2)) <= 1 + 1e-12


@pytest.mark.parametrize("layer", [*AVERAGE.values(), *EUCLIDEAN.values()])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "kernel_size"),
        ((-2,), "kernel_size"),
        (((2, 2, 2),), "kernel_size"),
        ((2, 0), "stride"),
        ((2, 1, -1), "padding"),
        ((2, 1, 2), "padding"),
        ((3, 1, 2), "exceeds half"),
    ],
)
def test_constructor_errors_name_the_argument(layer, arguments, message):
    with pytest.raises(ValueError, match=message):
        layer(*arguments)


@pytest.mark.parametrize(("axes", "layer"), [*AVERAGE.items(), *EUCLIDEAN.items()])
@pytest.mark.parametrize("stride", [None, 1, 2])
def test_windows_larger_than_the_image_are_refused_with_the_shapes(axes, layer, stride):
    pool = layer(3, stride)
    for size in [(2,) * axes, (1,) + (5,) * (axes - 1), (0,) * axes, (5,) * (axes - 1)]:
        with pytest.raises(ValueError, match="smaller kernel_size") as caught:
            pool(torch.ones(2, 3, *size))
        assert str((2, 3, *size)) in str(caught.value)
        assert layer.__name__ in str(caught.value)
    padded = layer(3, stride, padding=1)(torch.ones(2, 3, *(1,) * axes))
    assert padded.shape == (2, 3, *(1,) * axes)


def test_a_model_with_such_a_window_is_refused_by_its_path():
    model = torch.nn.Sequential(lip.BoundedInput(1.0), lip.ScaledL2NormPool2d(3))
    with pytest.raises(UnsupportedOperationError, match=r"^1: .*smaller kernel_size"):
        sensitivity(model, loss=1.0, input_shape=(1, 2, 2))


def test_no_parameters_and_printed_form():
    layer = lip.ScaledAvgPool2d(2, stride=1)
    assert not layer.state_dict()
    assert repr(layer) == "ScaledAvgPool2d((2, 2), stride=(1, 1), padding=(0, 0))"
