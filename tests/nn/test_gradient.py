"""Cotangent clipping: the identity forward, bounded and finite backward, per example."""

import math

import pytest
import torch
from torch.func import grad, vmap

from clipless.nn import ClipGradient


def backward(layer, cotangent):
    x = torch.randn_like(cotangent).requires_grad_()
    layer(x).backward(cotangent)
    return x.grad


def test_forward_is_the_identity():
    x = torch.randn(3, 4)
    assert torch.equal(ClipGradient(0.1)(x), x)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 3, 3)])
def test_every_example_is_clipped_on_its_own(shape):
    cotangent = torch.randn(5, *shape, dtype=torch.float64)
    cotangent[0] *= 1e-3
    cotangent[1] *= 1e6
    clipped = backward(ClipGradient(0.5), cotangent)
    norms, before = clipped.reshape(5, -1).norm(dim=1), cotangent.reshape(5, -1).norm(dim=1)
    torch.testing.assert_close(norms, before.clamp(max=0.5))
    small = before < 0.5
    assert small.any()
    assert torch.equal(clipped[small], cotangent[small])
    direction = (clipped * cotangent).reshape(5, -1).sum(dim=1)
    torch.testing.assert_close(direction, norms * before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-45])
def test_cotangents_that_are_not_finite_or_overflow_are_bounded(value, dtype):
    cotangent = torch.ones(3, 4, dtype=dtype)
    cotangent[1, 2] = value
    cotangent[2] = value
    clipped = backward(ClipGradient(1.0), cotangent)
    assert torch.isfinite(clipped).all()
    assert clipped.double().norm(dim=1).max() <= 1 + 1e-6
    assert clipped[0].norm().item() == pytest.approx(1.0)


def test_clipping_happens_before_the_division_by_the_batch_size():
    """min(L, C) / b, not min(L / b, C): the threshold is compared with one example's loss."""
    batch, threshold = 10, 0.3
    cotangent = torch.ones(batch, 1)  # every example's own loss has slope 1
    right = backward(ClipGradient(threshold, loss_scale=1 / batch), cotangent / batch)
    torch.testing.assert_close(right, torch.full_like(right, threshold / batch))
    wrong = backward(ClipGradient(threshold), cotangent / batch)
    torch.testing.assert_close(wrong, cotangent / batch)  # nothing was clipped at all


def test_works_under_vmap_and_grad():
    layer = ClipGradient(0.5)
    x = torch.randn(6, 3, dtype=torch.float64)
    per_example = vmap(grad(lambda row: 7 * layer(row[None]).sum()))(x)
    torch.testing.assert_close(per_example.norm(dim=1), torch.full((6,), 0.5, dtype=torch.float64))


def test_a_value_used_twice_is_clipped_after_its_cotangents_were_added():
    layer = ClipGradient(1.0)
    x = torch.ones(1, 1, requires_grad=True)
    clipped = layer(x)
    (5 * clipped + 5 * clipped).sum().backward()
    assert x.grad.item() == pytest.approx(1.0)


def test_an_empty_batch_passes():
    assert backward(ClipGradient(1.0), torch.zeros(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("name", ["norm", "loss_scale"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "1"])
def test_arguments_must_be_positive_numbers(name, value):
    with pytest.raises(ValueError, match=name):
        ClipGradient(**{"norm": 1.0, name: value})


def test_exports_to_the_identity_and_prints():
    assert type(ClipGradient(1.0).to_torch()) is torch.nn.Identity
    assert "norm=0.5" in repr(ClipGradient(0.5))
