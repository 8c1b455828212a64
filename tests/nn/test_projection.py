"""A prepared projection: a pure function that fits the model or is made anew."""

import gc
import weakref

import pytest
import torch
from torch import nn

from clipless import nn as lip
from clipless.nn import _base
from clipless.spectral import _projection
from tests.nn.operators import singular_values


def network():
    return nn.Sequential(
        lip.BoundedInput(1.0),
        lip.SpectralConv2d(2, 4, 3, bias=True),
        lip.SpectralConv2d(4, 4, 3, groups=2, norm=0.5),
        nn.Flatten(),
        lip.SpectralLinear(4, 6, constraint="ball"),
        lip.FrobeniusLinear(6, 6),
        lip.SpectralLinear(6, 6),
        lip.SpectralLinear(6, 6),
    )


def moved(model, *, size=0.3):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return model


@pytest.fixture(params=["looking", "blind"])
def device_like(request, monkeypatch):
    """As on the CPU, and as on devices where values cannot be looked at."""
    if request.param == "blind":
        monkeypatch.setattr(_projection, "may_look_at", lambda weights: False)


@pytest.mark.usefixtures("device_like")
def test_whole_models_end_inside():
    model = moved(network())
    lip.project(model)
    assert all(found.holds for found in lip.certify(model).values())
    assert singular_values(model[6].weight)[-1] >= 1 - 1e-4
    for part in model[2].weight.chunk(2):
        assert singular_values(part.flatten(1))[-1] >= 0.5 * (1 - 1e-4)


@pytest.mark.usefixtures("device_like")
def test_it_is_a_pure_function_of_the_weights():
    model = moved(network())
    projection = lip.prepare_projection(model)
    before = [parameter.detach().clone() for parameter in projection.parameters]
    versions = [parameter._version for parameter in projection.parameters]
    result = projection(before)
    assert all(torch.equal(p, b) for p, b in zip(projection.parameters, before, strict=True))
    assert versions == [parameter._version for parameter in projection.parameters]
    projection.apply()
    assert all(torch.equal(p, r) for p, r in zip(projection.parameters, result, strict=True))
    assert all(p._version > v for p, v in zip(projection.parameters, versions, strict=True))
    assert {id(p) for p in projection.parameters} == {id(p) for p in model.parameters()}


def test_it_is_kept_while_it_fits_and_made_anew_when_not():
    model = network()
    first = lip.prepare_projection(model)
    assert lip.prepare_projection(model) is first
    assert lip.prepare_projection(model, include_frozen=False) is not first
    model[6].norm = 0.5
    second = lip.prepare_projection(model)
    assert second is not first
    model[6].weight = nn.Parameter(torch.randn(6, 6))
    third = lip.prepare_projection(model)
    assert third is not second
    model.double()
    fourth = lip.prepare_projection(model)
    assert fourth is not third
    lip.project(moved(model))
    assert all(found.holds for found in lip.certify(model).values())
    assert singular_values(model[6].weight)[0] <= 0.5


def test_lowering_a_norm_between_steps_is_noticed():
    model = nn.Sequential(lip.SpectralLinear(4, 4))
    lip.project(model)
    model[0].norm = 0.25
    lip.project(model)
    assert singular_values(model[0].weight)[0] <= 0.25


def test_frozen_weights_can_be_left_out():
    model = moved(network())
    model[6].requires_grad_(False)
    before = model[6].weight.clone()
    lip.project(model, include_frozen=False)
    assert torch.equal(model[6].weight, before)
    model[6].requires_grad_(True)
    lip.project(model, include_frozen=False)
    assert singular_values(model[6].weight)[0] <= 1


@pytest.mark.usefixtures("device_like")
def test_a_weight_of_three_layers_is_projected_once():
    """Under different norms it is refused: see test_tied."""
    layers = [lip.SpectralLinear(4, 4, norm=0.5) for _ in range(3)]
    other = lip.SpectralLinear(4, 4)
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    model = moved(nn.Sequential(*layers, other))
    projection = lip.prepare_projection(model)
    assert len(projection.parameters) == 2
    projection.apply()
    assert singular_values(layers[0].weight)[0] <= 0.5
    assert singular_values(layers[0].weight)[-1] >= 0.499
    assert singular_values(other.weight)[-1] >= 0.999


def test_preparing_keeps_no_model_alive():
    gc.collect()  # the models of other tests
    model = network()
    lip.project(model)
    ghost, count = weakref.ref(model), len(_base._PREPARED)
    del model
    gc.collect()
    assert ghost() is None
    assert len(_base._PREPARED) < count


def test_a_model_without_constraints_is_fine():
    projection = lip.prepare_projection(nn.Sequential(nn.ReLU()))
    projection.apply()
    assert projection([]) == []


def test_it_compiles_as_one_graph():
    model = moved(nn.Sequential(lip.SpectralConv2d(2, 4, 3, bias=True), lip.SpectralLinear(5, 4)))
    projection = lip.prepare_projection(model)
    expected = projection(projection.parameters)
    torch._dynamo.reset()
    torch.compile(projection.apply, backend="aot_eager", fullgraph=True)()
    for parameter, weight in zip(projection.parameters, expected, strict=True):
        torch.testing.assert_close(parameter, weight, rtol=1e-4, atol=1e-5, check_stride=False)
    assert all(found.holds for found in lip.certify(model).values())


def test_it_computes_by_another_function_if_told_so():
    model = moved(network())
    projection = lip.prepare_projection(model)
    asked = []

    def watched(*weights):
        asked.append(len(weights))
        return projection(weights)

    assert projection.computes_itself
    projection.compute_by(watched)
    projection.apply()
    assert not projection.computes_itself
    assert asked == [len(projection.parameters)]
    assert all(found.holds for found in lip.certify(model).values())
