"""Projection without a look at values: sound whatever arrives, and close to the set's border."""

import math

import pytest
import torch

from clipless.spectral import (
    EuclideanBall,
    Orthogonal,
    RowBall,
    SpectralBall,
    _projection,
    project_batched,
)
from clipless.spectral._batched_projection import _STEPS, project_matrices
from tests.spectral.test_bounds import CASES

KINDS = {False: Orthogonal, True: SpectralBall}
SHAPES = [(2, 32, 27), (1, 10, 128), (3, 64, 64), (1, 200, 150), (1, 1, 5), (1, 7, 1)]


def singular_values(matrix):
    return torch.linalg.svdvals(matrix.double())


def near_orthogonal(shape, *, move):
    """Semi-orthogonal matrices, moved by random ones of spectral norm about `move`."""
    count, rows, columns = shape
    flat = torch.linalg.qr(torch.randn(count, max(rows, columns), min(rows, columns)))[0]
    start = flat if rows > columns else flat.mT
    noise = torch.randn(shape) / (math.sqrt(rows) + math.sqrt(columns))
    return start + move * noise


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("radius", [1.0, 0.3, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_any_matrix_ends_inside(dtype, radius, clip):
    """Zeros, rank one, huge, tiny: all in one stack each, so that none can disturb another."""
    for scale in (1.0, 1e-30, 1e30, 1e-38):
        stacks = [(matrix * scale).to(dtype)[None] for _, matrix in CASES]
        for before, after in zip(
            stacks, project_matrices(stacks, [radius] * len(stacks), clip=clip), strict=True
        ):
            assert after.dtype == dtype
            assert after.shape == before.shape
            assert torch.isfinite(after).all()
            assert singular_values(after[0])[0].item() <= radius * (1 + 1e-13)
            assert KINDS[clip](radius).bound(after).item() <= radius


@pytest.mark.parametrize("move", [0.0, 0.01, 0.1, 0.5, 1.5])
def test_moved_weights_come_back(move):
    stacks = [near_orthogonal(shape, move=move) * 2 for shape in SHAPES]
    for stack in project_matrices(stacks, [2.0] * len(stacks), clip=False):
        values = singular_values(stack)
        assert values.max() <= 2.0
        assert values.min() >= 2.0 * (1 - 1e-5)


def test_singular_values_thirty_times_apart_are_reached():
    u, v = (torch.linalg.qr(torch.randn(64, 64))[0] for _ in range(2))
    matrix = (u * torch.linspace(1, 1 / 30, 64)) @ v
    (projected,) = project_matrices([matrix[None]], [1.0], clip=False)
    assert singular_values(projected).min() >= 1 - 1e-5


def test_a_rank_one_step_of_any_size_comes_back():
    matrix = torch.linalg.qr(torch.randn(128, 128))[0]
    u, v = torch.randn(128, 1), torch.randn(1, 128)
    moved = matrix + 3 * (u / u.norm()) @ (v / v.norm())
    (projected,) = project_matrices([moved[None]], [1.0], clip=False)
    assert singular_values(projected).max() <= 1
    assert singular_values(projected).min() >= 1 - 1e-5


@pytest.mark.parametrize("spread", [0.5, 1.0, 3.0])
def test_clipping_is_the_euclidean_projection(spread):
    stacks = [spread * near_orthogonal(shape, move=1.0) for shape in SHAPES]
    for before, after in zip(
        stacks, project_matrices(stacks, [1.0] * len(stacks), clip=True), strict=True
    ):
        u, s, v = torch.linalg.svd(before.double(), full_matrices=False)
        exact = (u * s.clamp(max=1.0)[:, None, :]) @ v
        assert (after.double() - exact).norm() <= 4e-3 * exact.norm()
        assert singular_values(after).max() <= 1


def test_clipping_leaves_members_alone():
    matrix = 0.5 * torch.linalg.qr(torch.randn(8, 8))[0]
    (projected,) = project_matrices([matrix[None]], [1.0], clip=True)
    torch.testing.assert_close(projected[0], matrix, rtol=0, atol=1e-7)


def test_stacks_of_all_sizes_do_not_disturb_each_other():
    stacks = [near_orthogonal(shape, move=0.3) for shape in SHAPES]
    stacks[1] = torch.full_like(stacks[1], math.nan)
    stacks[2] = stacks[2] * 1e25
    radii = [1.0, 2.0, 0.5, 3.0, 1.0, 1.0]
    together = project_matrices(stacks, radii, clip=False)
    for index, (stack, radius) in enumerate(zip(stacks, radii, strict=True)):
        (alone,) = project_matrices([stack], [radius], clip=False)
        torch.testing.assert_close(together[index], alone, equal_nan=True)
    assert torch.isnan(together[1]).all()
    assert Orthogonal(2.0).bound(together[1]).tolist() == [math.inf]


def test_soundness_does_not_rest_on_convergence(monkeypatch):
    """With every coefficient of the iteration wrong, weights still end inside their sets."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(10):
        wrong = [tuple((9 * torch.randn(3, generator=generator)).tolist()) for _ in _STEPS]
        monkeypatch.setattr("clipless.spectral._batched_projection._STEPS", wrong)
        monkeypatch.setattr("clipless.spectral._batched_projection._SHORT_STEPS", wrong[2:])
        for clip in (False, True):
            stacks = [near_orthogonal(shape, move=0.5) for shape in SHAPES]
            for stack in project_matrices(stacks, [1.0] * len(stacks), clip=clip):
                if torch.isfinite(stack).all():  # what overflows is refused by its certificate
                    assert singular_values(stack).max() <= 1
                else:
                    assert Orthogonal(1.0).bound(stack).max() == math.inf


def test_the_polynomials_map_their_interval_to_one():
    x = torch.linspace(1e-3, 1.0, 20001, dtype=torch.float64)
    y = torch.linspace(0.036, 1.96, 20001, dtype=torch.float64)
    for a, b, c in _STEPS:
        x = a * x + b * x**3 + c * x**5
    for a, b, c in _STEPS[2:]:
        y = a * y + b * y**3 + c * y**5
    assert (x - 1).abs().max() < 1e-6
    assert (y - 1).abs().max() < 1e-6


def test_weights_go_the_way_of_their_constraint(monkeypatch):
    """On devices where looking is costly, matrices go together and everything else alone."""
    monkeypatch.setattr(_projection, "may_look_at", lambda weights: False)
    weights = [
        torch.randn(2, 6, 4, 3),
        torch.randn(1, 8, 2, 3),
        torch.randn(1, 5, 5) * 4,
        torch.randn(1, 9) * 9,
        torch.randn(1, 4, 3) * 9,
    ]
    sets = [Orthogonal(1.0), Orthogonal(2.0, groups=2), SpectralBall(1.0), EuclideanBall(1.0)]
    sets.append(RowBall(1.0))
    for weight, constraint, projected in zip(
        weights, sets, project_batched(weights, sets), strict=True
    ):
        assert projected.shape == weight.shape
        assert (constraint.bound(projected) <= constraint.radius).all()
        assert (constraint.bound(projected) >= 0.99 * constraint.radius).all()
        torch.testing.assert_close(projected, constraint.project(weight))


def test_it_is_one_graph():
    stacks = [near_orthogonal(shape, move=0.3) for shape in SHAPES[:2]]

    def project(*weights):
        return project_matrices(list(weights), [1.0, 2.0], clip=True)

    torch._dynamo.reset()
    compiled = torch.compile(project, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*stacks), project(*stacks))
