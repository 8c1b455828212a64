"""Colour spaces: their bounds are attacked, met, and hold for whatever arrives."""

import colorsys
import itertools
import math

import pytest
import torch

from clipless.data import ColourSpace

SPACES = ["rgb", "hsv", "yiq", "yuv", "grayscale"]
LINEAR = [name for name in SPACES if name != "hsv"]
CORNERS = torch.tensor(list(itertools.product((0.0, 1.0), repeat=3)))


def one_pixel(colours):
    """(rows, 3) -> images of one pixel."""
    return colours[:, :, None, None]


def colours(rows=20_000):
    """Colours inside the cube, on its faces, near its corners, near grey."""
    inside = torch.rand(rows, 3)
    faces = torch.where(torch.rand(rows, 3) < 0.5, inside, inside.round())
    near = (CORNERS.repeat(rows // 8, 1) + 1e-3 * torch.randn(rows, 3)).clamp(0, 1)
    grey = (torch.rand(rows, 1) + 1e-4 * torch.randn(rows, 3)).clamp(0, 1)
    return torch.cat([inside, faces, near, grey, CORNERS])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SPACES)
def test_norms_stay_below_the_bound_and_meet_it(name, dtype):
    convert = ColourSpace(name)
    images = convert(one_pixel(colours().to(dtype)))
    assert images.shape[1] == convert.channels
    assert images.dtype == dtype
    largest = images.double().flatten(1).norm(dim=1).max().item()
    bound = convert.norm_bound(pixels=1)
    assert largest <= bound
    # Hue comes near a full turn only in the limit.
    assert largest >= bound * (0.999 if name == "hsv" else 1 - 2e-6)
    assert convert.norm_bound(pixels=100) == pytest.approx(10 * bound)


@pytest.mark.parametrize("name", SPACES)
def test_gradient_ascent_does_not_exceed_the_bound(name):
    """Over whole images, from random starts, in double precision."""
    convert = ColourSpace(name)
    x = torch.rand(16, 3, 2, 2, dtype=torch.float64)
    for _ in range(60):
        x.requires_grad_()
        norms = convert(x).flatten(1).norm(dim=1)
        assert norms.max() <= convert.norm_bound(pixels=4)
        (gradient,) = torch.autograd.grad(norms.sum(), x)
        x = (x.detach() + 0.03 * gradient.sign()).clamp(0, 1)
    assert norms.max() >= 0.9 * convert.norm_bound(pixels=4)


@pytest.mark.parametrize("name", LINEAR)
def test_distances_grow_by_at_most_the_lipschitz_constant(name):
    convert = ColourSpace(name)
    first, second = colours(5000).double(), colours(5000).double()
    moved = (convert(one_pixel(first)) - convert(one_pixel(second))).flatten(1).norm(dim=1)
    distance = (first - second).norm(dim=1)
    ratio = moved[distance > 0] / distance[distance > 0]
    assert ratio.max() <= convert.lipschitz
    jacobian = torch.autograd.functional.jacobian(
        lambda c: convert(c.view(1, 3, 1, 1)).flatten(), torch.full((3,), 0.5).double()
    )
    spectral = torch.linalg.matrix_norm(jacobian, 2).item()
    assert spectral <= convert.lipschitz <= spectral * (1 + 2e-6)


def test_hsv_has_no_lipschitz_constant():
    """Two reds, a hair apart on both sides of hue 0, are almost a full turn apart."""
    convert = ColourSpace("hsv")
    pair = torch.tensor([[1.0, 0.0, 1e-6], [1.0, 1e-6, 0.0]], dtype=torch.float64)
    hues = convert(one_pixel(pair))[:, 0]
    assert (hues[0] - hues[1]).abs() > 0.99
    assert convert.lipschitz == math.inf


@pytest.mark.parametrize(
    ("name", "reference"), [("hsv", colorsys.rgb_to_hsv), ("yiq", colorsys.rgb_to_yiq)]
)
def test_agrees_with_the_standard_library(name, reference):
    sample = colours(200).double()
    found = ColourSpace(name)(one_pixel(sample)).flatten(1)
    expected = torch.tensor([reference(*c) for c in sample.tolist()], dtype=torch.float64)
    # colorsys rounds its chroma coefficients differently, in the third decimal.
    tolerance = 1e-12 if name == "hsv" else 0.005
    assert (found - expected).abs().max() <= tolerance


def test_white_has_no_chroma_and_full_luma():
    for name in ("yiq", "yuv"):
        white = ColourSpace(name)(torch.ones(1, 3, 1, 1).double()).flatten()
        assert white.tolist() == pytest.approx([1, 0, 0], abs=1e-12)
    # The definition of YUV: U = 0.492 (B - Y), V = 0.877 (R - Y).
    y, u, v = ColourSpace("yuv")(torch.tensor([0.2, 0.7, 0.4]).double().view(1, 3, 1, 1)).flatten()
    assert u.item() == pytest.approx(0.492 * (0.4 - y.item()), abs=1e-7)
    assert v.item() == pytest.approx(0.877 * (0.2 - y.item()), abs=1e-7)


@pytest.mark.parametrize("name", SPACES)
def test_the_bound_holds_for_whatever_arrives(name):
    convert = ColourSpace(name)
    vicious = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -5.0, 0.3])
    x = torch.cartesian_prod(vicious, vicious, vicious)
    images = convert(one_pixel(x))
    assert torch.isfinite(images).all()
    assert images.flatten(1).norm(dim=1).max() <= convert.norm_bound(pixels=1)
    alone = torch.cat([convert(one_pixel(row[None])) for row in x])
    assert torch.equal(images, alone)  # every image by itself


def test_half_precision_is_computed_in_single():
    x = torch.rand(500, 3, 2, 2).half()
    for name in SPACES:
        converted = ColourSpace(name)(x)
        assert converted.dtype == torch.float32
        assert torch.equal(converted, ColourSpace(name)(x.float()))


def test_refusals():
    with pytest.raises(ValueError, match="no colour space 'lab'; there are grayscale, hsv"):
        ColourSpace("lab")
    with pytest.raises(ValueError, match=r"shape \(..., 3, height, width\), got \(2, 1, 4, 4\)"):
        ColourSpace("yuv")(torch.rand(2, 1, 4, 4))
    with pytest.raises(TypeError, match=r"divide bytes by 255"):
        ColourSpace("yuv")(torch.zeros(1, 3, 4, 4, dtype=torch.uint8))
