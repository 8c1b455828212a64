"""What compiled models keep, and that compilers of all kinds agree with eager mode."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from clipless import nn as lip
from tests.nn.saved import saved_tensors


def network(*, channels=8):
    return nn.Sequential(
        lip.BoundedInput(20.0),
        lip.SpectralConv2d(3, channels, 3, padding="same"),
        lip.GroupSort(2),
        lip.SpectralConv2d(channels, channels, 3, padding="same"),
        lip.MaxMin(),
        lip.ScaledL2NormPool2d(2),
        lip.SpectralConv2d(channels, channels, 3, padding="same"),
        lip.GroupSort(2),
        lip.ScaledGlobalL2NormPool2d(),
        lip.SpectralLinear(channels, 4),
    )


def gradients(model, call, x, cotangent):
    model.zero_grad()
    call(x).backward(cotangent)
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_compiled_layers_keep_nothing_but_their_outputs():
    """Left to themselves compilers keep squares, roots and marks of both members of a pair."""
    batch, channels, side = 6, 8, 16
    model = network(channels=channels)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)
    _, tensors = saved_tensors(compiled, torch.randn(batch, 3, side, side))
    image = batch * channels * side * side
    assert all(t.dtype == torch.float32 for t in tensors if t.numel() > batch * channels)
    floats = sum(t.untyped_storage().nbytes() for t in tensors if t.dtype == torch.float32) / 4
    # The input; two sorted images, the pooled one and its sorted image; weights and small things.
    expected = batch * 3 * side**2 + 2 * image + 2 * image // 4
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert floats <= expected + 2 * weights + batch * 64


def test_compiled_per_example_gradients():
    """Function transforms inside a compiled function."""
    model = network()
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    x = torch.randn(3, 3, 8, 8)

    def one(weights, example):
        return functional_call(model, weights, (example[None],)).square().sum()

    def together(weights, examples):
        return vmap(grad(one), in_dims=(None, 0))(weights, examples)

    torch._dynamo.reset()
    found = torch.compile(together, backend="eager")(parameters, x)
    for name, expected in together(parameters, x).items():
        torch.testing.assert_close(found[name], expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_agrees(layout, dynamic):
    model = network().to(memory_format=layout)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for batch in (4, 7):
        x = torch.randn(batch, 3, 16, 16).to(memory_format=layout)
        cotangent = torch.randn(batch, 4)
        torch.testing.assert_close(
            gradients(model, compiled, x, cotangent),
            gradients(model, model, x, cotangent),
            rtol=1e-4,
            atol=1e-5,
        )
