"""Embeddings: every row in a ball, and a gradient that grows with repeated tokens only."""

import math

import pytest
import torch
from torch import nn

from clipless.errors import ConstraintError
from clipless.nn import Embedding, certify


def test_looks_up_rows():
    layer = Embedding(7, 3)
    tokens = torch.tensor([[0, 6], [2, 2]])
    assert torch.equal(layer(tokens), layer.weight[tokens])
    assert layer(torch.zeros(2, 4, 5, dtype=torch.long)).shape == (2, 4, 5, 3)
    assert layer(torch.zeros(2, dtype=torch.long)).shape == (2, 3)


@pytest.mark.parametrize("norm", [1.0, 0.2, 30])
def test_rows_start_on_the_sphere(norm):
    rows = Embedding(50, 8, norm=norm).weight.double().norm(dim=1)
    assert rows.max() <= norm
    assert rows.min() >= norm * (1 - 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30])
def test_projection_shortens_long_rows_only(scale, dtype):
    layer = Embedding(20, 5, norm=0.5).to(dtype)
    with torch.no_grad():
        layer.weight.normal_().mul_(scale)
        layer.weight[3] = 0.01
        short = layer.weight[3].clone()
    layer.project()
    assert layer.weight.double().norm(dim=1).max() <= 0.5
    assert torch.equal(layer.weight[3], short)
    assert certify(layer)["weight"].holds


def test_one_long_row_is_enough_to_be_refused():
    layer = Embedding(20, 5)
    with torch.no_grad():
        layer.weight[11].mul_(1.001)
    assert layer.certificate().bound == pytest.approx(1.001, rel=1e-5)
    with pytest.raises(ConstraintError, match="weight"):
        certify(layer)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_never_certified(value):
    layer = Embedding(4, 3)
    with torch.no_grad():
        layer.weight[2, 1] = value
    assert not layer.certificate().holds


def gradient_norm(tokens, cotangent):
    layer = Embedding(10, 4, dtype=torch.float64)
    (layer(tokens) * cotangent).sum().backward()
    return layer.weight.grad.norm().item()


def test_repeated_tokens_add_their_cotangents():
    """sqrt(T) is needed, and reached, when all tokens agree; distinct tokens give 1."""
    tokens = 9
    cotangent = torch.ones(tokens, 4, dtype=torch.float64)
    cotangent /= cotangent.norm()
    repeated = torch.full((tokens,), 5)
    assert gradient_norm(repeated, cotangent) == pytest.approx(math.sqrt(tokens))
    assert gradient_norm(torch.arange(tokens), cotangent) == pytest.approx(1.0)


def test_parameters_are_plain_and_export():
    layer = Embedding(6, 3)
    assert list(layer.state_dict()) == ["weight"]
    plain = layer.to_torch()
    assert type(plain) is nn.Embedding
    tokens = torch.arange(6)[None]
    assert torch.equal(plain(tokens), layer(tokens))
    layer.load_state_dict(nn.Embedding(6, 3).state_dict())


@pytest.mark.parametrize("norm", [0, -1, math.nan, math.inf, True, "1"])
def test_the_norm_must_be_a_positive_number(norm):
    with pytest.raises(ValueError, match="norm"):
        Embedding(3, 2, norm=norm)


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (-1, 2)])
def test_sizes_must_be_positive(sizes):
    with pytest.raises(ValueError, match="positive"):
        Embedding(*sizes)


def test_printed_form():
    assert "6, 3, norm=2" in repr(Embedding(6, 3, norm=2))
