"""Matrix certificates are never below the SVD, whatever the matrix, and tight where it matters."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clipless.spectral import gram_bound, residual_bound, spectral_norm_bound

BOUNDS = [spectral_norm_bound, gram_bound, residual_bound]


def adversarial_matrices():
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q = torch.linalg.qr(normal(40, 40))[0]
    spiked = 1e-6 * normal(30, 50)
    spiked[3, 7] = 1.0
    duplicate = normal(1, 60).repeat(20, 1) + 1e-9 * normal(20, 60)
    ill = q * torch.logspace(0, -15, 40, dtype=torch.float64)
    yield "gaussian", normal(20, 33)
    yield "tall", normal(70, 5)
    yield "row", normal(1, 9)
    yield "column", normal(9, 1)
    yield "scalar", normal(1, 1)
    yield "orthogonal", q
    yield "spiked", spiked
    yield "flat spectrum", q[:20]
    yield "near duplicates", duplicate
    yield "ill conditioned", ill
    yield "ones", torch.ones(17, 23, dtype=torch.float64)
    yield "zeros", torch.zeros(4, 6, dtype=torch.float64)
    yield "rank deficient projector", q[:, :39] @ q[:, :39].T


CASES = list(adversarial_matrices())


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30], ids=str)
@pytest.mark.parametrize(("name", "matrix"), CASES, ids=[name for name, _ in CASES])
def test_never_below_the_largest_singular_value(bound, scale, name, matrix):
    for dtype in (torch.float32, torch.float64):
        weights = (matrix * scale).to(dtype)
        top = torch.linalg.svdvals(weights.double())[0].item()
        # The SVD itself is rounded: it may come out a few units above the truth.
        assert bound(weights).item() >= top * (1 - 1e-14)


@pytest.mark.parametrize(("name", "matrix"), CASES, ids=[name for name, _ in CASES])
def test_gram_iteration_is_within_its_stated_factor(name, matrix):
    top = torch.linalg.svdvals(matrix)[0].item()
    for iterations in (0, 3, 10):
        factor = min(matrix.shape) ** (0.5 ** (iterations + 2))
        assert gram_bound(matrix, iterations=iterations).item() <= top * factor * (1 + 1e-9)


def test_residual_bound_is_tight_and_scales_for_orthogonal_matrices():
    q = torch.linalg.qr(torch.randn(128, 128, dtype=torch.float64))[0]
    for scale in (1.0, 0.999, 7.0):
        assert residual_bound(scale * q).item() == pytest.approx(scale, rel=1e-6)
    # The textbook form sqrt(1 + ||W W^T - I||_F) is 1 % off for the same matrix times 0.999.
    deviation = torch.linalg.matrix_norm((0.999 * q) @ (0.999 * q).T - torch.eye(128))
    assert math.sqrt(1 + deviation) > 1.01


def test_residual_bound_never_exceeds_the_textbook_form():
    for _, matrix in CASES:
        small = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
        identity = torch.eye(small.shape[0], dtype=torch.float64)
        textbook = math.sqrt(1 + torch.linalg.matrix_norm(small @ small.T - identity).item())
        assert residual_bound(matrix).item() <= textbook * (1 + 1e-9)


def test_power_iteration_would_have_been_too_low():
    """The reason for certificates: an iterate started badly under-estimates by 10 times."""
    matrix = torch.diag(torch.tensor([1.0, 0.05], dtype=torch.float64))
    vector = torch.tensor([1e-9, 1.0], dtype=torch.float64)
    for _ in range(3):
        vector = matrix.T @ (matrix @ vector)
        vector = vector / vector.norm()
    assert (matrix @ vector).norm() < 0.1
    assert spectral_norm_bound(matrix) >= 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_weights_have_no_finite_certificate(value):
    matrix = torch.ones(3, 4)
    matrix[1, 2] = value
    for bound in BOUNDS:
        assert bound(matrix).item() == math.inf


def test_batches_are_bounded_one_by_one():
    matrices = torch.randn(5, 6, 8) * torch.logspace(-3, 3, 5)[:, None, None]
    together = spectral_norm_bound(matrices)
    alone = torch.stack([spectral_norm_bound(m) for m in matrices])
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=0)


def test_complex_matrices():
    matrix = torch.randn(6, 9, dtype=torch.complex128)
    top = torch.linalg.svdvals(matrix)[0].item()
    assert top <= gram_bound(matrix).item() <= top * 1.01


@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 12),
    exponent=st.integers(-100, 100),
    seed=st.integers(0, 10**6),
)
def test_any_small_matrix(rows, columns, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    matrix = torch.ldexp(matrix, torch.tensor(exponent))
    top = torch.linalg.svdvals(matrix)[0].item()
    for bound in BOUNDS:
        assert bound(matrix).item() >= top * (1 - 1e-14)
