"""How far an input may move before its guarded image has moved: exact, from both sides."""

import math

import pytest
import torch

from clipless import nn as lip
from clipless.robustness._guard_geometry import radius_before_clip, radius_before_sphere

NORMS = (0.35, 0.9, 1.0, 1.1, 2.0, 7.0)
CHANGES = (0.01, 0.3, 0.9, 1.3, 1.42, 1.8, 1.99)
RADIUS = 1.0


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def farthest_image(guard, norm, distance):
    """The largest change of the guard's output over a dense disc of the given radius, in a plane.

    By symmetry the plane through the origin is enough.
    """
    angle = torch.linspace(0, math.pi, 721, dtype=torch.float64)[:, None]
    length = distance * torch.linspace(0, 1, 101, dtype=torch.float64)[None, :]
    start = numbers(norm, 0.0)[None]
    moved = start + torch.stack([length * angle.cos(), length * angle.sin()], -1).reshape(-1, 2)
    return (guard(moved) - guard(start)).norm(dim=1).max().item()


@pytest.mark.parametrize("mode", ["sphere", "clip"])
@pytest.mark.parametrize("norm", NORMS)
def test_is_exact(mode, norm):
    guard = lip.BoundedInput(RADIUS, mode=mode)
    geometry = radius_before_sphere if mode == "sphere" else radius_before_clip
    for change in CHANGES:
        found = geometry(numbers(change), numbers(norm), RADIUS)
        if torch.isinf(found):
            assert farthest_image(guard, norm, 100.0) < change
            continue
        assert farthest_image(guard, norm, found.item() * 0.9999) <= change
        assert farthest_image(guard, norm, found.item() * 1.01) > change


def test_everywhere_is_reached():
    """Beyond the diameter of the images nothing can happen, and only there."""
    big, norm = numbers(2.001, 1.999), numbers(3.0, 3.0)
    assert torch.isinf(radius_before_sphere(big, norm, 1.0)).tolist() == [True, False]
    assert torch.isinf(radius_before_clip(big, norm, 1.0)).tolist() == [True, False]
    found = radius_before_clip(numbers(1.501, 1.499), numbers(0.5, 0.5), 1.0)
    assert torch.isinf(found).tolist() == [True, False]


def test_zero_has_no_direction():
    assert radius_before_sphere(numbers(5.0), numbers(0.0), 1.0).item() == 0.0


def test_the_usual_formula_in_the_middle():
    """n sin(2 arcsin(c / 2R)), below a right angle."""
    expected = 9.0 * math.sin(2 * math.asin(0.4 / (2 * 1.5)))
    found = radius_before_sphere(numbers(0.4), numbers(9.0), 1.5).item()
    assert found == pytest.approx(expected, rel=1e-12)
