"""What all layers share: names, copies, compilation, whole-model projection and certificates."""

import copy
import io

import pytest
import torch
from torch import nn

import clipless.nn as lip
from clipless.errors import CliplessError, ConstraintError
from clipless.spectral import Certificate, EuclideanBall
from tests.nn.operators import singular_values
from tests.nn.test_export import LAYERS, classifier, randomise

CONSTRAINED = {
    "SpectralLinear": lambda **k: lip.SpectralLinear(6, 4, bias=True, **k),
    "ball": lambda **k: lip.SpectralLinear(6, 4, constraint="ball", **k),
    "FrobeniusLinear": lambda **k: lip.FrobeniusLinear(6, 4, **k),
    "SpectralConv1d": lambda **k: lip.SpectralConv1d(6, 4, 3, **k),
    "SpectralConv2d": lambda **k: lip.SpectralConv2d(6, 4, 3, bias=True, **k),
    "certified": lambda **k: lip.SpectralConv2d(6, 4, 3, certificate_size=5, **k),
    "Embedding": lambda **k: lip.Embedding(6, 4, **k),
}


@pytest.mark.parametrize("name", list(LAYERS))
def test_copies_are_independent_and_equal(name):
    build, shape = LAYERS[name]
    layer = randomise(build())
    twin = copy.deepcopy(layer)
    x = torch.randn(3, *shape)
    assert torch.equal(twin(x), layer(x))
    assert list(twin.state_dict()) == list(layer.state_dict())
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert all(p.abs().sum() > 0 for p in layer.parameters())


@pytest.mark.parametrize("name", list(LAYERS))
def test_layers_can_be_pickled(name):
    build, shape = LAYERS[name]
    layer = randomise(build())
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    x = torch.randn(3, *shape)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), layer(x))


def test_state_dict_keys_are_plain():
    plain = {"weight", "bias", "angles"}
    for build, _ in LAYERS.values():
        assert {key.rsplit(".", 1)[-1] for key in build().state_dict()} <= plain
    assert list(classifier().state_dict()) == [
        "1.weight",
        "1.bias",
        "3.block.0.weight",
        "3.block.1.angles",
        "8.weight",
    ]


@pytest.mark.parametrize("name", list(LAYERS))
def test_layers_compile_as_one_graph(name):
    build, shape = LAYERS[name]
    layer = randomise(build())
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    x = torch.randn(3, *shape, requires_grad=True)
    expected = layer(x)
    result = compiled(x)
    torch.testing.assert_close(result, expected)
    cotangent = torch.randn_like(expected)
    inputs = [x, *layer.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(result, inputs, cotangent),
        torch.autograd.grad(expected, inputs, cotangent),
    )


def test_embeddings_compile_as_one_graph():
    layer = lip.Embedding(5, 3)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    tokens = torch.tensor([[0, 4], [1, 1]])
    assert torch.equal(compiled(tokens), layer(tokens))


@pytest.mark.parametrize("name", list(CONSTRAINED))
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_layers_can_be_built_in_any_precision(name, dtype):
    layer = CONSTRAINED[name](dtype=dtype)
    assert {p.dtype for p in layer.parameters()} == {dtype}
    assert layer.certificate().holds


@pytest.mark.parametrize("name", list(CONSTRAINED))
def test_layers_can_be_built_without_memory_and_filled_later(name):
    """The usual idiom for large models: build on the meta device, allocate, initialise."""
    layer = CONSTRAINED[name](device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    assert layer.certificate().holds


@pytest.mark.parametrize("name", list(CONSTRAINED))
def test_every_constrained_layer_reports_its_certificates(name):
    layer = CONSTRAINED[name]()
    found = layer.certificates()
    assert set(found) == {own for own, _ in layer.named_parameters()}
    for certificate in found.values():
        assert isinstance(certificate, Certificate)
        assert certificate.holds
        assert f"<= {certificate.radius:g}" in str(certificate)


def test_projection_of_a_model_equals_that_of_its_layers():
    model = nn.Sequential(
        lip.SpectralLinear(8, 8, bias=True),
        lip.SpectralLinear(8, 8, constraint="ball"),
        lip.SpectralLinear(8, 8, norm=2.0),
        nn.Sequential(lip.SpectralLinear(8, 8), lip.FrobeniusLinear(8, 8)),
        lip.SpectralConv1d(8, 8, 1),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    alone = copy.deepcopy(model)
    for module in alone.modules():
        if isinstance(module, lip.ConstrainedModule):
            module.project()
    lip.project(model)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert len(lip.certify(model)) == 7


def test_projection_needs_no_gradient_and_leaves_none():
    layer = lip.SpectralLinear(4, 4)
    layer(torch.randn(2, 4)).sum().backward()
    gradient = layer.weight.grad.clone()
    lip.project(layer)
    assert torch.equal(layer.weight.grad, gradient)
    assert layer.weight.grad_fn is None
    assert layer.weight.is_leaf


def test_certify_names_the_parameter_its_norm_and_the_remedy():
    model = nn.Sequential(nn.Flatten(), lip.Residual(lip.SpectralLinear(4, 4)))
    with torch.no_grad():
        model[1].block.weight.mul_(1.5)
    with pytest.raises(ConstraintError) as caught:
        lip.certify(model)
    message = str(caught.value)
    assert "1.block.weight" in message
    assert "1.5" in message
    assert "clipless.nn.project(model)" in message
    assert isinstance(caught.value, CliplessError)
    assert isinstance(caught.value, ValueError)
    lip.project(model)
    assert lip.certify(model)["1.block.weight"].holds


def test_frozen_layers_are_certified_too():
    layer = lip.SpectralLinear(4, 4).requires_grad_(False)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(ConstraintError):
        lip.certify(layer)
    lip.project(layer)
    assert singular_values(layer.weight)[0] <= 1


@pytest.mark.parametrize("order", ["small first", "large first"])
def test_a_weight_in_two_constraint_sets_is_refused(order):
    small, large = lip.SpectralLinear(4, 4, norm=0.5), lip.SpectralLinear(4, 4, norm=1.0)
    large.weight = small.weight
    layers = [small, large] if order == "small first" else [large, small]
    model = nn.Sequential(*layers)
    before = small.weight.detach().clone()
    with pytest.raises(ConstraintError, match=r"0\.weight and 1\.weight"):
        lip.project(model)
    assert torch.equal(small.weight, before)


def test_a_models_without_constraints_is_fine():
    model = nn.Sequential(nn.Flatten(), nn.ReLU())
    lip.project(model)
    assert lip.certify(model) == {}


def test_a_users_own_constrained_layer_takes_part():
    class Gain(lip.ConstrainedModule):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((3,), 5.0))

        def constraints(self):
            return {"weight": EuclideanBall(1.0)}

        def forward(self, x):
            return x * self.weight

    model = nn.Sequential(Gain())
    with pytest.raises(ConstraintError, match=r"0\.weight"):
        lip.certify(model)
    lip.project(model)
    assert model[0].weight.norm() <= 1


def test_public_names_exist():
    assert all(hasattr(lip, name) for name in lip.__all__)
