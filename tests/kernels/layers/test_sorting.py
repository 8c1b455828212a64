"""GroupSort2 and MaxMin by hand: a permutation, kept as one byte a pair, wherever it is run."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jacfwd, jacrev, vmap

from clipless import nn as lip
from clipless.kernels.layers import _memory as _parts
from clipless.kernels.layers import _sorting as _pairs
from tests.nn.saved import gradient, saved_bytes

LAYERS = [lip.GroupSort(2), lip.MaxMin(), lip.GroupSort(2, dim=-1), lip.MaxMin(dim=-2)]
SHAPES = [(5, 6), (3, 4, 6), (2, 6, 4, 8), (3, 2, 2, 2), (2, 8, 2, 1)]


def inputs(shape, dtype=torch.float64):
    """Values with many ties, zeros of both signs among them."""
    x = (2 * torch.randn(shape)).round() / 2
    return (x * torch.where(torch.rand(shape) < 0.5, -1.0, 1.0)).to(dtype)


def expected(layer, x, cotangent):
    """Value and gradient by torch's own sort, whose ties stay in place: stable, as ours."""
    leaf = x.detach().double().requires_grad_()
    dim = layer.dim % x.ndim
    pairs = leaf.unflatten(dim, (-1, 2))
    descending = isinstance(layer, lip.MaxMin)
    value = pairs.sort(dim=dim + 1, descending=descending, stable=True).values.flatten(dim, dim + 1)
    value.backward(cotangent.double())
    return value.detach(), leaf.grad


@pytest.mark.parametrize("layer", LAYERS, ids=repr)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_and_gradients_are_those_of_a_stable_sort(layer, shape, dtype):
    if layer.dim % len(shape) == 0 or shape[layer.dim] % 2:
        pytest.skip("no pairs of channels along this axis")
    x, cotangent = inputs(shape, dtype), torch.randn(shape).to(dtype)
    value, slope = expected(layer, x, cotangent)
    assert torch.equal(layer(x).double(), value)
    assert torch.equal(layer(x.requires_grad_()).double(), value)
    assert torch.equal(gradient(layer, x, cotangent).double(), slope)


@pytest.mark.parametrize("layer", LAYERS, ids=repr)
def test_plain_operators_do_the_same(layer):
    """What compilers and tracers see: equal bit for bit, ties included."""
    descending = isinstance(layer, lip.MaxMin)
    x, cotangent = inputs((3, 4, 6, 2)), torch.randn(3, 4, 6, 2, dtype=torch.float64)

    def plain(value):
        return _pairs._plain(value, layer.dim, descending)

    assert torch.equal(layer(x), plain(x))
    assert torch.equal(gradient(layer, x, cotangent), gradient(plain, x, cotangent))


def test_at_ties_the_jacobian_is_a_permutation():
    x = torch.ones(1, 6, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lip.GroupSort(2), x).reshape(6, 6)
    assert torch.equal(jacobian, torch.eye(6, dtype=torch.float64))


def test_derivatives_of_all_kinds():
    x = torch.randn(3, 6, 4, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    assert gradcheck(lip.GroupSort(2), leaf, check_batched_grad=True, check_forward_ad=True)
    assert gradgradcheck(lip.MaxMin(dim=-1), leaf, check_batched_grad=True)
    assert torch.equal(jacrev(lip.MaxMin())(x), jacfwd(lip.MaxMin())(x))
    one = vmap(grad(lambda row: (lip.GroupSort(2)(row[None]) ** 3).sum()))(x)
    torch.testing.assert_close(one, 3 * x**2)


def test_a_penalty_on_the_gradient_can_be_differentiated():
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad((lip.GroupSort(2)(x) ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), x)
    torch.testing.assert_close(second, 36 * x.detach() ** 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 6), (2, 8, 5, 7)], ids=str)
def test_only_one_byte_a_pair_is_kept(shape, dtype):
    x = torch.randn(shape).to(dtype).requires_grad_()
    assert saved_bytes(lip.GroupSort(2), x) == x.numel() // 2
    with torch.no_grad():
        assert saved_bytes(lip.GroupSort(2), x) == 0


def test_the_input_is_released():
    x = torch.randn(2, 4, requires_grad=True)
    hidden = x * 1.0
    result = lip.GroupSort(2)(hidden)
    hidden.zero_()  # nothing that the backward pass needs
    result.sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 4))


def layouts():
    x = torch.randn(4, 6, 5, 3, dtype=torch.float64)
    yield "channels last", x.to(memory_format=torch.channels_last), True
    yield "contiguous", x, True
    yield "part", torch.randn(4, 6, 5, 9, dtype=torch.float64)[..., ::3], False
    yield "permuted", x.transpose(0, 1).contiguous().transpose(0, 1), False
    yield "expanded", x[:, :, :1, :1].expand(4, 6, 5, 3), False


LAYOUTS = list(layouts())


@pytest.mark.parametrize(("name", "x", "kept"), LAYOUTS, ids=[name for name, *_ in LAYOUTS])
@pytest.mark.parametrize("other", [0, 1, 2, 3, 4], ids=[name for name, *_ in LAYOUTS])
def test_any_layout_of_values_and_cotangents(name, x, kept, other):
    cotangent = LAYOUTS[other][1]
    value, slope = expected(lip.GroupSort(2), x.contiguous(), cotangent.contiguous())
    leaf = x.detach().requires_grad_()
    result = lip.GroupSort(2)(leaf)
    result.backward(cotangent)
    assert torch.equal(result, value)
    assert torch.equal(leaf.grad, slope)
    if kept:
        assert result.stride() == x.stride()


def test_parts_that_do_not_divide_the_batch(monkeypatch):
    """On the CPU the work is cut into parts that fit into the cache."""
    monkeypatch.setattr(_parts, "GRAIN", 40)
    layer, x, cotangent = lip.MaxMin(), inputs((7, 6, 5)), torch.randn(7, 6, 5, dtype=torch.float64)
    value, slope = expected(layer, x, cotangent)
    assert torch.equal(layer(x), value)
    assert torch.equal(gradient(layer, x, cotangent), slope)


def test_infinite_and_missing_cotangents_stay_where_they_belong():
    x = torch.tensor([[2.0, 1.0, 3.0, 4.0]])
    cotangent = torch.tensor([[float("inf"), 1.0, float("nan"), -0.0]])
    assert gradient(lip.GroupSort(2), x, cotangent)[:, :2].tolist() == [[1.0, float("inf")]]
    slope = gradient(lip.GroupSort(2), x, cotangent)
    assert torch.isnan(slope).tolist() == [[False, False, True, False]]


@pytest.mark.parametrize("layer", LAYERS[:2], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_compiled_layers_are_one_graph_with_the_same_gradients(layer, dtype):
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.round(torch.randn(3, 6, 4)).to(dtype)
    cotangent = torch.randn(3, 6, 4).to(dtype)
    assert torch.equal(compiled(x), layer(x))
    assert torch.equal(gradient(compiled, x, cotangent), gradient(layer, x, cotangent))


@pytest.mark.parametrize("layer", LAYERS[:2], ids=repr)
def test_compiled_training_changes_sorted_values_by_their_last_bit_at_most(layer):
    """Which is where the marks of swapped pairs are kept: they are within one unit of the value."""
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = (torch.randn(64, 6, 9) * 10.0 ** torch.randint(-30, 30, (64, 6, 9))).requires_grad_()
    with torch.no_grad():
        x[0], x[1] = 0.0, -0.0
    values, tagged = layer(x).detach(), compiled(x).detach()
    assert not torch.equal(values, tagged)
    units = torch.nextafter(values.abs(), torch.tensor(torch.inf)) - values.abs()
    assert ((values - tagged).abs() <= units).all()
