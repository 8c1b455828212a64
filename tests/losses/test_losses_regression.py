import math

import pytest
import torch
import torch.nn.functional as F

from clipless.errors import LabelError
from clipless.losses import AbsoluteError, Huber, SquaredError

LOSSES = [
    AbsoluteError(),
    Huber(),
    Huber(delta=0.02),
    Huber(delta=30.0),
    SquaredError(output_bound=1.5, target_bound=0.5),
    SquaredError(output_bound=0.1, target_bound=4.0),
]
KINDS = [AbsoluteError(), Huber(), SquaredError(output_bound=1.0, target_bound=1.0)]


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@pytest.mark.parametrize("shape", [(), (1,), (2,), (10,), (2, 3)])
def test_bounded_and_tight(loss, shape, attack, real_targets):
    assert attack(loss, shape, real_targets) >= 0.99


@pytest.mark.parametrize("loss", KINDS, ids=repr)
def test_attack_defeats_a_constant_ten_percent_too_small(loss, attack, real_targets, monkeypatch):
    honest = type(loss).lipschitz_for
    monkeypatch.setattr(type(loss), "lipschitz_for", lambda self, shape: 0.9 * honest(self, shape))
    with pytest.raises(AssertionError, match="claimed"):
        attack(loss, (3,), real_targets)


def test_attack_notices_a_squared_error_without_projection(attack, real_targets):
    class Unprojected(SquaredError):  # noqa: N818 (not an exception)
        def per_example(self, output, target):
            return (output - target).square().sum(dim=1)

    with pytest.raises(AssertionError, match="claimed"):
        attack(Unprojected(output_bound=1.0, target_bound=1.0), (3,), real_targets)


def test_constants():
    assert AbsoluteError().lipschitz == 1
    assert AbsoluteError(outputs=16).lipschitz == 0.25
    assert AbsoluteError().lipschitz_for((4, 4)) == 0.25
    assert Huber(delta=3.0).lipschitz == 3
    assert Huber(delta=3.0).lipschitz_for((9,)) == 1
    assert SquaredError(output_bound=2, target_bound=3).lipschitz_for((5,)) == 10


@pytest.mark.parametrize("shape", [(20,), (20, 1), (20, 4), (20, 2, 3)])
def test_agreement_with_torch(shape):
    output = torch.randn(shape, dtype=torch.float64)
    target = torch.randn(shape, dtype=torch.float64)
    check = torch.testing.assert_close
    check(AbsoluteError()(output, target), F.l1_loss(output, target))
    check(Huber(delta=0.7)(output, target), F.huber_loss(output, target, delta=0.7))
    inside = SquaredError(output_bound=100.0, target_bound=100.0, reduction="sum")
    check(inside(output, target), F.mse_loss(output, target, reduction="sum"))


def test_squared_error_projects_output_and_target():
    loss = SquaredError(output_bound=1.0, target_bound=2.0)
    output, target = torch.tensor([[30.0, 40.0]]), torch.tensor([[0.0, -1e30]])
    expected = (0.6 - 0.0) ** 2 + (0.8 + 2.0) ** 2
    assert loss(output, target).item() == pytest.approx(expected, rel=1e-6)
    assert loss(output * 1e30, target).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("loss", KINDS, ids=repr)
def test_a_target_that_is_not_finite_changes_its_own_example_only(loss):
    output = torch.randn(4, 2, requires_grad=True)
    target = torch.randn(4, 2)
    (clean,) = torch.autograd.grad(loss(output, target), output)
    target[1] = torch.tensor([math.nan, 0.0])
    target[2] = torch.tensor([math.inf, -math.inf])
    (found,) = torch.autograd.grad(loss(output, target), output)
    torch.testing.assert_close(found[[0, 3]], clean[[0, 3]])
    assert (found.norm(dim=1) * 4 <= loss.lipschitz_for((2,)) * (1 + 1e-6)).all()
    (zeroed,) = torch.autograd.grad(loss(output, target.nan_to_num()), output)
    torch.testing.assert_close(found[1], zeroed[1])


@pytest.mark.parametrize("loss", KINDS, ids=repr)
@pytest.mark.parametrize(
    ("output_shape", "target_shape"),
    [
        ((3,), (3, 1)),
        ((3, 1), (3,)),
        ((3, 2), (3,)),
        ((3, 2), (3, 1)),
        ((3, 2), (1, 2)),
        ((3, 2), (2,)),
        ((3,), ()),
        ((1,), (3,)),
    ],
)
def test_shapes_are_never_broadcast(loss, output_shape, target_shape):
    with pytest.raises(LabelError, match="broadcast"):
        loss(torch.zeros(output_shape), torch.zeros(target_shape))


@pytest.mark.parametrize("loss", KINDS, ids=repr)
def test_other_wrong_inputs_are_refused(loss):
    with pytest.raises(LabelError, match="real"):
        loss(torch.zeros(3), torch.zeros(3) + 0j)
    with pytest.raises(ValueError, match="floating point"):
        loss(torch.zeros(3, dtype=torch.long), torch.zeros(3))
    with pytest.raises(ValueError, match="at least one output"):
        loss(torch.zeros(3, 0), torch.zeros(3, 0))
    with pytest.raises(ValueError, match="batch axis"):
        loss(torch.tensor(1.0), torch.tensor(1.0))


def test_the_promised_number_of_outputs_is_enforced():
    loss = AbsoluteError(outputs=4)
    assert loss(torch.zeros(1, 2, 2), torch.ones(1, 2, 2)) == 1
    with pytest.raises(ValueError, match="outputs=4"):
        loss(torch.zeros(1, 3), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="outputs=4"):
        loss.lipschitz_for(())


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, "1", None])
def test_settings_are_validated(value):
    with pytest.raises(ValueError, match="delta"):
        Huber(delta=value)
    with pytest.raises(ValueError, match="output_bound"):
        SquaredError(output_bound=value, target_bound=1.0)
    with pytest.raises(ValueError, match="target_bound"):
        SquaredError(output_bound=1.0, target_bound=value)
    if value is not None:
        with pytest.raises(ValueError, match="outputs"):
            AbsoluteError(outputs=value)
