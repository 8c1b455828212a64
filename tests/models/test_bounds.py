"""Every model is 1-Lipschitz and keeps its sensitivity bounds, also under attack."""

import math

import pytest
import torch
from torch.func import functional_call, jacrev, vmap

import clipless
from clipless import losses, models
from clipless import nn as lip
from clipless.audit import attack_bounds, class_labels, gaussian_targets
from clipless.audit.gradients._attack import _constraints_by_name
from tests.bounds.architectures import linear_functional
from tests.models.small import DEFAULT, SMALL, config

VARIANTS = {
    "mixer with skips": ("mixer", {"skip": True, "blocks": 2}),
    "resnet of deep blocks": ("resnet", {"channels": (4,), "blocks": 2, "convolutions": 2}),
    "vgg of deep stages": ("vgg", {"convolutions": 2}),
    "mlp with an output bias": ("mlp", {"output_bias": 0.5}),
    "lenet in the ball": ("lenet", {"constraint": "ball"}),
}
CASES = {name: (name, {}) for name in SMALL} | VARIANTS


def case(label, **settings):
    name, more = CASES[label]
    return config(name, **more, **settings)


def test_every_model_is_tested():
    assert set(SMALL) == set(DEFAULT) == set(models.names())


@pytest.mark.parametrize("name", models.names())
def test_defaults_are_accepted_and_one_lipschitz(name):
    described = config(name, DEFAULT, classes=10)
    report = clipless.sensitivity(
        models.build(described), loss=losses.CrossEntropy(), input_shape=described.input_shape
    )
    assert 0.99 <= report.lipschitz <= 1 + 1e-6
    assert report.output_bound <= described.guard_norm * (1 + 1e-6)
    # Everything is 1-Lipschitz and homogeneous: no weight's bound exceeds that of a linear model.
    largest = math.sqrt(2) * described.guard_norm
    assert all(0 < bound <= largest * (1 + 1e-6) for bound in report.gradient_bounds.values())


@pytest.mark.parametrize("label", CASES)
def test_small_ones_are_one_lipschitz(label):
    described = case(label)
    report = clipless.sensitivity(
        models.build(described), loss=1.0, input_shape=described.input_shape
    )
    assert 0.99 <= report.lipschitz <= 1 + 1e-6


def test_on_the_sphere_only_the_guard_has_no_constant():
    """What follows the guard is 1-Lipschitz all the same."""
    model = models.build("lenet", input_shape=(1, 8, 8), classes=3, input_mode="sphere")
    assert clipless.sensitivity(model, loss=1.0, input_shape=(1, 8, 8)).lipschitz == math.inf
    report = clipless.sensitivity(model[1:], loss=1.0, input_shape=(1, 8, 8), input_norm=1.0)
    assert report.lipschitz <= 1 + 1e-6


def test_clipped_logits_lower_every_bound():
    shape = (1, 8, 8)
    plain = models.build("vgg", input_shape=shape, classes=3)
    clipped = models.build("vgg", input_shape=shape, classes=3, clip_gradient=0.1)
    assert isinstance(clipped[-1], lip.ClipGradient)
    before, after = (
        clipless.sensitivity(model, loss=losses.CrossEntropy(), input_shape=shape).gradient_bounds
        for model in (plain, clipped)
    )
    for name, bound in after.items():
        assert bound == pytest.approx(before[name] * 0.1 / math.sqrt(2))


@pytest.mark.parametrize("label", CASES)
def test_bounds_hold_under_attack(label):
    described = case(label)
    result = attack_bounds(
        models.build(described),
        loss=linear_functional(),
        input_shape=described.input_shape,
        targets=gaussian_targets(3),
        restarts=3,
        steps=20,
    )
    assert not result.violations()
    # The attack is a real one. Without overlapping patches it reaches the bounds of all layers.
    assert max(result.ratios.values()) >= 0.5
    if label.split()[0] in ("mlp", "mixer", "head"):
        assert min(result.ratios.values()) >= 0.9


@pytest.mark.parametrize("loss", [losses.BinaryCrossEntropy(tau=20.0), losses.AbsoluteError()])
def test_one_output_holds_too(loss):
    targets = (
        class_labels(2) if isinstance(loss, losses.BinaryCrossEntropy) else gaussian_targets(1)
    )
    result = attack_bounds(
        models.build(config("mlp", classes=1)),
        loss=loss,
        input_shape=(6,),
        targets=targets,
        restarts=4,
        steps=25,
    )
    assert not result.violations()
    assert max(result.ratios.values()) >= 0.75


@pytest.mark.parametrize("label", CASES)
def test_jacobians_stay_below_one_under_attack(label):
    """Ascent over inputs and weights inside their sets on the Jacobian's spectral norm."""
    described = case(label)
    model = models.build(described).double()
    constraints = _constraints_by_name(model)
    count = 6
    weights = {
        name: parameter.detach().expand(count, *parameter.shape).clone()
        for name, parameter in model.named_parameters()
    }
    # Inside the ball of the guard, where it is the identity, and around it.
    x = torch.randn(count, *described.input_shape, dtype=torch.float64)
    x = x / x.flatten(1).norm(dim=1).reshape(-1, *[1] * (x.ndim - 1)) * described.guard_norm
    x = x * torch.linspace(0.3, 1.2, count, dtype=x.dtype).reshape(-1, *[1] * (x.ndim - 1))

    def spectral_norm(own, one):
        jacobian = jacrev(lambda z: functional_call(model, own, (z[None],))[0])(one)
        return torch.linalg.matrix_norm(jacobian.flatten(1), ord=2)

    measure = vmap(spectral_norm)
    found = 0.0
    for step in range(16):
        moving = [x, *weights.values()]
        for tensor in moving:
            tensor.requires_grad_(True)
        norms = measure(weights, x)
        found = max(found, norms.max().item())
        slopes = torch.autograd.grad(norms.sum(), moving, allow_unused=True)
        with torch.no_grad():
            for tensor, slope in zip(moving, slopes, strict=True):
                tensor.requires_grad_(False)
                if slope is not None:
                    rows = slope.flatten(1)
                    length = rows.norm(dim=1, keepdim=True).clamp_min(1e-30)
                    size = tensor.flatten(1).norm(dim=1, keepdim=True)
                    tensor += (0.4 * 0.8**step * rows * size / length).view_as(tensor)
            for name, constraint in constraints.items():
                weights[name].copy_(constraint.project(weights[name]))
    assert found <= 1 + 1e-6
    assert found >= 0.2
