"""What compilers make of sorting and pooling, apart and joined."""

import math

import pytest
import torch
from torch import nn
from torch._dynamo import lookup_backend
from torch._dynamo.backends.common import aot_autograd

from clipless import nn as lip
from clipless.kernels.layers._compiler_operators import as_operators, join_sorted_norms
from clipless.privacy._precision import UNITS
from tests.nn.saved import gradient, saved_tensors

LAYOUTS = [torch.contiguous_format, torch.channels_last]
SORTED = [lip.GroupSort(2), lip.MaxMin()]


pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Joining:
    """A backend that joins what it can, and counts, graph by graph."""

    def __init__(self, backend="aot_eager_decomp_partition"):
        self.backend, self.counts = backend, []

    def __call__(self, module, examples):
        self.counts.append(join_sorted_norms(module.graph))
        module.recompile()
        return lookup_backend(self.backend)(module, examples)


def joined(model, *, times=1):
    """A compiled model in which that many sorts and norms are one."""
    backend = Joining()
    compiled = torch.compile(model, backend=backend, fullgraph=True)

    def run(x):
        with as_operators(True):
            result = compiled(x)
        assert set(backend.counts) == {times}
        return result

    return run


def images(shape, dtype=torch.float32, layout=torch.contiguous_format):
    """Values with many ties and zeros, and windows that are zero altogether."""
    x = (2 * torch.randn(shape)).round() / 2
    x[..., :2] = 0.0
    return x.to(dtype).to(memory_format=layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("order", SORTED, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [(8, 8), (7, 9)], ids=str)
def test_joined_layers_are_the_same(layout, order, dtype, size):
    model = nn.Sequential(order, lip.ScaledL2NormPool2d((2, 3)))
    x = images((3, 6, *size), dtype, layout)
    expected = model(x)
    cotangent = torch.randn_like(expected)
    one = joined(model)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(one(x), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(
        gradient(one, x, cotangent), gradient(model, x, cotangent), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1.0, 1e-12, 1e-19, 1e-38, 1e15])
def test_joined_layers_do_not_lengthen_cotangents(dtype, magnitude):
    """Whatever the values: next to zero, squares lose their bits."""
    model = nn.Sequential(lip.GroupSort(2), lip.ScaledL2NormPool2d(2))
    x = magnitude * torch.cat([images((64, 4, 4, 4)), torch.randn(512, 4, 4, 4)])
    x[0, 1:] = 0.0
    x[1] = x[1].abs().clamp(max=magnitude)
    x[2, 0], x[2, 1] = x[2, 1] * (1 + 1e-7), x[2, 1].clone()
    x = x.to(dtype)
    cotangent = torch.randn(576, 4, 2, 2)
    # Of one window alone nothing averages out.
    one_window = torch.eye(16).reshape(16, 4, 2, 2)
    cotangent[320:] *= one_window.repeat(16, 1, 1, 1)
    cotangent = cotangent.to(dtype)
    # What the plan pays for: two roundings of bfloat16.
    slack = 1 + 1e-6 if dtype == torch.float32 else (1 - UNITS["bfloat16"]) ** -2
    found = gradient(joined(model), x, cotangent).double().flatten(1).norm(dim=1)
    assert (found <= slack * cotangent.double().flatten(1).norm(dim=1)).all()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.Sequential(lip.GroupSort(2, dim=2), lip.ScaledL2NormPool2d(2)), "another axis"),
        (nn.Sequential(lip.GroupSort(2), lip.ScaledL2NormPool2d(3, stride=2)), "overlap"),
        (nn.Sequential(lip.GroupSort(2), lip.ScaledL2NormPool2d(2, padding=1)), "padding"),
        (nn.Sequential(lip.GroupSort(2), lip.ScaledL2NormPool1d(2)), "sequences"),
        (nn.Sequential(lip.GroupSort(4), lip.ScaledL2NormPool2d(2)), "larger groups"),
        (nn.Sequential(lip.GroupSort(2), lip.ScaledAvgPool2d(2)), "another pooling"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_joined_stays_right(model, why):
    x = images((2, 4, 8) if why == "sequences" else (2, 4, 8, 8))
    expected = model(x)
    cotangent = torch.randn_like(expected)
    one = joined(model, times=0)
    torch.testing.assert_close(one(x), expected)
    torch.testing.assert_close(gradient(one, x, cotangent), gradient(model, x, cotangent))


def test_sorted_values_with_another_use_are_not_lost():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.order, self.pool = lip.MaxMin(), lip.ScaledL2NormPool2d(2)

        def forward(self, x):
            ordered = self.order(x)
            return self.pool(ordered) + ordered[:, :, ::2, ::2]

    model, x = Both(), images((2, 4, 4, 4))
    torch.testing.assert_close(joined(model, times=0)(x), model(x))


def test_what_is_changed_after_it_was_sorted_does_not_matter():
    order, pool = lip.GroupSort(2), lip.ScaledL2NormPool2d(2)

    def model(x):
        y = 2 * x
        ordered = order(y)
        y += 1
        return pool(ordered)

    x = images((2, 4, 4, 4))
    torch.testing.assert_close(joined(model)(x), model(x))


@pytest.mark.parametrize("constant", ["sorted values", "norms"])
def test_gradients_that_were_stopped_stay_so(constant):
    order, pool = lip.GroupSort(2), lip.ScaledL2NormPool2d(2)

    def model(x):
        with torch.set_grad_enabled(constant == "norms"):
            ordered = order(x)
        with torch.set_grad_enabled(constant != "norms"):
            norms = pool(ordered)
        return norms + x[:, :, ::2, ::2]

    x, cotangent = images((2, 4, 4, 4)), torch.randn(2, 4, 2, 2)
    found = gradient(joined(model, times=0), x, cotangent)
    torch.testing.assert_close(found, gradient(model, x, cotangent))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_joined_layers_keep_their_input_and_the_norms(layout):
    """The convolution's result instead of the sorted one: no more than without joining."""
    batch, channels, side = 4, 8, 16
    model = nn.Sequential(
        lip.SpectralConv2d(3, channels, 3, padding=1), lip.GroupSort(2), lip.ScaledL2NormPool2d(2),
        lip.SpectralConv2d(channels, channels, 3, padding=1), lip.GroupSort(2),
        lip.ScaledL2NormPool2d(2),
    ).to(memory_format=layout)  # fmt: skip
    x = torch.randn(batch, 3, side, side).to(memory_format=layout)
    _, tensors = saved_tensors(joined(model, times=2), x)
    image = batch * channels * side * side
    kept = sum(t.untyped_storage().nbytes() for t in tensors) / 4
    # Two convolutions' results and the norms of each; the input; weights and small things.
    expected = image + 2 * image // 4 + image // 16 + x.numel()
    assert kept <= expected + sum(p.numel() for p in model.parameters()) + 64


@pytest.mark.parametrize(
    ("head", "layout", "copies"),
    [
        (nn.Flatten(), torch.contiguous_format, 0),
        (nn.Flatten(), torch.channels_last, 1),
        (nn.Sequential(lip.ScaledL2NormPool2d(4), nn.Flatten()), torch.channels_last, 0),
        (lip.ScaledGlobalAvgPool2d(), torch.channels_last, 0),
    ],
    ids=["flattened", "flattened from channels last", "to one pixel", "to a mean"],
)
def test_cotangents_in_another_layout_are_copied_first(head, layout, copies):
    """Once, by an operator of its own, and only if they lie in memory in another way."""
    model = nn.Sequential(
        lip.SpectralConv2d(3, 8, 3, padding=1), lip.GroupSort(2), lip.ScaledL2NormPool2d(2), head
    ).to(memory_format=layout)
    found = []

    def compile_backward(module, examples):
        targets = [str(node.target) for node in module.graph.nodes]
        found.append(sum("laid_out_like" in target for target in targets))
        return module.forward

    backend = aot_autograd(
        fw_compiler=lambda module, examples: module.forward, bw_compiler=compile_backward
    )
    x = torch.randn(3, 3, 8, 8).to(memory_format=layout)
    compiled = torch.compile(model, backend=backend)
    expected = model(x)
    cotangent = torch.randn_like(expected)
    with as_operators(True):
        output = compiled(x)
    slopes = torch.autograd.grad(output, list(model.parameters()), cotangent)
    assert found == [copies]
    wanted = torch.autograd.grad(expected, list(model.parameters()), cotangent)
    torch.testing.assert_close(slopes, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_consist_of_torch_s_operators(strict):
    model = nn.Sequential(lip.GroupSort(2), lip.ScaledL2NormPool2d(2))
    x = images((2, 4, 4, 4))
    program = torch.export.export(model, (x,), strict=strict)
    assert not any("clipless" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_agrees(layout, dynamic):
    model = nn.Sequential(
        lip.SpectralConv2d(3, 8, 3, padding=1, bias=True), lip.MaxMin(), lip.ScaledL2NormPool2d(2),
        lip.SpectralConv2d(8, 8, 3, padding=1), lip.GroupSort(2), lip.ScaledL2NormPool2d(3),
        nn.Flatten(), lip.SpectralLinear(8 * 4, 2),
    ).to(memory_format=layout)  # fmt: skip
    backend = Joining("inductor")
    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    for batch in (4, 7):
        x = torch.randn(batch, 3, 14, 14).to(memory_format=layout)
        cotangent = torch.randn(batch, 2) / math.sqrt(batch)
        with as_operators(True):
            output = compiled(x)
        found = torch.autograd.grad(output, list(model.parameters()), cotangent)
        expected = torch.autograd.grad(model(x), list(model.parameters()), cotangent)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert backend.counts == ([2] if dynamic else [2, 2])
