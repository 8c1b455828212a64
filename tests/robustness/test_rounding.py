"""What rounding can do to logits: never more than stated, in the arithmetic of the model."""

import copy
import math

import pytest
import torch
from torch import nn

from clipless import nn as lip
from clipless.bounds import Bound, Product, register, unregister
from clipless.robustness._network import read_network
from clipless.robustness._rounding import rounding_errors
from tests.robustness.networks import NETWORKS, inputs


@pytest.mark.parametrize("name", NETWORKS)
def test_errors_stay_below_their_bound(name):
    build, shape, scale = NETWORKS[name]
    model = build().eval()
    x = inputs(shape, scale, count=200)
    network = read_network(model, shape)
    norm = x.flatten(1).norm(dim=1).max().item()
    passed = network.forward(norm)
    after = None if network.guard is None else network.guard.node
    errors = rounding_errors(passed, network.traced.shapes, torch.float32, after=after)
    bound = errors[passed.output]
    if network.guard is not None:  # what happens before the guard counts in its own units
        source = network.guard.node.all_input_nodes[0]
        received = _received(network, x)
        least = received.flatten(1).norm(dim=1).min().item()
        radius = network.guard.radius
        stretch = radius / least if network.guard.sphere else 1.0
        bound += 2 * errors[source] * stretch * network.lipschitz
    exact = copy.deepcopy(model).double()(x.double())
    found = (model(x).double() - exact).flatten(1).norm(dim=1).max().item()
    assert 0 < found <= bound
    assert bound < 0.01
    assert math.isfinite(bound)


def _received(network, x):
    seen = []
    guard = network.model.get_submodule(network.guard.path)
    handle = guard.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    network.model(x)
    handle.remove()
    return seen[0]


def test_exact_operations_add_nothing():
    model = nn.Sequential(lip.BoundedInput(1.0), lip.GroupSort(2), nn.ReLU(), nn.Flatten())
    network = read_network(model, (4, 6))
    passed = network.forward(5.0)
    errors = rounding_errors(passed, network.traced.shapes, torch.float32)
    assert len(set(errors.values())) == 2  # the input's, and the guard's ever after


def test_long_sums():
    """Thousands of terms of one sign, nothing else: the affine layer's own roundings show."""
    model = nn.Sequential(lip.SpectralLinear(4096, 2, constraint="ball", norm=70.0))
    with torch.no_grad():
        model[0].weight.copy_(torch.rand(2, 4096))
    network = read_network(model, (4096,))
    x = torch.rand(20, 4096)
    passed = network.forward(x.norm(dim=1).max().item())
    bound = rounding_errors(passed, network.traced.shapes, torch.float32)[passed.output]
    exact = x.double() @ model[0].weight.detach().double().T
    found = (model(x).double() - exact).norm(dim=1).max().item()
    assert 0 < found <= bound


class _Dense(nn.Module):
    """A product with a constant matrix, by a user's own rule."""

    def __init__(self, matrix):
        super().__init__()
        self.register_buffer("matrix", matrix)

    def forward(self, x):
        return x @ self.matrix.T


@pytest.mark.parametrize("stated", ["product", "nothing"])
def test_products_of_fixed_matrices(stated):
    """Signs cancel in the result and not in the errors: the norm alone says too little of them."""
    size = 1024
    matrix = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0].float()
    lipschitz = 1.001
    roundings = Product(rank=size, terms=size) if stated == "product" else None

    @register(_Dense)
    def dense(site, x):
        return Bound(lipschitz, lipschitz * x.norm, roundings=roundings, rows_apart=True)

    try:
        model = nn.Sequential(_Dense(matrix))
        network = read_network(model, (size,))
        passed = network.forward(1.0)
        bound = rounding_errors(passed, network.traced.shapes, torch.float32)[passed.output]
    finally:
        unregister(_Dense)
    assert bound >= size * torch.finfo(torch.float32).eps / 2 * matrix.norm().item()


def test_a_rule_of_an_exact_operation_adds_nothing():
    class Reverse(nn.Module):
        def forward(self, x):
            return x.flip(1)

    @register(Reverse)
    def reverse(site, x):
        return Bound(lipschitz=1.0, output=x.norm, roundings=0, rows_apart=True)

    try:
        network = read_network(nn.Sequential(Reverse()), (6,))
        passed = network.forward(5.0)
        errors = rounding_errors(passed, network.traced.shapes, torch.float32)
    finally:
        unregister(Reverse)
    assert errors[passed.output] == 0
