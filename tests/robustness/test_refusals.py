"""Inputs, labels and models for which nothing can be certified."""

import math

import pytest
import torch
from torch import nn

from clipless import nn as lip
from clipless.errors import ConstraintError, LabelError, UnsupportedOperationError
from clipless.robustness import (
    AttackOptions,
    attack_certificates,
    certified_accuracy,
    certified_radius,
    pgd_attack,
)
from tests.bounds.architectures import TokenMean
from tests.robustness.networks import binary, inputs, mlp, sphere_mlp


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("build", [mlp, sphere_mlp])
def test_entries_that_are_not_finite_get_nothing(build, bad):
    model, x = build(), inputs((6,), 1.0, count=4)
    clean = certified_radius(model, x)
    x[1, 2] = bad
    radii = certified_radius(model, x)
    assert radii[1] == 0
    assert torch.equal(radii[[0, 2, 3]], clean[[0, 2, 3]])
    result = attack_certificates(model, x, attack=AttackOptions(restarts=2, steps=5, ladder=(1.1,)))
    assert result.attacked == 3
    assert not pgd_attack(model, x, radius=100.0, restarts=2).success[1]


def test_empty_batch():
    model, nothing = mlp(), torch.zeros(0, 6)
    assert certified_radius(model, nothing).shape == (0,)
    assert attack_certificates(model, nothing).broken == ()
    assert pgd_attack(model, nothing, radius=1.0).success.shape == (0,)
    result = certified_accuracy(model, nothing, torch.zeros(0, dtype=torch.long))
    assert result.examples == 0
    assert result.accuracies == (0.0,) * 6


def test_ties_get_nothing():
    model = nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(3, 2))
    with torch.no_grad():
        model[1].weight[1].copy_(model[1].weight[0])
        model[1].weight.mul_(0.5)
    assert certified_radius(model, torch.randn(5, 3)).tolist() == [0.0] * 5
    assert certified_radius(model, torch.zeros(2, 3)).tolist() == [0.0] * 2


def test_zero_on_the_sphere_gets_nothing():
    x = torch.zeros(1, 6)
    assert certified_radius(sphere_mlp(), x).tolist() == [0.0]


def test_weights_outside_their_constraint_are_refused():
    model = mlp()
    with torch.no_grad():
        model[3].weight.mul_(1.01)
    with pytest.raises(ConstraintError, match=r"3\.weight"):
        certified_radius(model, torch.zeros(2, 6))
    with pytest.raises(ConstraintError):
        certified_accuracy(model, torch.zeros(2, 6), torch.zeros(2, dtype=torch.long))


def test_a_sphere_in_the_middle_is_refused():
    model = nn.Sequential(
        lip.BoundedInput(1.0), lip.SpectralLinear(4, 4),
        lip.BoundedInput(1.0, mode="sphere"), lip.SpectralLinear(4, 2),
        lip.BoundedInput(1.0, mode="sphere"),
    )  # fmt: skip
    with pytest.raises(UnsupportedOperationError, match="sphere"):
        certified_radius(model, torch.zeros(1, 4))


class AroundTheSphere(nn.Module):
    """Part of the input does not pass through the guard."""

    def __init__(self):
        super().__init__()
        self.guard = lip.BoundedInput(1.0, mode="sphere")
        self.head = lip.SpectralLinear(4, 2)

    def forward(self, x):
        return self.head(0.5 * x + 0.5 * self.guard(x))


def test_a_way_around_the_sphere_is_refused():
    with pytest.raises(UnsupportedOperationError, match="guard"):
        certified_radius(AroundTheSphere(), torch.zeros(1, 4))


def test_a_sphere_behind_lipschitz_layers_is_understood():
    """All of the input passes through it, and what comes before has a constant."""
    model = nn.Sequential(
        lip.SpectralLinear(4, 4, norm=2.0), lip.BoundedInput(1.0, mode="sphere"),
        lip.SpectralLinear(4, 2),
    )  # fmt: skip
    x = torch.randn(30, 4)
    result = attack_certificates(model, x, attack=AttackOptions(restarts=3, steps=20))
    assert result.attacked == 30
    assert result.broken == ()


def test_tokens_are_refused():
    with pytest.raises(UnsupportedOperationError, match="okens"):
        certified_radius(TokenMean(), torch.zeros(2, 5, dtype=torch.long))


def test_unknown_layers_are_refused():
    with pytest.raises(UnsupportedOperationError):
        certified_radius(nn.Sequential(nn.Linear(3, 2)), torch.zeros(1, 3))


class OwnPrecision(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = lip.SpectralLinear(4, 2)

    def forward(self, x):
        return self.head(x.float())


def test_own_precision_is_refused():
    with pytest.raises(UnsupportedOperationError, match="float32"):
        certified_radius(OwnPrecision(), torch.zeros(1, 4))


def test_outputs_that_are_no_logits_are_refused():
    model = nn.Sequential(lip.BoundedInput(1.0), lip.SpectralConv1d(1, 2, 1))
    with pytest.raises(ValueError, match="2x4"):
        certified_radius(model, torch.zeros(1, 1, 4))


def test_arguments():
    model, x = mlp(), torch.zeros(2, 6)
    with pytest.raises(ValueError, match="method"):
        certified_radius(model, x, method="best")
    with pytest.raises(ValueError, match="input_lipschitz"):
        certified_radius(model, x, input_lipschitz=0.0)
    with pytest.raises(ValueError, match="arithmetic"):
        certified_radius(model, x, arithmetic=torch.bfloat16)
    with pytest.raises(ValueError, match="first axis"):
        certified_radius(model, x[0])
    with pytest.raises(ValueError, match="radii"):
        certified_accuracy(model, x, torch.zeros(2, dtype=torch.long), radii=(-1.0,))
    with pytest.raises(ValueError, match="inside"):
        attack_certificates(model, x, attack=AttackOptions(inside=1.5))


def test_labels():
    model, x = mlp(), inputs((6,), 1.0, count=8)
    decided = model(x).argmax(1)
    radii = certified_radius(model, x)
    wrong = (decided + torch.arange(8) % 2) % 4
    kept = certified_radius(model, x, y=wrong)
    assert torch.equal(kept[::2], radii[::2])
    assert kept[1::2].tolist() == [0.0] * 4
    for labels in (decided.float(), decided[:4], decided + 4):
        with pytest.raises(LabelError):
            certified_radius(model, x, y=labels)
    one = binary().eval()
    signs = (one(x) > 0).long()
    expected = certified_radius(one, x)
    for labels in (signs, 2 * signs - 1, signs.float()):
        assert torch.equal(certified_radius(one, x, y=labels), expected)


def test_the_model_is_left_alone():
    model = mlp().train()
    before = [p.clone() for p in model.parameters()]
    x = inputs((6,), 1.0, count=4)
    attack_certificates(model, x, attack=AttackOptions(restarts=1, steps=2))
    pgd_attack(model, x, radius=0.1, restarts=1, steps=2)
    assert model.training
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(not module._forward_pre_hooks for module in model.modules())
