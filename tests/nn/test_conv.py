"""Convolutions: operator norms by explicit SVD, over all that shapes the patch count."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from clipless.nn import SpectralConv1d, SpectralConv2d, certify
from tests.nn.operators import norm_of, singular_values


def worst_kernel(layer):
    """All taps alike: patches of a smooth image line up with it, the case the bound is made for."""
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.project()


def random_kernel(layer):
    with torch.no_grad():
        layer.weight.normal_()
        layer.project()


def spike_kernel(layer):
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[0].view(-1)[-1] = 5.0
        layer.project()


KERNELS = [worst_kernel, random_kernel, spike_kernel]
FORMS_1D = [
    {"kernel_size": k, "stride": s, "dilation": d, "groups": g, "padding": p}
    for k, s, d, g, p in itertools.product(
        (1, 2, 3, 4, 5), (1, 2, 3, 4), (1, 2, 3), (1, 2), ("same", "valid", 1, 7)
    )
    if d * (k - 1) + 1 <= 11 or p != "valid"
]


@pytest.mark.parametrize("constraint", ["orthogonal", "ball"])
@pytest.mark.parametrize("fill", KERNELS, ids=lambda f: f.__name__)
def test_sequences_never_exceed_the_norm(fill, constraint):
    for form in FORMS_1D:
        layer = SpectralConv1d(2, 4, constraint=constraint, dtype=torch.float64, **form)
        fill(layer)
        for length in (11, 12):
            if (
                length + 2 * layer.padding[0][0]
                < layer.dilation[0] * (layer.kernel_size[0] - 1) + 1
            ):
                continue
            assert norm_of(layer, (2, length)) <= 1 + 1e-12, form


FORMS_2D = [
    {"kernel_size": 3},
    {"kernel_size": 3, "padding": "same"},
    {"kernel_size": 3, "padding": 4},
    {"kernel_size": 3, "padding": "same", "stride": 2},
    {"kernel_size": (2, 5), "padding": "same", "stride": (1, 2)},
    {"kernel_size": 4, "padding": "same", "stride": 3},
    {"kernel_size": 3, "padding": "same", "dilation": 2},
    {"kernel_size": 3, "padding": "same", "dilation": 2, "stride": 2},
    {"kernel_size": 3, "padding": "same", "dilation": (2, 3), "stride": (4, 6)},
    {"kernel_size": 1},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": 7, "padding": "same"},
    {"kernel_size": 9, "padding": "same"},  # larger than the image
    {"kernel_size": 3, "padding": "same", "groups": 2},
    {"kernel_size": 2, "padding": 1, "groups": 4, "stride": 2},
    {"kernel_size": 3, "padding": "same", "padding_mode": "circular"},
    {"kernel_size": 2, "padding": "same", "padding_mode": "circular"},
    {"kernel_size": (3, 2), "padding": "same", "padding_mode": "circular", "stride": (2, 3)},
    {"kernel_size": 3, "padding": "same", "padding_mode": "circular", "dilation": 2, "stride": 2},
    {"kernel_size": 6, "padding": "same", "padding_mode": "circular"},
]


@pytest.mark.parametrize("fill", KERNELS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("form", FORMS_2D, ids=str)
def test_images_never_exceed_the_norm(form, fill):
    layer = SpectralConv2d(4, 4, dtype=torch.float64, **form)
    fill(layer)
    assert norm_of(layer, (4, 6, 6)) <= 1 + 1e-12
    if layer.padding_mode == "zeros" and layer.padding != ((0, 0), (0, 0)):
        assert norm_of(layer, (4, 2, 3)) <= 1 + 1e-12


@pytest.mark.parametrize("fill", KERNELS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("form", FORMS_2D, ids=str)
def test_fourier_certificates_never_exceed_the_norm(form, fill):
    layer = SpectralConv2d(4, 4, dtype=torch.float64, certificate_size=6, norm=0.8, **form)
    fill(layer)
    sizes = [(6, 6)]
    if layer.padding_mode == "zeros" and layer.padding != ((0, 0), (0, 0)):
        sizes += [(2, 3), (6, 1), (5, 6)]
    for size in sizes:
        assert norm_of(layer, (4, *size)) <= 0.8 * (1 + 1e-12)


def test_fourier_certificates_allow_more_than_reshaping():
    """The point of `certificate_size`: the operator fills its ball instead of 60 % of it."""
    norms = {}
    for size in (None, 8):
        torch.manual_seed(0)
        layer = SpectralConv2d(8, 8, 3, padding="same", certificate_size=size, dtype=torch.float64)
        norms[size] = norm_of(layer, (8, 8, 8))
    assert norms[None] < 0.8
    assert norms[8] > 0.9


def test_a_box_kernel_nearly_reaches_the_bound():
    layer = SpectralConv2d(1, 1, 3, padding="same", dtype=torch.float64)
    worst_kernel(layer)
    assert 0.97 < norm_of(layer, (1, 16, 16)) <= 1


def usual_coefficient(kernel, size):
    """The image-size average in common use for stride 1."""
    half = (kernel - 1) / 2
    return size / (kernel * size - half * (half + 1))


@pytest.mark.parametrize(("kernel", "size"), [(3, 10), (3, 28), (5, 20)])
def test_the_usual_coefficient_would_exceed_one(kernel, size):
    """Averaging patch counts over the image lets a "1-Lipschitz" convolution pass 1."""
    box = torch.full((1, 1, kernel), kernel**-0.5, dtype=torch.float64)
    axis = norm_of(lambda x: F.conv1d(x, box, padding=kernel // 2), (1, size))
    usual = axis**2 * usual_coefficient(kernel, size)  # a separable kernel: both axes alike
    assert usual > 1.005
    layer = SpectralConv2d(1, 1, kernel, padding="same", dtype=torch.float64)
    assert axis**2 * layer.scale <= 1


def test_the_usual_coefficient_reaches_one_and_a_half_on_tiny_images():
    """A 7x7 kernel on 2x2 pixels, its taps weighted by how often each meets a pair of pixels."""
    counts = torch.zeros(7, dtype=torch.float64)
    counts[2:5] = torch.tensor([1.0, 2.0, 1.0])
    kernel = torch.outer(counts, counts)
    kernel = (kernel / kernel.norm()).reshape(1, 1, 7, 7)
    operator = norm_of(lambda x: F.conv2d(x, kernel, padding=3), (1, 2, 2))
    assert operator * usual_coefficient(7, 2) == pytest.approx(1.5)
    layer = SpectralConv2d(1, 1, 7, padding="same", dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(kernel)
    layer.project()
    assert norm_of(layer, (1, 2, 2)) <= 1.5 / 7 * (1 + 1e-6)


def unfolding_kernel(layer):
    """One output channel for each tap: the patches themselves, whose energy is what counts."""
    with torch.no_grad():
        layer.weight.copy_(torch.eye(layer.weight.shape[0]).reshape(layer.weight.shape))


@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("dilation", [1, 2, 4])
@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
def test_the_patch_count_is_exact(kernel, dilation, stride):
    """An unfolding reaches the bound: no smaller factor would do for any stride and dilation."""
    layer = SpectralConv1d(
        1, kernel, kernel, stride, "same", dilation, constraint="ball", dtype=torch.float64
    )
    unfolding_kernel(layer)
    assert norm_of(layer, (1, 40)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("padding", "stride", "size", "norm"),
    [((1, 1), 4, 6, math.sqrt(2)), ((2, 0), 4, 5, math.sqrt(2)), ((7, 7), 1, 8, math.sqrt(3))],
)
def test_circular_padding_outside_its_conditions_breaks_the_count(padding, stride, size, norm):
    """Why circular padding has conditions, on each axis: in two dimensions the excess squares."""
    layer = SpectralConv1d(1, 3, 3, stride=stride, dtype=torch.float64)
    unfolding_kernel(layer)
    padded = norm_of(lambda x: layer(F.pad(x, padding, mode="circular")), (1, size))
    assert padded == pytest.approx(norm)


@pytest.mark.parametrize("padding", [0, 2, "valid", (1, 0)])
def test_circular_padding_needs_its_total(padding):
    with pytest.raises(ValueError, match='padding="same"'):
        SpectralConv2d(1, 1, 3, padding=padding, padding_mode="circular")


@pytest.mark.parametrize("mode", ["reflect", "replicate", "constant", "wrap"])
def test_other_padding_modes_are_refused(mode):
    with pytest.raises(ValueError, match=r'repeats pixels.*"zeros" or "circular"'):
        SpectralConv2d(1, 1, 3, padding=1, padding_mode=mode)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_take_the_largest_groups_norm(groups):
    layer = SpectralConv2d(4, 4, 3, groups=groups, constraint="ball", dtype=torch.float64)
    with torch.no_grad():
        layer.weight.normal_()
        layer.weight[-1].mul_(20)
    largest = max(singular_values(part.flatten(1))[0] for part in layer.weight.chunk(groups))
    assert layer.certificate().bound == pytest.approx(largest.item(), rel=0.01)
    assert layer.certificate().bound >= largest
    layer.project()
    for part in layer.weight.chunk(groups):
        assert singular_values(part.flatten(1))[0] <= 1


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_starts_orthogonal_in_every_group(groups):
    layer = SpectralConv2d(4, 8, 3, groups=groups, norm=1.5)
    for part in layer.weight.chunk(groups):
        values = singular_values(part.flatten(1))
        assert values.max() <= 1.5
        assert values.min() >= 1.5 * (1 - 1e-5)


def test_depthwise_kernels_start_with_equal_norms():
    layer = SpectralConv2d(5, 5, 3, groups=5)
    torch.testing.assert_close(layer.weight.flatten(1).norm(dim=1), torch.ones(5))


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30])
@pytest.mark.parametrize("size", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_projection_restores_the_norm(dtype, size, scale):
    layer = SpectralConv2d(
        2, 4, 3, padding="same", bias=True, bias_norm=0.5, certificate_size=size
    ).to(dtype)
    with torch.no_grad():
        layer.weight.normal_().mul_(scale)
        layer.bias.normal_().mul_(scale)
    layer.project()
    assert all(found.holds for found in certify(layer).values())
    layer = layer.double()
    assert norm_of(layer, (2, 5, 5)) <= 1 + 1e-9
    assert layer.bias.norm() <= 0.5


@pytest.mark.parametrize("size", [None, 5])
def test_kernels_that_are_not_finite_are_never_certified(size):
    for value in (math.nan, math.inf):
        layer = SpectralConv2d(2, 2, 3, certificate_size=size)
        with torch.no_grad():
            layer.weight[0, 0, 0, 0] = value
        assert not layer.certificate().holds


@pytest.mark.parametrize("constraint", ["orthogonal", "ball"])
@pytest.mark.parametrize("value", [5e-324, 1e-200, 1e200])
@pytest.mark.parametrize("size", [None, 5])
def test_extreme_double_kernels_can_be_projected(size, value, constraint):
    layer = SpectralConv2d(
        2, 2, 3, certificate_size=size, constraint=constraint, dtype=torch.float64
    )
    with torch.no_grad():
        layer.weight.fill_(value)
    layer.project()
    assert layer.certificate().holds


@pytest.mark.parametrize("form", FORMS_2D, ids=str)
def test_computes_the_torch_convolution_with_the_scaled_kernel(form):
    layer = SpectralConv2d(4, 4, bias=True, dtype=torch.float64, **form)
    nn.init.normal_(layer.bias)
    plain = dict(form)
    circular = plain.pop("padding_mode", "zeros") == "circular"
    kernel = layer.weight / math.sqrt(layer.multiplicity)
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    padding = plain.pop("padding", 0)
    if padding == "same":
        # torch's own "same", computed on an image padded by hand where torch would refuse a stride
        pairs = [(d * (k - 1) // 2, d * (k - 1) - d * (k - 1) // 2) for k, d in _axes(layer)]
        flat = [amount for pair in reversed(pairs) for amount in pair]
        x, padding = F.pad(x, flat, mode="circular" if circular else "constant"), 0
    plain.pop("kernel_size")
    expected = F.conv2d(x, kernel, layer.bias, padding=padding, **plain)
    x = x if padding or "padding" not in form or form["padding"] != "same" else _crop(x, layer)
    torch.testing.assert_close(layer(x), expected)


def _axes(layer):
    return list(zip(layer.kernel_size, layer.dilation, strict=True))


def _crop(x, layer):
    (top, bottom), (left, right) = layer.padding
    return x[:, :, top : x.shape[2] - bottom, left : x.shape[3] - right]


@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dilation", [1, 2, 3])
def test_same_keeps_the_size(kernel, dilation):
    x = torch.zeros(1, 1, 9)
    assert SpectralConv1d(1, 2, kernel, padding="same", dilation=dilation)(x).shape == (1, 2, 9)
    strided = SpectralConv1d(1, 2, kernel, stride=2, padding="same", dilation=dilation)
    assert strided(x).shape == (1, 2, 5)


def test_parameters_are_plain():
    layer = SpectralConv2d(2, 4, 3, bias=True)
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert layer.weight.shape == nn.Conv2d(2, 4, 3).weight.shape
    assert SpectralConv1d(2, 4, 3).bias is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": 3}, "groups=3"),
        ({"groups": 0}, "groups=0"),
        ({"kernel_size": 0}, "kernel_size"),
        ({"kernel_size": (3, 3, 3)}, "kernel_size"),
        ({"kernel_size": 2.5}, "kernel_size|float"),
        ({"stride": 0}, "stride"),
        ({"dilation": -1}, "dilation"),
        ({"padding": -1}, "padding"),
        ({"padding": "full"}, "padding"),
        ({"padding": (1, 2, 3)}, "padding"),
        ({"norm": 0}, "norm"),
        ({"bias_norm": -2.0}, "bias_norm"),
        ({"constraint": "box"}, "constraint"),
        ({"certificate_size": 0}, "certificate_size"),
    ],
    ids=str,
)
def test_constructor_errors_name_the_argument(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        SpectralConv2d(**{"in_channels": 2, "out_channels": 4, "kernel_size": 3, **arguments})


def test_printed_form():
    printed = repr(
        SpectralConv2d(
            2, 4, 3, dilation=2, groups=2, padding="same", padding_mode="circular",
            constraint="ball", certificate_size=9, norm=2,
        )
    )  # fmt: skip
    for part in ("dilation=(2, 2)", "groups=2", "circular", "'ball'", "(9, 9)", "norm=2"):
        assert part in printed
