"""The constant of the scattering transform: certified norms, singular values, and attacks."""

import pytest
import torch

from clipless import nn as lip
from clipless.nn.scattering._scattering import _product
from clipless.nn.scattering._wavelets import build_step, operator_norm_bound
from tests.nn.operators import jacobian_norm, norm_of

PADDINGS = ["zero", "symmetric"]
DOUBLE = {"dtype": torch.float64}


def linear_part(step, wavelets):
    """The linear map of a step on real images, real and imaginary parts side by side."""

    def apply(u):
        spectrum = torch.fft.fft2(u[:, 0]).unsqueeze(-3)
        parts = [(step.low_rows @ u[:, 0] @ step.low_columns.T).flatten(1)]
        for bank, t in zip(wavelets, step.subsampling, strict=True):
            y = torch.fft.ifft2(_product(spectrum, bank, t))
            parts += [y.real.flatten(1), y.imag.flatten(1)]
        return torch.cat(parts, dim=1)

    return apply


STEPS = [
    {"grid": (16, 16), "resolution": 0, "scales": range(2), "last_scale": 2, "angles": 4},
    {"grid": (12, 20), "resolution": 0, "scales": range(2), "last_scale": 2, "angles": 3},
    {"grid": (16, 16), "resolution": 0, "scales": (1,), "last_scale": 2, "angles": 8},
    {"grid": (24, 24), "resolution": 0, "scales": range(3), "last_scale": 3, "angles": 2},
    {"grid": (32, 32), "resolution": 1, "scales": (2,), "last_scale": 3, "angles": 4},
    {"grid": (16, 16), "resolution": 1, "scales": (), "last_scale": 2, "angles": 4},
    {"grid": (10, 14), "resolution": 0, "scales": (0,), "last_scale": 1, "angles": 1},
]


@pytest.mark.parametrize("options", STEPS, ids=str)
def test_the_certified_norm_of_a_step_is_its_largest_singular_value(options):
    """Fourier blocks against an SVD of the whole operator, subsampling and aliases included."""
    step = build_step(**options)
    shape = (1, *(size >> options["resolution"] for size in options["grid"]))
    exact = norm_of(linear_part(step, step.wavelets), shape)
    assert exact <= step.norm * (1 + 1e-12)
    assert exact >= step.norm * (1 - 2e-4)
    assert step.norm <= 1


@pytest.mark.parametrize("options", STEPS[:2], ids=str)
def test_the_norm_survives_rounding_of_the_filters(options):
    step = build_step(**options)
    rounded = [w.to(torch.complex64).to(torch.complex128) for w in step.wavelets]
    assert norm_of(linear_part(step, rounded), (1, *options["grid"])) <= 1


def test_without_subsampling_the_norm_is_the_littlewood_paley_sum():
    bands = [(1, torch.randn(3, 6, 6, dtype=torch.complex128)) for _ in range(2)]
    bands = [(1, torch.cat([b, b.flip(1, 2).roll((1, 1), (1, 2)).conj()])) for _, b in bands]
    littlewood_paley = sum(b.abs().square().sum(0) for _, b in bands)
    exact = littlewood_paley.max().sqrt().item()
    assert exact <= operator_norm_bound(bands, 1) <= exact * (1 + 1e-9)


def largest_growth(layer, *, size, steps, seed=0):
    """Gradient ascent on ||S x - S y|| / ||x - y||, from noise, flat images and lone pixels."""
    generator = torch.Generator().manual_seed(seed)
    x, d = (torch.randn(9, 1, size, size, generator=generator).double() for _ in range(2))
    x[:3] = 1 + 0.1 * x[:3]
    x[6:] = 0
    x[6:, :, 0, 0] = 1
    d[::3] = 0.5
    d[2::3] *= 1e-3
    moving = [x.requires_grad_(), d.requires_grad_()]
    optimizer = torch.optim.Adam(moving, lr=0.05)
    best = 0.0
    for _ in range(steps):
        gap = (layer(x + d) - layer(x)).flatten(1).norm(dim=1) / d.flatten(1).norm(dim=1)
        best = max(best, gap.max().item())
        optimizer.zero_grad()
        (-gap.sum()).backward()
        optimizer.step()
    return best


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({}, 0.87),
        ({"padding": "symmetric"}, 0.98),
        ({"order": 1, "angles": 4}, 0.87),
        ({"scales": 1, "padding": "symmetric"}, 0.98),
        ({"scales": 3, "angles": 4, "padding": "symmetric"}, 0.97),
    ],
    ids=str,
)
def test_no_pair_of_images_moves_apart(options, least):
    layer = lip.Scattering2d(8, **DOUBLE, **options)
    found = largest_growth(layer, size=8, steps=50)
    assert found <= layer.lipschitz <= 1
    assert found >= least, found


@pytest.mark.parametrize("padding", PADDINGS)
def test_the_jacobian_has_norm_at_most_one(padding):
    layer = lip.Scattering2d(8, angles=4, padding=padding, **DOUBLE)
    flat = torch.ones(1, 8, 8, dtype=torch.float64)
    lone = torch.zeros_like(flat)
    lone[0, 0, 0] = 1
    board = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64).repeat(4, 4)[None]
    images = [flat, 1e-9 * flat, lone, board, torch.randn(1, 8, 8, dtype=torch.float64), 0 * flat]
    found = [jacobian_norm(layer, image) for image in images]
    assert max(found) <= layer.lipschitz
    assert found[0] >= {"zero": 0.85, "symmetric": 0.97}[padding]


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-38, 1e-20, 1e-16, 1e-15, 1e-12, 1.0, 1e15])
def test_tiny_and_huge_images_in_single_precision(scale):
    """Moduli of denormal numbers are inexact: their derivative must not exceed one all the same."""
    layer = lip.Scattering2d(8, angles=2)
    image = torch.randn(1, 8, 8) * scale
    assert jacobian_norm(layer, image) <= 1 + 1e-5
    assert layer(image[None]).norm() <= image.norm() * (1 + 1e-5)


def test_zero_stays_zero():
    for padding in PADDINGS:
        layer = lip.Scattering2d(8, padding=padding)
        x = torch.zeros(1, 1, 8, 8, requires_grad=True)
        y = layer(x)
        assert torch.equal(y, torch.zeros_like(y))
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.isfinite(gradient).all()


def test_gradients_are_right():
    layer = lip.Scattering2d(4, scales=2, angles=2, **DOUBLE)
    x = torch.randn(1, 1, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, x)


@pytest.mark.parametrize("padding", PADDINGS)
def test_single_precision_is_close_to_double(padding):
    x = torch.rand(4, 3, 32, 32, dtype=torch.float64)
    exact = lip.Scattering2d(32, padding=padding, **DOUBLE)(x)
    single = lip.Scattering2d(32, padding=padding)(x.float())
    assert (single - exact).norm() <= 1e-6 * exact.norm()
