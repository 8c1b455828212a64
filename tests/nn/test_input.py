"""The input guard: whatever arrives, what leaves is finite and of bounded norm."""

import itertools
import math

import pytest
import torch

from clipless.nn import BoundedInput
from tests.nn.operators import jacobian_norm

MODES = ["clip", "sphere"]
FLOATS = [torch.float32, torch.float64]
SLACK = {torch.float32: 1e-6, torch.float64: 1e-14, torch.float16: 2e-2, torch.bfloat16: 2e-2}


def vicious_rows(dtype):
    """Examples of four entries: not finite, huge, tiny, denormal, mixed."""
    info = torch.finfo(dtype)
    specials = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -3.0]
    sizes = [info.max, -info.max, info.max / 3, info.tiny, info.tiny / 3, info.smallest_normal]
    sizes += [info.tiny * info.eps, info.eps, 1 / info.eps, 1e-5, 1e-3]
    rows = [[value] * 4 for value in specials + sizes]
    rows += [list(pair) * 2 for pair in itertools.combinations(specials + sizes, 2)]
    return torch.tensor(rows, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("norm", [1e-6, 0.3, 1.0, 20.0, 1e6])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", MODES)
def test_whatever_arrives_leaves_finite_and_bounded(mode, dtype, norm):
    x = vicious_rows(dtype)
    bounded = BoundedInput(norm, mode)(x)
    assert bounded.dtype == dtype
    broken = ~torch.isfinite(bounded).all(dim=1)
    assert not broken.any(), f"not finite for {x[broken][:3].tolist()}"
    norms = bounded.double().norm(dim=1)
    assert norms.max() <= norm * (1 + SLACK[dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_half_precisions_leave_finite_and_bounded(mode, dtype):
    x = vicious_rows(dtype)
    for norm in (0.3, 1.0, 20.0):
        bounded = BoundedInput(norm, mode)(x)
        broken = ~torch.isfinite(bounded).all(dim=1)
        assert not broken.any(), f"not finite for {x[broken][:3].tolist()}"
        assert bounded.double().norm(dim=1).max() <= norm * (1 + SLACK[dtype])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_behind_the_guard_are_finite(mode, dtype):
    """A weight sees the guarded values: its gradient is bounded for every record."""
    x = vicious_rows(dtype)
    for row in x:
        weight = torch.ones(4, dtype=dtype, requires_grad=True)
        (BoundedInput(1.0, mode)(row[None]) * weight).sum().backward()
        assert weight.grad.double().norm() <= 1 + SLACK[dtype], row.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_examples_stay_apart(mode):
    layer = BoundedInput(1.0, mode)
    x = torch.randn(3, 2, 4)
    bad = x.clone()
    bad[1] = math.nan
    bad[2] = math.inf
    assert torch.equal(layer(bad)[0], layer(x)[0])
    assert torch.equal(layer(x)[0], layer(x[:1])[0])
    assert torch.equal(layer(bad)[1], torch.zeros(2, 4))


@pytest.mark.parametrize("dtype", FLOATS)
def test_clip_leaves_the_ball_alone(dtype):
    x = torch.randn(50, 7, dtype=dtype)
    x = 0.99 * x / x.norm(dim=1, keepdim=True) * torch.rand(50, 1, dtype=dtype)
    torch.testing.assert_close(BoundedInput(1.0)(x), x, rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_sphere_reaches_the_norm_from_any_size(dtype):
    info = torch.finfo(dtype)
    for scale in (info.smallest_normal, info.eps, 1.0, info.max / 8):
        x = torch.tensor([[1.0, -2.0, 2.0]], dtype=dtype) * scale
        result = BoundedInput(3.0, "sphere")(x)
        torch.testing.assert_close(result, torch.tensor([[1.0, -2.0, 2.0]], dtype=dtype))
    assert torch.equal(BoundedInput(3.0, "sphere")(0 * x), torch.zeros_like(x))


@pytest.mark.parametrize("scale", [0.0, 1e-300, 1e-3, 0.5, 1.0, 1 + 1e-15, 1.5, 1e100, 1e300])
def test_clip_has_a_jacobian_of_at_most_one(scale):
    unit = torch.tensor([0.6, 0.0, -0.8], dtype=torch.float64)
    assert jacobian_norm(BoundedInput(1.0), unit * scale) <= 1 + 1e-9


def test_clip_is_the_projection_onto_the_ball():
    x = torch.tensor([[3.0, 4.0], [0.3, math.nan]])
    torch.testing.assert_close(BoundedInput(1.0)(x), torch.tensor([[0.6, 0.8], [0.3, 0.0]]))


def test_any_shape_and_an_empty_batch():
    for mode in MODES:
        layer = BoundedInput(2.0, mode)
        assert layer(torch.full((3, 2, 4, 4), 9.0)).flatten(1).norm(dim=1).tolist() == (
            pytest.approx([2.0] * 3)
        )
        assert layer(torch.zeros(0, 2, 4)).shape == (0, 2, 4)


def test_integer_images_are_accepted():
    x = torch.tensor([[255, 0], [3, 4]], dtype=torch.uint8)
    torch.testing.assert_close(BoundedInput(5.0)(x), torch.tensor([[5.0, 0.0], [3.0, 4.0]]))


@pytest.mark.parametrize("norm", [0, -1, math.nan, math.inf, True, "1", None])
def test_the_norm_must_be_a_positive_number(norm):
    with pytest.raises(ValueError, match="norm"):
        BoundedInput(norm)


def test_the_mode_must_be_known():
    with pytest.raises(ValueError, match='"clip" or "sphere"'):
        BoundedInput(1.0, "box")


def test_no_parameters_and_printed_form():
    assert not BoundedInput(1.0).state_dict()
    assert repr(BoundedInput(2, "sphere")) == "BoundedInput(norm=2, mode='sphere')"
