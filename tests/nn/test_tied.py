"""Weights that layers share: one constraint, or a refusal that names both layers."""

import pytest
import torch
from torch import nn

from clipless import nn as lip
from clipless.bounds import sensitivity
from clipless.errors import ConstraintError


def same_parameter(first, second):
    second.weight = first.weight


def same_memory(first, second):
    second.weight = nn.Parameter(first.weight.data)


def conv(**settings):
    return lip.SpectralConv2d(1, 1, 3, bias=False, **settings)


PAIRS = {
    "spectral and Frobenius": lambda: (
        lip.SpectralLinear(4, 4, bias=False),
        lip.FrobeniusLinear(4, 4, bias=False),
    ),
    "orthogonal and ball": lambda: (
        lip.SpectralLinear(4, 4, bias=False),
        lip.SpectralLinear(4, 4, bias=False, constraint="ball"),
    ),
    "two norms": lambda: (
        lip.SpectralLinear(4, 4, bias=False, norm=2.0),
        lip.SpectralLinear(4, 4, bias=False, norm=1.0),
    ),
    "two input sizes": lambda: (
        conv(certificate_size=4),
        conv(certificate_size=8),
    ),
    "two groups": lambda: (
        lip.SpectralConv2d(4, 4, 3, bias=False, groups=2),
        lip.SpectralConv2d(2, 4, 3, bias=False),
    ),
}


@pytest.mark.parametrize("tie", [same_parameter, same_memory])
@pytest.mark.parametrize("name", PAIRS)
def test_one_weight_under_two_constraints_is_refused_by_name(name, tie):
    first, second = PAIRS[name]()
    tie(first, second)
    model = nn.ModuleDict({"encoder": first, "decoder": second})
    for function in (lip.project, lip.prepare_projection, lip.certify):
        with pytest.raises(ConstraintError, match="one weight under two constraints") as caught:
            function(model)
        assert "encoder.weight" in str(caught.value)
        assert "decoder.weight" in str(caught.value)
        assert "weights of their own" in str(caught.value)


def test_the_bounds_of_such_a_model_are_refused():
    first, second = lip.SpectralLinear(4, 4, bias=False), lip.FrobeniusLinear(4, 4, bias=False)
    second.weight = first.weight
    with torch.no_grad():
        first.weight.zero_()  # in both sets
    model = nn.Sequential(lip.BoundedInput(1.0), first, second)
    with pytest.raises(ConstraintError, match="two constraints"):
        sensitivity(model, loss=1.0, input_shape=(4,))


@pytest.mark.parametrize("tie", [same_parameter, same_memory])
def test_one_weight_under_one_constraint_is_projected_once(tie, monkeypatch):
    first, second = lip.SpectralLinear(4, 4), lip.SpectralLinear(4, 4)
    tie(first, second)
    model = nn.Sequential(first, second)
    with torch.no_grad():
        first.weight.mul_(7.0)
    projection = lip.prepare_projection(model)
    assert sum(p is first.weight for p in projection.parameters) == 1
    lip.project(model)
    certificates = lip.certify(model)
    assert certificates["0.weight"].holds
    assert certificates["1.weight"].holds
    assert first.weight.data_ptr() == second.weight.data_ptr()
