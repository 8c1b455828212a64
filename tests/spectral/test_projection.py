"""Projections end inside their sets, rounding included, and close to where they should."""

import math

import pytest
import torch

from clipless.nn import SpectralLinear
from clipless.spectral import (
    ConvolutionBall,
    EuclideanBall,
    Orthogonal,
    RowBall,
    SpectralBall,
    orthogonalize,
)
from tests.spectral.test_bounds import CASES


def singular_values(matrix):
    return torch.linalg.svdvals(matrix.double())


@pytest.mark.parametrize("seed", range(3))
def test_a_moved_orthogonal_layer_comes_back(seed):
    torch.manual_seed(seed)
    layer = SpectralLinear(512, 512)
    with torch.no_grad():
        move = torch.randn(512, 512)
        layer.weight += 0.1 * layer.weight.norm() * move / move.norm()
    layer.project()
    values = singular_values(layer.weight)
    assert layer.certificate().bound <= 1 + 1e-5
    assert values[0] <= 1
    assert values[-1] >= 0.999


def test_a_rank_one_move_comes_back():
    """All of the step in one direction: one singular value of 3.3 among ones."""
    layer = SpectralLinear(128, 128)
    with torch.no_grad():
        u, v = torch.randn(128, 1), torch.randn(1, 128)
        layer.weight += 3 * (u / u.norm()) @ (v / v.norm())
    layer.project()
    values = singular_values(layer.weight)
    assert values[0] <= 1
    assert values[-1] >= 0.999


@pytest.mark.parametrize("radius", [1.0, 0.3, 5.0])
@pytest.mark.parametrize("kind", [Orthogonal, SpectralBall])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("name", "matrix"), CASES, ids=[name for name, _ in CASES])
def test_projection_ends_inside_for_any_matrix(name, matrix, dtype, kind, radius):
    for scale in (1.0, 1e-30, 1e30):
        constraint = kind(radius)
        projected = constraint.project((matrix * scale).to(dtype)[None])
        assert projected.dtype == dtype
        assert torch.isfinite(projected).all()
        assert singular_values(projected[0])[0].item() <= radius * (1 + 1e-13)
        assert constraint.bound(projected).item() <= radius


def test_spectral_ball_is_the_euclidean_projection():
    matrix = torch.randn(12, 20, dtype=torch.float64)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    expected = (u * s.clamp(max=1.5)) @ v
    projected = SpectralBall(1.5).project(matrix[None])[0]
    torch.testing.assert_close(projected, expected, rtol=1e-3, atol=1e-3)


def test_spectral_ball_leaves_members_alone():
    matrix = 0.5 * torch.linalg.qr(torch.randn(8, 8))[0]
    torch.testing.assert_close(SpectralBall(1.0).project(matrix[None])[0], matrix)


def test_groups_are_projected_apart():
    weights = torch.randn(1, 4, 3, 3, 3)
    weights[:, 2:] *= 100
    projected = Orthogonal(1.0, groups=2).project(weights)
    for part in projected[0].chunk(2):
        values = singular_values(part.flatten(1))
        assert values[0] <= 1
        assert values[-1] >= 0.999


def test_batched_projection_equals_one_by_one():
    weights = torch.randn(4, 16, 32)
    together = Orthogonal(1.0).project(weights)
    alone = torch.cat([Orthogonal(1.0).project(w[None]) for w in weights])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_warm_start_needs_few_steps():
    matrix = torch.linalg.qr(torch.randn(64, 64))[0]
    moved = matrix + 0.01 * torch.randn(64, 64) / 8
    assert singular_values(orthogonalize(moved, iterations=2))[-1] > 1 - 1e-5


def test_fixed_iterations_without_looking_stay_sound():
    """On a GPU convergence is not watched; the certificate must not depend on it."""
    matrix = torch.randn(64, 64) * torch.logspace(0, -6, 64)
    short = orthogonalize(matrix, iterations=1)
    bound = Orthogonal(1.0).bound(short[None]).item()
    assert bound >= singular_values(short)[0].item()
    assert singular_values(short)[-1] < 0.5


def test_convolution_ball_fills_what_reshaping_leaves():
    kernel = torch.randn(1, 8, 8, 3, 3)
    ball = ConvolutionBall(
        radius=1.0,
        groups=1,
        scale=1 / 3,
        multiplicity=9,
        input_size=(10, 10),
        dilation=(1, 1),
        circular=False,
        orthogonal=True,
    )
    projected = ball.project(kernel)
    assert 0.99 <= ball.bound(projected).item() <= 1
    reshaped = singular_values(projected[0].flatten(1))[0].item()
    assert reshaped > 1.2  # the reshaped-kernel certificate alone would have forbidden this


def test_euclidean_and_row_balls():
    for scale in (1e-30, 1.0, 1e30):
        vector = torch.randn(1, 50) * scale
        norm = EuclideanBall(2.0).project(vector).double().norm().item()
        assert norm <= 2.0
        assert norm == pytest.approx(min(2.0, vector.double().norm().item()), rel=1e-5)
        table = torch.randn(1, 7, 5) * scale
        rows = RowBall(0.5).project(table)[0].double().norm(dim=1)
        assert rows.max() <= 0.5
        assert RowBall(0.5).bound(table).item() >= table.double().norm(dim=2).max()
    assert EuclideanBall(1.0).bound(torch.tensor([[math.nan]])).item() == math.inf
