"""The attack: it keeps its radius and box, sees through gradient clipping, and succeeds."""

import pytest
import torch
from torch import nn

from clipless import nn as lip
from clipless.robustness import AttackOptions, CertificateAttack, attack_certificates, pgd_attack
from tests.robustness.networks import inputs, mlp


def test_keeps_every_radius_exactly():
    model, x = mlp(), inputs((6,), 2.0)
    radius = torch.linspace(0.0, 3.0, len(x))
    for dtype in (torch.float32, torch.float64):
        result = pgd_attack(model, x, radius=radius, steps=10, restarts=3, dtype=dtype)
        moved = (result.adversarial.double() - x.double()).norm(dim=1)
        assert torch.all(moved <= radius)
        assert result.adversarial.dtype == dtype
        assert torch.any(result.success)
        decided = model.to(dtype)(result.adversarial).argmax(1) != model(x.to(dtype)).argmax(1)
        assert torch.equal(decided, result.success)
        model.float()


def test_larger_radii_are_easier():
    model, x = mlp(), inputs((6,), 2.0)
    rates = [pgd_attack(model, x, radius=r, steps=15).success.float().mean() for r in (0.1, 1, 4)]
    assert rates[0] < rates[1] < rates[2]
    assert rates[2] > 0.9


def test_box():
    model = mlp()
    x = torch.rand(40, 6)
    result = pgd_attack(model, x, radius=0.8, box=(0.0, 1.0))
    assert result.adversarial.min() >= 0
    assert result.adversarial.max() <= 1
    assert (result.adversarial - x).norm(dim=1).max() <= 0.8
    free = pgd_attack(model, x, radius=0.8)
    assert free.success.sum() >= result.success.sum()
    with pytest.raises(ValueError, match="box"):
        pgd_attack(model, x + 1, radius=0.1, box=(0.0, 1.0))


def test_labels_decide_what_is_attacked():
    model, x = mlp(), inputs((6,), 2.0)
    wrong = (model(x).argmax(1) + 1) % 4
    result = pgd_attack(model, x, wrong, radius=0.0)
    assert torch.all(result.success)
    assert torch.equal(result.adversarial, x)


class Clipped(nn.Module):
    """Gradient clipping in one branch turns the gradient of the input around."""

    def __init__(self):
        super().__init__()
        self.clip = lip.ClipGradient(1e-3)
        self.head = lip.SpectralLinear(4, 1, norm=2.0)

    def forward(self, x):
        return self.head(0.5 * (2.0 * self.clip(x) - x))


def test_sees_through_gradient_clipping():
    model = Clipped()
    x = torch.randn(30, 4)
    result = attack_certificates(
        model, x, attack=AttackOptions(restarts=1, steps=1, ladder=(3.1, 3.2))
    )
    # The bound of x - 2x is 3 where the truth is 1, and the gradient start finds the truth at once.
    assert len(result.ratios) == 30
    assert result.ratios.max() < 3.1
    assert result.broken == ()


def test_a_curved_boundary_is_found_by_the_search():
    """max |x_k| over pairs against a constant: flat pieces and corners."""

    class Corner(nn.Module):
        def forward(self, x):
            top = x.abs().amax(dim=1, keepdim=True)
            return torch.cat([top, 0.0 * top + 1.0], dim=1)

    x = torch.tensor([[1.5, 1.2, 0.0], [3.0, 0.0, 0.0], [1.4, 1.4, 1.4]])
    # All entries above one have to come down to it.
    distance = (x.abs() - 1).clamp(min=0).norm(dim=1)
    assert not pgd_attack(Corner(), x, radius=0.98 * distance, restarts=8).success.any()
    assert pgd_attack(Corner(), x, radius=1.05 * distance, restarts=8, steps=60).success.all()


def test_arguments():
    model, x = mlp(), torch.zeros(2, 6)
    with pytest.raises(ValueError, match="radius"):
        pgd_attack(model, x, radius=-1.0)
    with pytest.raises(ValueError, match="restarts"):
        pgd_attack(model, x, radius=1.0, restarts=0)


def test_summary():
    result = attack_certificates(
        mlp(), inputs((6,), 2.0, count=10), attack=AttackOptions(restarts=2, steps=5)
    )
    assert isinstance(result, CertificateAttack)
    data = result.to_dict()
    assert data["broken"] == []
    assert data["attacked"] == 10
    assert data["ratio_quantiles"]["0.0"] >= 1
    assert "broken" in str(result)
