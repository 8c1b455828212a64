"""L2-norm pooling by hand: input and output are all it keeps; right at zero and in halves."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jacfwd, jacrev, vmap

from clipless import nn as lip
from clipless.kernels.layers import _memory as _parts
from tests.nn.operators import jacobian_norm
from tests.nn.saved import gradient, saved_bytes

POOLS = {
    "tiles": (lip.ScaledL2NormPool2d(2), (3, 4, 6, 8)),
    "tiles with a rest": (lip.ScaledL2NormPool2d((3, 2)), (3, 4, 7, 9)),
    "overlap": (lip.ScaledL2NormPool2d(3, 2), (2, 3, 7, 8)),
    "padding": (lip.ScaledL2NormPool2d(3, 1, 1), (2, 3, 5, 5)),
    "padded tiles": (lip.ScaledL2NormPool2d(2, 2, 1), (2, 3, 5, 6)),
    "sequence": (lip.ScaledL2NormPool1d(3), (2, 3, 10)),
    "overlapping sequence": (lip.ScaledL2NormPool1d(3, 1, 1), (2, 3, 8)),
    "one window": (lip.ScaledL2NormPool2d(4), (3, 4, 5, 5)),
    "one cell": (lip.ScaledL2NormPool2d(1), (2, 3, 4, 4)),
    "global": (lip.ScaledGlobalL2NormPool2d(), (3, 4, 5, 6)),
    "global sequence": (lip.ScaledGlobalL2NormPool1d(), (3, 4, 5)),
}


@pytest.fixture(params=list(POOLS))
def case(request):
    layer, shape = POOLS[request.param]
    return layer, torch.randn(shape, dtype=torch.float64)


def by_definition(layer, x):
    """Norms of unfolded windows, with autograd's own derivatives."""
    if not hasattr(layer, "kernel_size"):
        return torch.linalg.vector_norm(x.flatten(2), dim=-1)
    wide = x if x.ndim == 4 else x.unsqueeze(-2)
    one = (1,) * (2 - layer.axes)
    kernel, stride = (*one, *layer.kernel_size), (*one, *layer.stride)
    padding = (*(0,) * (2 - layer.axes), *layer.padding)
    batch, channels = wide.shape[:2]
    windows = torch.nn.functional.unfold(wide.flatten(0, 1)[:, None], kernel, 1, padding, stride)
    norms = torch.linalg.vector_norm(windows, dim=1) / math.sqrt(layer.multiplicity)
    return norms.reshape(batch, channels, *layer(x).shape[2:])


def test_values_and_gradients_follow_the_definition(case):
    layer, x = case
    value = by_definition(layer, x)
    torch.testing.assert_close(layer(x), value)
    cotangent = torch.randn_like(value)
    slope = gradient(lambda y: by_definition(layer, y), x, cotangent)
    torch.testing.assert_close(gradient(layer, x, cotangent), slope)


def test_derivatives_of_all_kinds(case):
    layer, x = case
    leaf = x.clone().requires_grad_()
    assert gradcheck(layer, leaf, check_batched_grad=True, check_forward_ad=True)
    assert gradgradcheck(layer, leaf[:1], check_batched_grad=True)
    torch.testing.assert_close(jacrev(layer)(x), jacfwd(layer)(x))
    single = vmap(grad(lambda row: (layer(row[None]) ** 2).sum()))(x)
    torch.testing.assert_close(
        single, gradient(lambda y: layer(y) ** 2, x, torch.ones_like(layer(x)))
    )


def test_input_and_output_are_all_that_is_kept(case):
    layer, x = case
    for dtype in (torch.float32, torch.bfloat16):
        assert saved_bytes(layer, x.to(dtype).requires_grad_()) == 0


def test_channels_last_stays(case):
    layer, x = case
    if x.ndim < 4:
        pytest.skip("not an image")
    last = x.to(memory_format=torch.channels_last)
    result = layer(last)
    torch.testing.assert_close(result, layer(x))
    cotangent = torch.randn_like(layer(x))
    slope = gradient(layer, last, cotangent)
    torch.testing.assert_close(slope, gradient(layer, x, cotangent))
    assert slope.stride() == last.stride()
    if result.ndim == 4:
        assert result.is_contiguous(memory_format=torch.channels_last)


def test_parts_of_tensors_and_expanded_cotangents(case):
    layer, x = case
    doubled = torch.stack([x, -x], dim=-1)
    result = layer(doubled[..., 0])
    torch.testing.assert_close(result, layer(x))
    ones = torch.ones((), dtype=torch.float64).expand(result.shape)
    leaf = doubled.clone().requires_grad_()
    layer(leaf[..., 0]).backward(ones)
    torch.testing.assert_close(leaf.grad[..., 0], gradient(layer, x, ones.contiguous()))


def test_a_batch_cut_into_parts(case, monkeypatch):
    layer, x = case
    cotangent = torch.randn_like(layer(x))
    value, slope = layer(x), gradient(layer, x, cotangent)
    monkeypatch.setattr(_parts, "GRAIN", 1)
    assert torch.equal(layer(x), value)
    assert torch.equal(gradient(layer, x, cotangent), slope)


def test_a_zero_patch_has_a_zero_gradient(case):
    layer, x = case
    zeros = torch.zeros_like(x)
    slope = gradient(layer, zeros, torch.randn_like(layer(x)))
    assert torch.equal(slope, zeros)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-7, 1e-5, 6e-5, 1e-4, 1e-2, 1.0, 100.0])
def test_halves_are_summed_in_float32(case, dtype, scale):
    """Squares in half precision would vanish below 1e-4 or overflow beyond 255."""
    layer, x = case
    x = (x * scale).to(dtype)
    cotangent = torch.randn_like(layer(x))
    norms = layer(x).double()
    exact = by_definition(layer, x.double())
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    smallest = 2 * torch.finfo(dtype).tiny
    assert ((norms - exact).abs() <= unit * exact + smallest).all()
    slope = gradient(layer, x, cotangent).double()
    assert torch.isfinite(slope).all()
    for example in range(len(x)):
        # Rounding of the norm, of the product, and of denormal entries of the gradient.
        limit = cotangent[example].double().norm() * (1 + 3 * unit) + 6e-8 * math.sqrt(x[0].numel())
        assert slope[example].norm() <= limit


def test_float32_jacobians_do_not_exceed_one(case):
    layer, x = case
    for scale in (1.0, 1e-10, 1e-15, 4e-16, 1e-16):
        example = (x[0] * scale).float()
        assert jacobian_norm(layer, example) <= 1 + 1e-5
        rows = torch.eye(layer(example[None]).numel())
        leaf = example[None].requires_grad_()
        by_hand = torch.stack(
            [torch.autograd.grad(layer(leaf).flatten(), leaf, row)[0].flatten() for row in rows]
        )
        assert torch.linalg.matrix_norm(by_hand.double(), ord=2) <= 1 + 1e-5


@pytest.mark.parametrize("name", ["tiles", "tiles with a rest", "padding", "sequence", "global"])
def test_compiled_layers_are_one_graph_with_the_same_gradients(name):
    layer, shape = POOLS[name]
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(shape)
    x[0] = 0
    cotangent = torch.randn_like(layer(x))
    torch.testing.assert_close(compiled(x), layer(x))
    torch.testing.assert_close(gradient(compiled, x, cotangent), gradient(layer, x, cotangent))
