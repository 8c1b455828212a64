"""GPU kernels agree with torch's operators; without them, nothing else changes."""

import importlib

import pytest
import torch

from clipless import nn as lip
from clipless.kernels import WindowNorms, euclidean_norms
from clipless.kernels import _dispatch as _kernels
from clipless.kernels.layers import _row_scaling as _geometry
from clipless.kernels.layers import _sorting as _pairs
from tests.nn.saved import gradient, saved_bytes

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [(33, 3, 32, 32), (7, 10), (5, 1), (4, 16384), (3, 16385)]
IMAGES = [(64, 32, 32, 32), (3, 6, 13, 11), (4, 10, 1, 1), (2, 4, 1, 1030), (5, 8, 2, 2)]


@pytest.fixture
def fresh():
    _kernels._load.cache_clear()
    yield
    _kernels._load.cache_clear()


def test_the_cpu_has_none():
    assert _kernels.kernels_for(torch.zeros(2, 2)) is None


@pytest.mark.usefixtures("fresh")
def test_what_cannot_be_loaded_is_said_once(monkeypatch):
    def fail(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.warns(UserWarning, match="No module named 'triton'"):
        assert _kernels._load() is None
    assert _kernels._load() is None


def test_the_file_can_be_read_without_triton():
    assert importlib.import_module("clipless.kernels._triton").sort_pairs.__doc__


def images(shape, dtype, layout):
    x = (2 * torch.randn(shape, device="cuda")).round().div(2).to(dtype)
    return x.to(memory_format=layout)


@gpu
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", IMAGES, ids=str)
def test_sorting(shape, dtype, layout):
    x, cotangent = images(shape, dtype, layout), images(shape, dtype, layout)
    for layer in (lip.GroupSort(2), lip.MaxMin()):

        def plain(value, layer=layer):
            return _pairs._plain(value, 1, isinstance(layer, lip.MaxMin))

        assert torch.equal(layer(x), plain(x))
        assert layer(x).stride() == x.stride()
        assert torch.equal(gradient(layer, x, cotangent), gradient(plain, x, cotangent))
        assert saved_bytes(layer, x.requires_grad_()) == x.numel() // 2


@gpu
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", IMAGES[:2], ids=str)
@pytest.mark.parametrize("kernel", [(2, 2), (3, 2), (1, 3)], ids=str)
def test_pooling(shape, dtype, layout, kernel):
    norms = WindowNorms(kernel=kernel, stride=kernel, padding=(0, 0), multiplicity=1)
    x = images(shape, dtype, layout)
    x[0] = 0

    def by_kernel(value):
        return euclidean_norms(value, norms)

    result = by_kernel(x)
    cotangent = torch.randn_like(result)
    exact = norms.plain(x.double())
    slope = gradient(norms.plain, x.double(), cotangent.double())
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    assert (result.double() - exact).norm() <= tolerance * exact.norm()
    found = gradient(by_kernel, x, cotangent)
    assert (found.double() - slope).norm() <= tolerance * slope.norm()
    assert torch.equal(found[0], torch.zeros_like(found[0]))
    assert found.stride() == x.stride()


@gpu
@pytest.mark.parametrize("sphere", [False, True])
@pytest.mark.parametrize(
    "shape", [(33, 3, 32, 32), (7, 10), (5, 1), (4, 16384), (3, 16385)], ids=str
)
def test_guarding(shape, sphere):
    rows = torch.randn(shape, device="cuda")
    length = rows[0].norm()
    rows *= (torch.rand(shape[0], device="cuda") * 2).view(-1, *[1] * (len(shape) - 1))
    rows[0] *= 1e-3
    rows[1], rows[2] = 0, rows[2] * 1e30
    rows[-1].view(-1)[-1] = float("nan")
    if shape[0] > 4:
        rows[3], rows[4] = rows[3] * 1e-30, float("-inf")
    radius = float(length)
    found = _geometry.make_finite_and_bounded(rows, radius, sphere=sphere)
    finite = torch.nan_to_num(rows.double(), 0.0, 0.0, 0.0)
    expected = _geometry._scale(finite, radius, sphere=sphere)
    torch.testing.assert_close(found.double(), expected, rtol=3e-6, atol=1e-30)
    assert found.flatten(1).double().norm(dim=1).max() <= radius * (1 + 1e-6)
    if not sphere:  # bit for bit
        assert torch.equal(found[0], rows[0])


@gpu
def test_kernels_are_chosen_by_what_they_were_compiled_for():
    """A kernel for addresses and sizes that are multiples of 16 must not get others."""
    memory = torch.randn(4 * 64 * 64 + 8, device="cuda")
    for begin in (0, 1, 2, 4, 0, 3):
        for size in (64, 61, 64, 62, 16):
            x = memory[begin : begin + 4 * size * 64].view(4, 64, size)
            assert torch.equal(lip.GroupSort(2)(x), _pairs._plain(x, 1, False))
            rows = memory[begin : begin + size * 33].view(size, 33)
            guarded = _geometry.make_finite_and_bounded(rows, 3.0)
            torch.testing.assert_close(guarded, _geometry.scale_into_ball(rows, 3.0))


@gpu
def test_nothing_waits_for_the_gpu():
    model = torch.nn.Sequential(
        lip.BoundedInput(1.0),
        lip.SpectralConv2d(3, 4, 3),
        lip.GroupSort(2),
        lip.ScaledL2NormPool2d(2),
        torch.nn.Flatten(),
        lip.SpectralLinear(36, 4, constraint="ball"),
        lip.ClipGradient(1.0),
    ).cuda()
    x = torch.randn(5, 3, 8, 8, device="cuda")
    for _ in range(5):  # kernels are compiled, and the projection is recorded
        model(x).sum().backward()
        lip.project(model)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x).sum().backward()
        lip.project(model)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
def test_replayed_projections_follow_the_weights():
    layer = lip.SpectralLinear(8, 6).cuda()
    for _ in range(6):
        with torch.no_grad():
            layer.weight.add_(0.3 * torch.randn_like(layer.weight))
        version = layer.weight._version
        lip.project(layer)
        assert layer.weight._version > version
        assert layer.certificate().holds
        assert torch.linalg.svdvals(layer.weight.double())[-1] >= 1 - 1e-5
    layer.weight.data = torch.randn(6, 8, device="cuda")  # other memory
    lip.project(layer)
    assert layer.certificate().holds
