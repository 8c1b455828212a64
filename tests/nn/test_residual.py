"""Residual connections are ordinary code around any block."""

import pytest
import torch
from torch import nn

from clipless import nn as lip
from tests.nn.operators import jacobian_norm, singular_values


def test_values():
    block = nn.Flatten()
    x = torch.randn(2, 3)
    assert torch.equal(lip.Residual(block)(x), x)
    assert torch.equal(lip.Residual(block, mode="add")(x), 2 * x)


@pytest.mark.parametrize(("mode", "bound"), [("average", 1.0), ("add", 2.0)])
def test_lipschitz_constant_around_a_one_lipschitz_block(mode, bound):
    block = nn.Sequential(lip.SpectralLinear(6, 6), lip.GroupSort(2)).double()
    layer = lip.Residual(block, mode)
    for _ in range(5):
        assert jacobian_norm(layer, torch.randn(6, dtype=torch.float64)) <= bound * (1 + 1e-9)
    assert jacobian_norm(lip.Residual(nn.Identity(), mode), torch.ones(3).double()) == (
        pytest.approx(bound)
    )


def test_layers_inside_are_projected_at_any_depth():
    """A spectral layer inside a residual block that is never projected drifts to norm 3."""
    inner = lip.SpectralLinear(5, 5)
    model = nn.Sequential(
        lip.Residual(nn.Sequential(lip.Residual(inner), lip.SpectralLinear(5, 5)))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    lip.project(model)
    for parameter in model.parameters():
        assert singular_values(parameter)[0] <= 1
    assert set(lip.certify(model)) == {"0.block.0.block.weight", "0.block.1.weight"}


def test_parameters_keep_plain_names():
    assert list(lip.Residual(lip.SpectralLinear(2, 2)).state_dict()) == ["block.weight"]


def test_the_mode_must_be_known():
    with pytest.raises(ValueError, match='"average" or "add"'):
        lip.Residual(nn.Identity(), "sum")


def test_a_block_that_changes_the_shape_is_an_error():
    with pytest.raises(RuntimeError):
        lip.Residual(lip.SpectralLinear(4, 3))(torch.zeros(2, 4))


def test_printed_form():
    assert "mode='add'" in repr(lip.Residual(nn.Identity(), "add"))
