"""Linear layers: ordinary parameters, orthogonal start, and a norm that is certified."""

import copy
import math

import pytest
import torch
from torch import nn

from clipless.errors import ConstraintError
from clipless.nn import FrobeniusLinear, SpectralLinear, certify, project
from tests.nn.operators import norm_of, singular_values

KINDS = {
    "orthogonal": lambda *a, **k: SpectralLinear(*a, **k),
    "ball": lambda *a, **k: SpectralLinear(*a, constraint="ball", **k),
    "frobenius": lambda *a, **k: FrobeniusLinear(*a, **k),
}
SHAPES = [(1, 1), (7, 1), (1, 7), (5, 9), (9, 5), (16, 16)]


@pytest.fixture(params=list(KINDS))
def make(request):
    return KINDS[request.param]


@pytest.mark.parametrize("leading", [(), (3,), (3, 4), (0,)])
def test_acts_on_the_last_axis(make, leading):
    layer = make(6, 2, bias=True)
    assert layer(torch.randn(*leading, 6)).shape == (*leading, 2)


def test_computes_what_a_torch_linear_computes(make):
    layer = make(6, 2, bias=True)
    nn.init.constant_(layer.bias, 0.3)
    x = torch.randn(5, 6)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_parameters_are_plain(make):
    layer = make(6, 2, bias=True)
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert all(type(p) is nn.Parameter for p in layer.parameters())
    plain = nn.Linear(6, 2)
    plain.load_state_dict(layer.state_dict())
    layer.load_state_dict(plain.state_dict())


def test_bias_is_off_by_default(make):
    layer = make(6, 2)
    assert layer.bias is None
    assert list(layer.state_dict()) == ["weight"]
    assert list(layer.certificates()) == ["weight"]


@pytest.mark.parametrize("norm", [1.0, 0.25, 4])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_spectral_layers_start_orthogonal(inputs, outputs, norm):
    for constraint in ("orthogonal", "ball"):
        layer = SpectralLinear(inputs, outputs, norm=norm, constraint=constraint)
        values = singular_values(layer.weight)
        assert values.max() <= norm
        assert values.min() >= norm * (1 - 1e-5)


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_frobenius_layers_start_on_their_sphere(inputs, outputs):
    weight = FrobeniusLinear(inputs, outputs, norm=2.0).weight.double()
    assert 2 * (1 - 1e-5) <= weight.norm().item() <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_projection_restores_the_norm(make, inputs, outputs, scale, dtype):
    layer = make(inputs, outputs, bias=True, norm=1.5, bias_norm=0.5).to(dtype)
    with torch.no_grad():
        layer.weight.normal_().mul_(scale)
        layer.bias.normal_().mul_(scale)
    layer.project()
    assert singular_values(layer.weight)[0].item() <= 1.5
    assert layer.bias.double().norm().item() <= 0.5
    assert all(certificate.holds for certificate in layer.certificates().values())
    certify(layer)


def test_orthogonal_pushes_singular_values_up_and_ball_does_not():
    for constraint, expected in (("orthogonal", 1.0), ("ball", 0.5)):
        layer = SpectralLinear(8, 8, constraint=constraint)
        with torch.no_grad():
            layer.weight.mul_(0.5)
        layer.project()
        values = singular_values(layer.weight)
        torch.testing.assert_close(values, torch.full_like(values, expected), rtol=1e-5, atol=0)


def test_projection_is_in_place_and_nearly_idempotent(make):
    layer = make(12, 7, bias=True)
    with torch.no_grad():
        layer.weight.add_(torch.randn(7, 12))
    parameter, version = layer.weight, layer.weight._version
    layer.project()
    assert layer.weight is parameter
    assert layer.weight._version > version
    assert layer.weight.requires_grad
    once = layer.weight.detach().clone()
    layer.project()
    torch.testing.assert_close(layer.weight.detach(), once, rtol=1e-5, atol=1e-6)


def test_the_layer_is_norm_lipschitz(make):
    layer = make(6, 9, norm=0.7, dtype=torch.float64)
    assert norm_of(layer, (6,)) <= 0.7 * (1 + 1e-12)
    assert norm_of(layer, (3, 6)) <= 0.7 * (1 + 1e-12)


def test_certificate_is_never_below_the_norm(make):
    layer = make(10, 20, norm=1.0)
    for scale in (1e-3, 0.9, 1.0, 1.001, 50.0):
        with torch.no_grad():
            layer.weight.normal_().mul_(scale)
        certificate = layer.certificate()
        top = singular_values(layer.weight)[0].item()
        assert certificate.bound >= top
        assert float(certificate) == certificate.bound
        assert not certificate.holds or top <= 1 + 1e-9


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_never_certified(make, value):
    layer = make(4, 3, bias=True)
    for name in ("weight", "bias"):
        broken = copy.deepcopy(layer)
        with torch.no_grad():
            getattr(broken, name).view(-1)[1] = value
        assert not broken.certificates()[name].holds
        with pytest.raises(ConstraintError, match=name):
            certify(broken)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_projecting_weights_that_are_not_finite_never_ends_outside(make, value):
    """Either the projection repairs the weight, or what it leaves is not certified."""
    layer = make(4, 3)
    with torch.no_grad():
        layer.weight[1, 2] = value
    project(layer)
    assert layer.certificate().holds == bool(torch.isfinite(layer.weight).all())


def test_huge_double_weights_can_be_projected(make):
    layer = make(4, 3, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.fill_(1e200)
    layer.project()
    assert layer.certificate().holds


def test_converted_weights_are_checked_again(make):
    layer = make(64, 64).bfloat16()
    with torch.no_grad():
        layer.weight.mul_(1.01)
    with pytest.raises(ConstraintError, match=r"weight has certified norm.*project\(model\)"):
        certify(layer)
    project(layer)
    assert certify(layer)["weight"].holds


def test_an_edit_through_data_is_seen(make):
    layer = make(4, 4)
    layer.weight.data.mul_(3)
    with pytest.raises(ConstraintError):
        certify(layer)


@pytest.mark.parametrize("name", ["norm", "bias_norm"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "1", None])
def test_radii_must_be_positive_numbers(make, name, value):
    with pytest.raises(ValueError, match=name):
        make(3, 2, **{name: value})


@pytest.mark.parametrize(("inputs", "outputs"), [(0, 2), (2, 0), (-1, 3)])
def test_features_must_be_positive(make, inputs, outputs):
    with pytest.raises(ValueError, match="features"):
        make(inputs, outputs)


def test_the_constraint_must_be_known():
    with pytest.raises(ValueError, match="orthogonal"):
        SpectralLinear(3, 2, constraint="frobenius")


def test_arguments_after_bias_are_keyword_only(make):
    with pytest.raises(TypeError):
        make(3, 2, True, 1.0)


def test_dtype_and_device_are_honoured(make):
    layer = make(3, 2, bias=True, dtype=torch.float64, device="cpu")
    assert {p.dtype for p in layer.parameters()} == {torch.float64}


def test_printed_form_names_the_constraint():
    printed = repr(SpectralLinear(3, 2, bias=True, norm=2.5, constraint="ball"))
    for part in ("3, 2", "norm=2.5", "bias_norm=1", "constraint='ball'"):
        assert part in printed
    assert "bias=False" in repr(FrobeniusLinear(3, 2))


def test_same_seed_same_weights(make):
    weights = []
    for _ in range(2):
        torch.manual_seed(3)
        weights.append(make(5, 4).weight)
    assert torch.equal(*weights)
