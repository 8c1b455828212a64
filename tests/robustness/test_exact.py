"""Linear models: their certificates are the true distances to the boundary."""

import math

import pytest
import torch
from torch import nn

import clipless
from clipless import nn as lip
from clipless.robustness import AttackOptions, attack_certificates, certified_radius, pgd_attack


def linear(features, classes, **options):
    model = nn.Sequential(lip.SpectralLinear(features, classes, bias=True, **options))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(classes, features))
        model[0].bias.copy_(0.3 * torch.randn(classes))
    clipless.project(model)
    return model


def boundary_distance(model, x):
    """min_j (f_i - f_j) / ||w_i - w_j||, by hand."""
    weight, bias = model[0].weight.detach().double(), model[0].bias.detach().double()
    logits = x.double() @ weight.T + bias
    if len(weight) == 1:
        return logits[:, 0].abs() / weight.norm()
    found = []
    for row in logits:
        i = row.argmax()
        others = [j for j in range(len(row)) if j != i]
        found.append(min((row[i] - row[j]) / (weight[i] - weight[j]).norm() for j in others))
    return torch.stack(found)


@pytest.mark.parametrize("classes", [1, 2, 5])
@pytest.mark.parametrize("constraint", ["orthogonal", "ball"])
def test_certificate_is_the_distance(classes, constraint):
    model = linear(7, classes, constraint=constraint)
    x = 2 * torch.randn(50, 7)
    radii = certified_radius(model, x)
    true = boundary_distance(model, x)
    assert torch.all(radii <= true)
    torch.testing.assert_close(radii, true, rtol=1e-6, atol=1e-9)


def test_margin_is_exact_for_orthogonal_rows_and_never_larger():
    x = torch.randn(40, 7)
    model = linear(7, 3)
    rows = certified_radius(model, x)
    torch.testing.assert_close(certified_radius(model, x, method="margin"), rows, rtol=1e-4, atol=0)
    skewed = linear(7, 3, constraint="ball")
    with torch.no_grad():
        skewed[0].weight[1].copy_(0.9 * skewed[0].weight[0])
        skewed[0].weight.mul_(0.7)
    margin = certified_radius(skewed, x, method="margin")
    rows = certified_radius(skewed, x)
    assert torch.all(margin <= rows)
    assert torch.any(1.2 * margin < rows)


@pytest.mark.parametrize("classes", [1, 4])
def test_attack_breaks_radii_that_are_too_large(classes):
    """Else its failures would mean nothing."""
    model = linear(7, classes)
    x = torch.randn(40, 7)
    radii = certified_radius(model, x)
    assert attack_certificates(
        model, x, radii=1.3 * radii, attack=AttackOptions(restarts=3)
    ).broken == tuple(range(40))
    assert attack_certificates(
        model, x, radii=1.001 * radii, attack=AttackOptions(restarts=3)
    ).broken == tuple(range(40))


@pytest.mark.parametrize("classes", [1, 4])
def test_attack_finds_the_boundary_itself(classes):
    model = linear(7, classes)
    result = attack_certificates(model, torch.randn(40, 7), attack=AttackOptions(restarts=3))
    assert result.broken == ()
    assert result.attacked == 40
    assert result.ratios.min() >= 1
    assert result.ratios.max() < 1.0001


def test_behind_a_guard_the_distance_is_still_exact():
    """A linear model on the sphere: the nearest boundary point lies on a ray, at n sin(angle)."""
    model = nn.Sequential(
        lip.BoundedInput(2.0, mode="sphere"), lip.SpectralLinear(5, 1, constraint="ball")
    )
    x = 3 * torch.randn(60, 5)
    weight = model[1].weight.detach().double()[0]
    # The boundary of <w, x> = 0 does not depend on the length of x: its distance is <w, x> / ||w||.
    true = (x.double() @ weight).abs() / weight.norm()
    radii = certified_radius(model, x)
    assert torch.all(radii <= true)
    result = attack_certificates(model, x, attack=AttackOptions(restarts=3))
    assert result.broken == ()
    # The chord is shorter than the tangent, so something is lost at large angles, little at small.
    flat = (true / x.norm(dim=1)) < 0.3
    assert torch.all(radii[flat] > 0.98 * true[flat])


def test_threshold():
    model = linear(4, 1)
    x = torch.randn(20, 4)
    shifted = certified_radius(model, x, threshold=0.4)
    model[0].bias.data -= 0.4
    torch.testing.assert_close(shifted, certified_radius(model, x), rtol=1e-5, atol=1e-6)


def test_input_lipschitz_is_a_change_of_units():
    model = linear(4, 3)
    x = torch.randn(20, 4)
    raw = nn.Sequential(_Times(0.25), *model)
    torch.testing.assert_close(
        certified_radius(model, 0.25 * x, input_lipschitz=0.25), certified_radius(raw, x)
    )
    result = attack_certificates(
        model, 0.25 * x, input_lipschitz=0.25, attack=AttackOptions(restarts=2)
    )
    assert result.broken == ()
    assert result.ratios.max() < 1.001


class _Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def test_pgd_meets_the_closed_form():
    """In a ball around a linear model the margin falls by radius times the slope."""
    model = linear(6, 3)
    x = torch.randn(10, 6)
    y = model(x).argmax(1)
    result = pgd_attack(model, x, y, radius=1e-3, dtype=torch.float64)
    weight = model[0].weight.detach().double()
    logits = model.double()(x.double()).detach()
    for row, moved, label in zip(logits, result.margin, y, strict=True):
        others = [j for j in range(3) if j != label]
        lowest = min(
            row[label] - row[j] - 1e-3 * (weight[label] - weight[j]).norm() for j in others
        )
        assert moved.item() == pytest.approx(lowest.item(), abs=1e-9)


def test_constant_decisions_are_certified_everywhere():
    model = nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(3, 2, bias=True))
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.copy_(torch.tensor([0.5, 0.0]))
    assert certified_radius(model, torch.randn(4, 3)).tolist() == [math.inf] * 4
