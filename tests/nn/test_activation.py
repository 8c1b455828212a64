"""Activations keep norms and have a Jacobian of norm one, at ties and zeros too."""

import math

import pytest
import torch

from clipless.nn import Absolute, FullSort, GroupSort, Householder, MaxMin
from tests.nn.operators import jacobian_norm

LAYERS = {
    "GroupSort2": lambda dim=1: GroupSort(2, dim=dim),
    "GroupSort3": lambda dim=1: GroupSort(3, dim=dim),
    "GroupSort6": lambda dim=1: GroupSort(6, dim=dim),
    "MaxMin": lambda dim=1: MaxMin(dim=dim),
    "FullSort": lambda dim=1: FullSort(dim=dim),
    "Householder": lambda dim=1: Householder(12, dim=dim, dtype=torch.float64),
    "Absolute": lambda dim=1: Absolute(),
}
SORTS = [name for name in LAYERS if name != "Absolute"]


@pytest.fixture(params=list(LAYERS))
def make(request):
    return LAYERS[request.param]


def difficult_examples():
    generator = torch.Generator().manual_seed(5)
    random = torch.randn(12, generator=generator, dtype=torch.float64)
    yield "random", random
    yield "zeros", torch.zeros(12, dtype=torch.float64)
    yield "all ties", torch.ones(12, dtype=torch.float64)
    yield "some ties", random.round()
    yield "pairs tie", random[:6].repeat_interleave(2)
    yield "signed zeros", torch.tensor([0.0, -0.0] * 6, dtype=torch.float64)
    yield "sorted", torch.arange(12.0, dtype=torch.float64)
    yield "huge", random * 1e200
    yield "denormal", random * 1e-310


CASES = list(difficult_examples())


@pytest.mark.parametrize(("name", "example"), CASES, ids=[name for name, _ in CASES])
def test_jacobian_norm_is_at_most_one(make, name, example):
    assert jacobian_norm(make(), example) <= 1 + 1e-6


@pytest.mark.parametrize(("name", "example"), CASES, ids=[name for name, _ in CASES])
def test_norms_are_kept(make, name, example):
    result = make()(example[None])
    torch.testing.assert_close(result.abs().amax(), example.abs().amax())
    torch.testing.assert_close(result.norm(), example[None].norm())


def test_distances_do_not_grow(make):
    layer = make()
    a, b = torch.randn(2, 500, 12, dtype=torch.float64)
    b[:250] = a[:250] + 1e-3 * b[:250]
    before, after = (a - b).norm(dim=1), (layer(a) - layer(b)).norm(dim=1)
    assert (after <= before * (1 + 1e-9)).all()


@pytest.mark.parametrize("dim", [1, 2, 3, -1, -2, -3])
@pytest.mark.parametrize("name", SORTS)
def test_every_own_axis(name, dim):
    x = torch.randn(4, 12, 12, 12, dtype=torch.float64)
    layer = LAYERS[name](dim)
    expected = LAYERS[name](-1)(x.movedim(dim, -1)).movedim(-1, dim)
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("name", SORTS)
def test_positions_and_examples_stay_apart(name):
    layer = LAYERS[name]()
    x = torch.randn(3, 12, 5, dtype=torch.float64)
    together = layer(x)
    for example in range(3):
        for position in range(5):
            alone = layer(x[example : example + 1, :, position])
            torch.testing.assert_close(together[example, :, position], alone[0])


def test_group_sort_sorts_within_groups():
    x = torch.tensor([[3.0, 1.0, 2.0, 0.0, 5.0, 4.0]])
    assert GroupSort(2)(x).tolist() == [[1, 3, 0, 2, 4, 5]]
    assert GroupSort(3)(x).tolist() == [[1, 2, 3, 0, 4, 5]]
    assert MaxMin()(x).tolist() == [[3, 1, 2, 0, 5, 4]]
    assert FullSort()(x).tolist() == [[0, 1, 2, 3, 4, 5]]
    assert Absolute()(-x).tolist() == x.tolist()


def test_naive_pairs_would_break_at_ties():
    """Separate max and min reductions send both cotangents to the same entry of a tie: 1.41."""

    def naive(x):
        pairs = x.unflatten(1, (-1, 2))
        return torch.cat([pairs.max(dim=-1).values, pairs.min(dim=-1).values], dim=1)

    tie = torch.ones(2, dtype=torch.float64)
    assert jacobian_norm(naive, tie) == pytest.approx(math.sqrt(2))
    for name in [*SORTS[:1], "MaxMin"]:
        assert jacobian_norm(LAYERS[name](), tie) <= 1 + 1e-12


def test_householder_starts_as_max_min():
    x = torch.randn(20, 6)
    torch.testing.assert_close(Householder(6)(x), MaxMin()(x))


@pytest.mark.parametrize("angle", [0.0, 0.3, math.pi / 2, math.pi, 4.0, -7.5, 100.0])
def test_householder_at_any_angle(angle):
    layer = Householder(2, dtype=torch.float64)
    with torch.no_grad():
        layer.angles.fill_(angle)
    # On the reflecting line, beside it, and away from it.
    along = torch.tensor([math.cos(angle / 2), math.sin(angle / 2)], dtype=torch.float64)
    across = torch.tensor([-math.sin(angle / 2), math.cos(angle / 2)], dtype=torch.float64)
    for offset in (0.0, 1e-300, 1e-17, -1e-17, 1e-9, -1e-9, 0.5, -0.5):
        example = 2 * along + offset * across
        assert jacobian_norm(layer, example) <= 1 + 1e-12
        torch.testing.assert_close(layer(example[None]).norm(), example.norm())
    # Continuous across the line.
    near = [layer((2 * along + offset * across)[None]) for offset in (1e-9, -1e-9)]
    torch.testing.assert_close(*near, rtol=0, atol=1e-8)


def test_householder_angles_have_a_gradient_of_at_most_the_input_norm():
    layer = Householder(4, dtype=torch.float64)
    ratios = []
    for _ in range(50):
        with torch.no_grad():
            layer.angles.normal_(std=3.0)
        x = torch.randn(1, 4, 6, dtype=torch.float64)
        jacobian = torch.func.jacrev(
            lambda angles, x=x: torch.func.functional_call(
                layer, {"angles": angles}, (x,)
            ).flatten()
        )(layer.angles.detach())
        ratios.append((torch.linalg.matrix_norm(jacobian, 2) / x.norm()).item())
    assert max(ratios) <= 1 + 1e-12
    assert max(ratios) > 0.8


@pytest.mark.parametrize("channels", [2, 4, 16])
def test_householder_rejects_another_number_of_channels(channels):
    """Broadcasting one pair against many angles would repeat entries and raise the norm."""
    with pytest.raises((ValueError, RuntimeError)):
        Householder(8)(torch.randn(3, channels))


def test_the_batch_axis_is_refused():
    for build in (GroupSort, MaxMin, FullSort):
        with pytest.raises(ValueError, match="batch axis"):
            build(dim=0)
    with pytest.raises(ValueError, match="batch axis"):
        Householder(4, dim=0)


@pytest.mark.parametrize("size", [1, 0, -2])
def test_groups_need_two_members(size):
    with pytest.raises(ValueError, match="group_size"):
        GroupSort(size)


@pytest.mark.parametrize("channels", [0, 1, 3, -2])
def test_householder_needs_pairs(channels):
    with pytest.raises(ValueError, match="even"):
        Householder(channels)


@pytest.mark.parametrize("layer", [GroupSort(2), GroupSort(3), MaxMin()], ids=repr)
def test_channels_that_do_not_divide_are_an_error(layer):
    with pytest.raises((ValueError, RuntimeError)):
        layer(torch.randn(2, 5))


def test_only_householder_has_parameters():
    for name, build in LAYERS.items():
        names = list(build().state_dict())
        assert names == (["angles"] if name == "Householder" else [])


def test_an_empty_batch_passes(make):
    assert make()(torch.zeros(0, 12, dtype=torch.float64)).shape == (0, 12)


def test_printed_forms():
    assert repr(GroupSort(3, dim=-1)) == "GroupSort(3, dim=-1)"
    assert repr(MaxMin()) == "MaxMin(dim=1)"
    assert repr(Householder(4)) == "Householder(4, dim=1)"
