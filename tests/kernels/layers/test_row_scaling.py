"""Scaling into a ball and to a sphere: exact in long sums too, and nothing kept but the input."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, vmap

from clipless import nn as lip
from clipless.kernels import scale_into_ball
from clipless.kernels.layers._row_scaling import scale_to_sphere
from tests.nn.saved import gradient, saved_bytes

MAPS = {"ball": scale_into_ball, "sphere": scale_to_sphere}
SHAPES = [(6,), (6, 4), (6, 2, 3), (6, 2, 3, 2)]


@pytest.fixture(params=list(MAPS))
def scale(request):
    return MAPS[request.param]


def rows(shape, dtype=torch.float64):
    """Some examples inside a ball of radius two, some outside."""
    x = torch.randn(shape, dtype=torch.float64)
    sizes = torch.tensor([0.1, 0.5, 3.0, 10.0, 50.0, 0.9], dtype=torch.float64)
    norms = x.reshape(6, -1).norm(dim=1)
    return (x * (sizes / norms).reshape(-1, *([1] * (x.ndim - 1)))).to(dtype)


def by_definition(scale, x, radius):
    norm = x.reshape(len(x), -1).norm(dim=1)
    factor = radius / norm if scale is scale_to_sphere else (radius / norm).clamp(max=1.0)
    return x * factor.reshape(-1, *([1] * (x.ndim - 1)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_follow_the_definition(scale, shape):
    x, cotangent = rows(shape), torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(scale(x, 2.0), by_definition(scale, x, 2.0))
    torch.testing.assert_close(
        gradient(lambda y: scale(y, 2.0), x, cotangent),
        gradient(lambda y: by_definition(scale, y, 2.0), x, cotangent),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_derivatives_of_all_kinds(scale, shape):
    x = rows(shape)

    def function(y):
        return scale(y, 2.0)

    leaf = x.clone().requires_grad_()
    assert gradcheck(function, leaf, check_batched_grad=True, check_forward_ad=True)
    assert gradgradcheck(function, leaf, check_batched_grad=True)
    single = vmap(grad(lambda row: (function(row[None]) * row).sum()))(x)
    together = gradient(lambda y: function(y) * y, x, torch.ones_like(x))
    torch.testing.assert_close(single, together)


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_the_input_is_all_that_is_kept(scale, shape):
    x = rows(shape, torch.float32).requires_grad_()
    assert saved_bytes(lambda y: scale(y, 2.0), x) == 0
    with torch.no_grad():
        assert saved_bytes(lambda y: scale(y, 2.0), x) == 0


def test_guards_of_data_keep_nothing():
    for mode in ("clip", "sphere"):
        assert saved_bytes(lip.BoundedInput(1.0, mode), torch.randn(4, 3, 5, 5)) == 0
    assert saved_bytes(lip.ClipGradient(1.0), torch.randn(4, 9, requires_grad=True)) == 0


def test_channels_last_stays(scale):
    x = torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last)
    result = scale(x, 2.0)
    assert result.stride() == x.stride()
    torch.testing.assert_close(result, scale(x.contiguous(), 2.0))
    assert gradient(lambda y: scale(y, 2.0), x, torch.randn(4, 3, 5, 6)).stride() == x.stride()


def test_long_sums_lose_no_digits(scale):
    """Torch's own norm on the CPU is off by 1e-4 here, and examples would leave the ball by it."""
    x = torch.full((2, 3, 224, 224), 0.7)
    norms = scale(x, 1.0).double().flatten(1).norm(dim=1)
    assert (norms - 1).abs().max() <= 2e-6
    assert lip.BoundedInput(1.0)(x).double().flatten(1).norm(dim=1).max() <= 1 + 2e-6


def test_members_are_returned_bit_for_bit():
    x = torch.tensor([[0.1, -0.0, 1e-45, 0.3], [1e-30, 3e-39, -0.2, 0.0]])
    result = scale_into_ball(x, 1.0)
    assert torch.equal(result.view(torch.int32), x.view(torch.int32))
    assert torch.equal(scale_into_ball(x.requires_grad_(), 1.0), x)


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-30, 1e30, 3e38, math.inf, math.nan])
def test_gradients_of_the_ball_are_finite_for_finite_examples(value):
    x = torch.full((2, 4), value)
    x[1] = 1.0
    slope = gradient(lambda y: scale_into_ball(y, 1.0), x, torch.ones(2, 4))
    assert torch.isfinite(slope[1]).all()
    if math.isfinite(value):
        assert torch.isfinite(slope).all()
        assert slope.double().norm(dim=1).max() <= 2 + 1e-6


def test_what_follows_may_work_in_place(scale):
    x = rows((6, 4)).requires_grad_()
    scale(x, 2.0).relu_().sum().backward()
    assert torch.isfinite(x.grad).all()


def test_compiled_guards_are_one_graph(scale):
    def function(y):
        return scale(y, 2.0)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    x, cotangent = rows((6, 2, 3)), torch.randn(6, 2, 3, dtype=torch.float64)
    torch.testing.assert_close(compiled(x), function(x))
    torch.testing.assert_close(gradient(compiled, x, cotangent), gradient(function, x, cotangent))


HALVES = (torch.float16, torch.bfloat16)


def exact_norms(x):
    return x.double().flatten(1).norm(dim=1)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("entries", [1, 2, 3, 17, 400])
def test_half_precision_rows_end_inside_the_ball(scale, dtype, entries):
    """Measured in float64; bfloat16 arithmetic let norms of 1.009 through."""
    torch.manual_seed(entries)
    sizes = 10 ** torch.empty(20_000, 1).uniform_(-3, 3)
    drawn = (torch.randn(20_000, entries) * sizes).to(dtype)
    for radius in (1e-3, 0.37, 1.0, 3.0):
        scaled = scale(drawn, radius)
        assert scaled.dtype == dtype
        norms = exact_norms(scaled)
        assert float(norms.max()) <= radius * (1 + 1e-6)
        outside = exact_norms(drawn) > 2 * radius
        rounding = 4 * torch.finfo(dtype).eps + 4e-8 * math.sqrt(entries) / radius
        assert float(norms[outside].min()) >= radius * (1 - rounding)
        if scale is scale_into_ball:
            inside = exact_norms(drawn) < radius * (1 - 1e-6)
            torch.testing.assert_close(scaled[inside], drawn[inside], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("mode", ["clip", "sphere"])
def test_half_precision_rows_behind_the_guard(dtype, mode):
    """Shapes of all kinds; rows at the end of the range, rows with NaN; mapped by vmap."""
    torch.manual_seed(0)
    guard = lip.BoundedInput(0.7, mode)
    for shape in ((500, 5), (500, 2, 3), (500, 3, 4, 4), (500,)):
        x = (torch.randn(shape) * 5).to(dtype)
        x[0], x[1], x[2], x[3] = torch.finfo(dtype).max, math.nan, math.inf, 0.0
        for result in (guard(x), vmap(lambda row: guard(row[None])[0])(x)):
            assert result.dtype == dtype
            assert torch.isfinite(result).all()
            norms = exact_norms(result.reshape(len(result), -1))
            assert float(norms.max()) <= 0.7 * (1 + 1e-6)
    far = lip.BoundedInput(1e6, "sphere")(torch.ones(3, 1, dtype=torch.float16))
    assert torch.isfinite(far).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_cotangents_end_inside_the_ball(dtype):
    torch.manual_seed(0)
    x = torch.randn(5000, 7).to(dtype).requires_grad_()
    (cotangent,) = torch.autograd.grad(
        lip.ClipGradient(0.3)(x), x, (torch.randn(5000, 7) * 9).to(dtype)
    )
    assert float(exact_norms(cotangent).max()) <= 0.3 * (1 + 1e-6)
