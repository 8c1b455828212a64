"""Normalisation of features: the constants that are claimed, under attack."""

import math

import pytest
import torch
from torch import nn

import clipless
from clipless import losses
from clipless import nn as lip
from clipless.audit import attack_bounds, gaussian_targets
from clipless.errors import UnsupportedOperationError
from tests.bounds.architectures import linear_functional
from tests.nn.operators import jacobian_norm, norm_of
from tests.nn.test_export import foreign_parts


def deviations(x, groups):
    return x.unflatten(1, (groups, -1)).flatten(2).std(dim=2, correction=0)


def test_group_normalize_above_the_floor_is_group_norm():
    x = 3 * torch.randn(5, 6, 4, 4, dtype=torch.float64) + 1
    plain = nn.functional.group_norm(x, 3, eps=0.0)
    torch.testing.assert_close(lip.GroupNormalize(3, floor=0.1)(x), plain)
    vectors = torch.randn(5, 12, dtype=torch.float64)
    plain = nn.functional.group_norm(vectors, 2, eps=0.0)
    torch.testing.assert_close(lip.GroupNormalize(2, floor=1e-3)(vectors), plain)


def test_group_normalize_below_the_floor_is_centring():
    x = 0.01 * torch.randn(5, 6, 4, dtype=torch.float64)
    assert deviations(x, 2).max() < 0.5
    grouped = x.unflatten(1, (2, 3))
    centred = (grouped - grouped.mean(dim=(2, 3), keepdim=True)).flatten(1, 2)
    torch.testing.assert_close(lip.GroupNormalize(2, floor=0.5)(x), centred / 0.5)


@pytest.mark.parametrize("floor", [0.05, 1.0, 20.0])
def test_group_normalize_is_lipschitz_with_one_over_the_floor(floor):
    """Below, at and above the floor, and in groups of very different size."""
    layer = lip.GroupNormalize(2, floor=floor)
    direction = torch.randn(4, 2, 2, dtype=torch.float64)
    direction /= deviations(direction[None], 2)[0].repeat_interleave(2)[:, None, None]
    found = []
    for size in (0.0, 1e-12, 0.5, 1 - 1e-12, 1.0, 1 + 1e-9, 1.3, 1e3, 1e9):
        example = floor * size * direction + 7
        example[:2] *= 1e-3
        found.append(jacobian_norm(layer, example))
    assert max(found) <= layer.lipschitz * (1 + 1e-9)
    assert max(found) >= layer.lipschitz * (1 - 1e-9)


def test_no_pair_grows_further_apart_than_claimed():
    layer = lip.GroupNormalize(3, floor=0.3)
    x = torch.randn(2000, 6, 2, dtype=torch.float64) * torch.logspace(-3, 1, 2000)[:, None, None]
    other = x + 0.1 * torch.randn_like(x) * torch.logspace(0, -4, 2000)[:, None, None]
    ratio = (layer(x) - layer(other)).flatten(1).norm(dim=1) / (x - other).flatten(1).norm(dim=1)
    assert ratio.max() <= layer.lipschitz
    assert ratio.max() >= 0.9 * layer.lipschitz


def test_without_a_floor_there_would_be_no_constant():
    """What the layer avoids: torch's own layer stretches small groups without limit."""
    direction = torch.randn(4, dtype=torch.float64)
    plain = nn.GroupNorm(1, 4, eps=0.0, affine=False)
    assert jacobian_norm(plain, 1e-6 * direction) > 1e5


def test_group_norms_are_at_most_the_root_of_their_size():
    layer = lip.GroupNormalize(3, floor=0.2)
    x = torch.randn(50, 6, 5) * torch.logspace(-4, 4, 50)[:, None, None]
    norms = layer(x).unflatten(1, (3, -1)).flatten(2).norm(dim=2)
    assert norms.max() <= math.sqrt(10) * (1 + 1e-6)
    full = deviations(x, 3) >= 0.2 * (1 + 1e-6)
    assert full.any()
    torch.testing.assert_close(norms[full], torch.full_like(norms[full], math.sqrt(10)))


def test_examples_stay_apart():
    layer = lip.GroupNormalize(2, floor=0.1)
    x = torch.randn(4, 4, 3)
    other = x.clone()
    other[1] = 1e6
    other[2] = math.nan
    assert torch.equal(layer(x)[0], layer(other)[0])
    assert torch.equal(layer(x)[0], layer(x[:1])[0])
    assert torch.isfinite(layer(other)[1]).all()
    assert layer(x[:0]).shape == (0, 4, 3)


@pytest.mark.parametrize("shape", [(3,), (3, 5), (3, 2, 4)])
def test_standardize_is_what_it_says(shape):
    mean, deviation = torch.tensor([1.0, -2.0, 0.0]), torch.tensor([2.0, 0.5, 4.0])
    layer = lip.ChannelStandardize(mean, deviation)
    x = torch.randn(4, *shape)
    spread = (3,) + (1,) * (len(shape) - 1)
    expected = (x - mean.view(spread)) / deviation.view(spread)
    torch.testing.assert_close(layer(x), expected)
    assert layer(x[:0]).shape == (0, *shape)


def test_the_constant_of_standardize_is_its_norm():
    layer = lip.ChannelStandardize([1.0, 2.0], [0.3, 5.0], dtype=torch.float64)
    assert norm_of(layer, (2, 3)) == pytest.approx(layer.lipschitz)
    assert layer.lipschitz == pytest.approx(1 / 0.3)


def test_the_output_bound_of_standardize_is_reached():
    """By the image that points from the shift, all in the channel of the largest gain."""
    layer = lip.ChannelStandardize([0.6, 0.0], [0.5, 2.0], dtype=torch.float64)
    model = nn.Sequential(lip.BoundedInput(2.0), layer)
    report = clipless.sensitivity(model, loss=1.0, input_shape=(2, 4))
    x = torch.zeros(1, 2, 4, dtype=torch.float64)
    x[0, 0] = -1.0  # of norm 2
    assert report.output_bound == pytest.approx(2 * 2 + math.sqrt(4) * 1.2)
    assert layer(x).norm().item() == pytest.approx(report.output_bound)


@pytest.mark.parametrize(
    ("layer", "least"),
    [
        (lip.GroupNormalize(2, floor=0.2), 0.85),
        (lip.GroupNormalize(2, floor=5.0), 0.99),
        (lip.ChannelStandardize([0.1, 0.0, 0.2, -0.1] * 2, [0.5, 1.0, 2.0, 3.0] * 2), 0.9),
        (lip.ChannelMix(torch.diag(torch.tensor([0.5, 1.0, 2.0, 3.0] * 2)).flip(0)), 0.9),
    ],
    ids=["deviations above the floor", "below the floor", "ChannelStandardize", "ChannelMix"],
)
def test_rules_are_tight_upper_bounds(layer, least):
    model = nn.Sequential(
        lip.BoundedInput(2.0), lip.SpectralLinear(8, 8), layer, lip.SpectralLinear(8, 4)
    )
    result = attack_bounds(
        model,
        loss=linear_functional(),
        input_shape=(8,),
        targets=gaussian_targets(4),
        restarts=4,
        steps=50,
    )
    assert not result.violations(tolerance=1e-6)
    # In front of the layer the gradient meets its constant, behind it its output bound.
    assert max(result.ratios.values()) >= least, result.ratios


def test_bounds_are_those_of_the_numbers_in_use():
    """A loaded state or an edit changes the constants, and the next report knows."""
    layer = lip.ChannelStandardize([0.0, 0.0], [1.0, 1.0])
    model = nn.Sequential(lip.BoundedInput(1.0), layer, lip.SpectralLinear(2, 2))
    before = clipless.sensitivity(model, loss=1.0, input_shape=(2,))
    assert before.gradient_bounds["2.weight"] == 1
    layer.load_state_dict({"mean": torch.zeros(2), "deviation": torch.tensor([1.0, 0.25])})
    assert layer.lipschitz == 4
    after = clipless.sensitivity(model, loss=1.0, input_shape=(2,))
    assert after.gradient_bounds["2.weight"] == 4
    layer.deviation.fill_(0.5)
    edited = clipless.sensitivity(model, loss=1.0, input_shape=(2,))
    assert edited.gradient_bounds["2.weight"] == 2
    for bad in (0.0, -1.0, math.nan, math.inf):
        layer.deviation.fill_(bad)
        with pytest.raises(UnsupportedOperationError, match="1: its mean is not finite"):
            clipless.sensitivity(model, loss=1.0, input_shape=(2,))


def test_a_guard_comes_before_or_behind():
    """Bounded functions are no guard: they would hand on a NaN."""
    head = lip.SpectralLinear(8, 2)
    unguarded = nn.Sequential(lip.GroupNormalize(2, floor=0.1), head)
    with pytest.raises(clipless.errors.UnboundedSensitivityError):
        clipless.sensitivity(unguarded, loss=losses.CrossEntropy(), input_shape=(8,))
    guarded = nn.Sequential(
        lip.GroupNormalize(2, floor=0.1), lip.BoundedInput(1.0, mode="sphere"), head
    )
    report = clipless.sensitivity(guarded, loss=losses.CrossEntropy(), input_shape=(8,))
    assert report.gradient_bounds["2.weight"] == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize(
    "layer", [lip.GroupNormalize(2, floor=0.3), lip.ChannelStandardize([1.0] * 4, [2.0] * 4)]
)
def test_exports_are_plain_torch(layer):
    exported = lip.to_torch(layer)
    assert not foreign_parts(exported)
    for shape in [(3, 4), (5, 4, 2, 2)]:
        x = torch.randn(shape)
        torch.testing.assert_close(exported(x), layer(x))


@pytest.mark.parametrize("groups", [0, -1, 1.5, True])
def test_groups_are_checked(groups):
    with pytest.raises(ValueError, match="groups"):
        lip.GroupNormalize(groups, floor=1.0)


@pytest.mark.parametrize("floor", [0.0, -1.0, math.nan, math.inf])
def test_the_floor_is_checked(floor):
    with pytest.raises(ValueError, match="floor"):
        lip.GroupNormalize(2, floor=floor)


def test_the_statistics_are_checked():
    for mean, deviation in [([1.0], [1.0, 2.0]), ([], []), (1.0, 1.0), ([[1.0]], [[1.0]])]:
        with pytest.raises(ValueError, match="one number for each channel"):
            lip.ChannelStandardize(mean, deviation)
    for mean, deviation in [(0.0, 0.0), (0.0, -1.0), (math.nan, 1.0), (0.0, math.inf)]:
        with pytest.raises(ValueError, match="finite"):
            lip.ChannelStandardize([mean], [deviation])


def test_the_statistics_are_kept_and_never_trained():
    given = torch.tensor([1.0, 2.0], requires_grad=True)
    layer = lip.ChannelStandardize(given, [1.0, 0.5])
    assert list(layer.state_dict()) == ["mean", "deviation"]
    assert not list(layer.parameters())
    assert not layer.mean.requires_grad
    with torch.no_grad():
        given.zero_()
    assert layer.mean.tolist() == [1.0, 2.0]
    assert repr(layer) == "ChannelStandardize(2, lipschitz=2)"
    assert repr(lip.GroupNormalize(3, floor=0.5)) == "GroupNormalize(3, floor=0.5)"


@pytest.mark.parametrize("shape", [(3,), (3, 5), (3, 2, 4)])
def test_mix_is_a_product_at_every_position(shape):
    matrix = torch.randn(2, 3, dtype=torch.float64)
    layer = lip.ChannelMix(matrix, dtype=torch.float64)
    x = torch.randn(4, *shape, dtype=torch.float64)
    torch.testing.assert_close(layer(x), torch.einsum("oc,nc...->no...", matrix, x))
    exact = torch.linalg.matrix_norm(matrix, 2).item()
    assert exact <= layer.lipschitz <= 1.01 * exact
    assert layer(x[:0]).shape == (0, 2, *shape[1:])


def test_bounds_of_a_mix_are_those_of_the_matrix_in_use():
    layer = lip.ChannelMix(torch.eye(2))
    model = nn.Sequential(lip.BoundedInput(1.0), layer, lip.SpectralLinear(2, 2))
    layer.load_state_dict({"matrix": torch.tensor([[0.0, 4.0], [1.0, 0.0]])})
    assert layer.lipschitz == pytest.approx(4, rel=0.01)
    report = clipless.sensitivity(model, loss=1.0, input_shape=(2,))
    assert 4 <= report.gradient_bounds["2.weight"] < 4.04
    layer.matrix[0, 0] = math.nan
    with pytest.raises(UnsupportedOperationError, match="1: its matrix is not finite"):
        clipless.sensitivity(model, loss=1.0, input_shape=(2,))
    for bad in ([[math.inf]], [1.0], []):
        with pytest.raises(ValueError, match="matrix must hold finite numbers"):
            lip.ChannelMix(bad)
