"""Centering and ball projection: 1-Lipschitz, over the example's own axes only."""

import math

import pytest
import torch

from clipless.nn import BallProjection, LayerCentering
from tests.nn.operators import jacobian_norm, norm_of

DIMS = [None, 1, -1, 2, (1,), (1, 2), (-1, -2), [2, 3], (1, 2, 3)]


@pytest.mark.parametrize("dim", DIMS, ids=str)
def test_centering_is_a_projection(dim):
    layer = LayerCentering(dim)
    assert norm_of(layer, (2, 3, 4)) == pytest.approx(1)
    x = torch.randn(5, 2, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(layer(layer(x)), layer(x))
    axes = (1, 2, 3) if dim is None else dim
    assert layer(x).mean(dim=axes).abs().max() < 1e-14


@pytest.mark.parametrize("shape", [(6,), (3, 4), (2, 3, 4), (2, 2, 2, 2)])
def test_centering_keeps_examples_apart(shape):
    """Averaging over the batch on tensors of low rank let one example move another's result."""
    layer = LayerCentering()
    x = torch.randn(4, *shape)
    other = x.clone()
    other[1:] = 100.0
    assert torch.equal(layer(x)[0], layer(other)[0])
    assert torch.equal(layer(x)[0], layer(x[:1])[0])


@pytest.mark.parametrize("dim", [(), []])
def test_centering_over_no_axis_never_means_all_axes(dim):
    """torch reads an empty list of axes as all of them, the batch included."""
    try:
        layer = LayerCentering(dim)
    except ValueError:
        return
    x = torch.randn(3, 4)
    other = x.clone()
    other[1:] = 100.0
    assert torch.equal(layer(x)[0], layer(other)[0])


@pytest.mark.parametrize("dim", [0, (0,), (1, 0), [0, 2]])
def test_centering_refuses_the_batch_axis(dim):
    with pytest.raises(ValueError, match="batch axis"):
        LayerCentering(dim)


def test_centering_one_entry_gives_zero():
    assert LayerCentering()(torch.tensor([[5.0]])).item() == 0


RADIUS = 2.0
DIRECTIONS = {
    "random": torch.randn(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    "axis": torch.eye(6, dtype=torch.float64)[0],
    "constant": torch.ones(6, dtype=torch.float64),
}
NORMS = [0.0, 5e-324, 1e-200, 1e-8, 1.0, RADIUS * (1 - 1e-15), RADIUS, RADIUS * (1 + 1e-15)]
NORMS += [2.1, 1e8, 1e150, 1e200]


@pytest.mark.parametrize("direction", list(DIRECTIONS))
@pytest.mark.parametrize("norm", NORMS)
def test_ball_projection_is_one_lipschitz(norm, direction):
    unit = DIRECTIONS[direction] / DIRECTIONS[direction].norm()
    layer = BallProjection(RADIUS)
    example = unit * norm
    assert layer(example[None]).norm() <= RADIUS * (1 + 1e-12)
    assert jacobian_norm(layer, example) <= 1 + 1e-9


def test_ball_projection_values():
    layer = BallProjection(1.0)
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    torch.testing.assert_close(layer(x), torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))
    image = torch.full((2, 1, 2, 2), 5.0)
    torch.testing.assert_close(layer(image).flatten(1).norm(dim=1), torch.ones(2))


def test_ball_projection_does_not_grow_distances():
    layer = BallProjection(1.0)
    a, b = 2 * torch.randn(2, 1000, 3, dtype=torch.float64)
    assert ((layer(a) - layer(b)).norm(dim=1) <= (a - b).norm(dim=1) * (1 + 1e-12)).all()


@pytest.mark.parametrize("scale", [1e20, 3e37])
def test_ball_projection_of_overflowing_norms_stays_inside(scale):
    x = torch.full((1, 8), scale)
    x.requires_grad_()
    result = BallProjection(1.0)(x)
    assert result.norm() <= 1 + 1e-6
    (gradient,) = torch.autograd.grad(result.sum(), x)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("radius", [0, -1.0, math.nan, math.inf, True, "1"])
def test_the_radius_must_be_a_positive_number(radius):
    with pytest.raises(ValueError, match="radius"):
        BallProjection(radius)


def test_printed_forms():
    assert repr(LayerCentering((1, 2))) == "LayerCentering(dim=(1, 2))"
    assert repr(BallProjection(2)) == "BallProjection(radius=2)"
