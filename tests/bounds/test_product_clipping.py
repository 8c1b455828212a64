"""Product clipping: the limit holds for every example; nothing else of the pass changes."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from clipless import losses
from clipless import nn as lip
from clipless.audit import attack_bounds, gaussian_targets
from clipless.bounds import clip_products, sensitivity
from tests.bounds.architectures import linear_functional


class Twice(nn.Module):
    """One layer used two times."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(torch.relu(self.layer(x)))


def convolution(**options):
    return lip.SpectralConv2d(2, 4, 3, **options)


MODELS = {
    "linear": (lambda: [lip.SpectralLinear(8, 8, bias=True), lip.SpectralLinear(8, 4)], (8,), (4,)),
    "linear on positions": (lambda: [lip.SpectralLinear(8, 4, bias=True)], (5, 8), (5, 4)),
    "frobenius": (lambda: [lip.FrobeniusLinear(8, 4)], (8,), (4,)),
    "convolution": (lambda: [convolution(padding="same", bias=True)], (2, 6, 6), (4, 6, 6)),
    "stride": (lambda: [convolution(padding="same", stride=2)], (2, 6, 6), (4, 3, 3)),
    "even kernel": (lambda: [lip.SpectralConv2d(2, 4, 4, padding="same")], (2, 6, 6), (4, 6, 6)),
    "dilation": (lambda: [convolution(padding="same", dilation=2)], (2, 6, 6), (4, 6, 6)),
    "groups": (lambda: [convolution(padding="same", groups=2)], (2, 6, 6), (4, 6, 6)),
    "circular": (
        lambda: [convolution(padding="same", padding_mode="circular")], (2, 6, 6), (4, 6, 6)
    ),
    "sequence": (lambda: [lip.SpectralConv1d(2, 4, 3, padding="same")], (2, 9), (4, 9)),
    "shared": (lambda: [Twice(lip.SpectralLinear(8, 8))], (8,), (8,)),
    "shared convolution": (
        lambda: [Twice(lip.SpectralConv2d(2, 2, 3, padding="same"))], (2, 6, 6), (2, 6, 6)
    ),
}  # fmt: skip


def build(name):
    layers, input_shape, output_shape = MODELS[name]
    torch.manual_seed(0)
    return nn.Sequential(lip.BoundedInput(2.0), *layers()), input_shape, output_shape


@pytest.mark.parametrize("fraction", [1.0, 0.3, 0.01])
@pytest.mark.parametrize("name", MODELS)
def test_the_limit_holds_under_attack(name, fraction):
    model, input_shape, output_shape = build(name)
    loss = linear_functional()
    before = sensitivity(model, loss=loss, input_shape=input_shape).gradient_bounds
    limits = clip_products(model, fraction=fraction, loss=loss, input_shape=input_shape)
    after = sensitivity(model, loss=loss, input_shape=input_shape).gradient_bounds
    assert limits
    for parameter, bound in after.items():
        expected = fraction * before[parameter] if parameter in limits else before[parameter]
        assert bound == pytest.approx(expected)
    result = attack_bounds(
        model,
        loss=loss,
        input_shape=input_shape,
        targets=gaussian_targets(*output_shape),
        restarts=3,
        steps=25,
    )
    assert not result.violations()
    if fraction == 0.01 and name in ("linear", "linear on positions", "frobenius", "circular"):
        assert max(result.ratios.values()) > 0.75  # small limits are reached


def per_example_gradients(model, x, targets):
    loss = linear_functional()
    parameters = dict(model.named_parameters())

    def one(parameters, x, target):
        return loss.per_example(functional_call(model, parameters, (x[None],)), target[None])[0]

    return vmap(grad(one), in_dims=(None, 0, 0))(parameters, x, targets)


@pytest.mark.parametrize("name", [name for name in MODELS if "shared" not in name])
def test_a_batch_is_the_sum_of_clipped_examples(name):
    """What a batch gives equals per-example gradients, each scaled as its product says."""
    model, input_shape, output_shape = build(name)
    model = model.double()
    loss = linear_functional()
    x = torch.randn(7, *input_shape, dtype=torch.float64) * torch.logspace(-1, 1, 7).reshape(
        -1, *[1] * len(input_shape)
    )
    targets = torch.randn(7, *output_shape, dtype=torch.float64)
    clip_products(model, fraction=0.3, loss=loss, input_shape=input_shape)
    clipped = per_example_gradients(model, x, targets)
    model.zero_grad()
    loss.per_example(model(x), targets).sum().backward()
    for parameter, value in model.named_parameters():
        torch.testing.assert_close(value.grad, clipped[parameter].sum(dim=0))


@pytest.mark.parametrize("name", ["linear", "convolution", "circular", "dilation"])
def test_only_the_weight_gradient_is_scaled(name):
    """Outputs, input gradients and bias gradients are those of the same model without clipping."""
    model, input_shape, output_shape = build(name)
    plain = copy.deepcopy(model)
    clip_products(model, fraction=0.05, loss=1.0, input_shape=input_shape)
    x = torch.randn(4, *input_shape)
    cotangent = torch.randn(4, *output_shape)
    found = []
    for each in (model, plain):
        inputs = x.clone().requires_grad_()
        output = each(inputs)
        output.backward(cotangent)
        found.append((output, inputs.grad, dict(each.named_parameters())))
    torch.testing.assert_close(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])
    for parameter in found[0][2]:
        mine, theirs = (f[2][parameter].grad for f in found)
        if parameter.endswith("bias"):
            torch.testing.assert_close(mine, theirs)
        else:
            assert mine.norm() < 0.9 * theirs.norm()


def test_a_limit_above_everything_changes_nothing():
    model, input_shape, _ = build("convolution")
    plain = copy.deepcopy(model)
    clip_products(model, fraction=1.0, loss=10.0, input_shape=input_shape)
    x = torch.randn(4, *input_shape)
    for each in (model, plain):
        each(x).square().sum().mul(1e-3).backward()
    torch.testing.assert_close(model[1].weight.grad, plain[1].weight.grad)


def test_limits_are_per_example_before_the_division():
    """With every loss divided by b, the limit is divided as well: the same examples are clipped."""
    model, input_shape, output_shape = build("linear")
    clip_products(model, fraction=0.1, loss=1.0, input_shape=input_shape)
    x, targets = torch.randn(5, *input_shape), torch.randn(5, *output_shape)
    loss = linear_functional()
    loss.per_example(model(x), targets).sum().backward()
    whole = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for layer in (model[1], model[2]):
        layer.loss_scale = 1 / 50
    (loss.per_example(model(x), targets).sum() / 50).backward()
    for one, other in zip(whole, model.parameters(), strict=True):
        torch.testing.assert_close(one / 50, other.grad)


def test_taking_it_off():
    model, input_shape, _ = build("linear")
    plain = sensitivity(model, loss=1.0, input_shape=input_shape).gradient_bounds
    clip_products(model, fraction=0.3, loss=1.0, input_shape=input_shape)
    assert clip_products(model, fraction=None, loss=1.0, input_shape=input_shape) == {}
    assert sensitivity(model, loss=1.0, input_shape=input_shape).gradient_bounds == plain
    with pytest.raises(ValueError, match="fraction"):
        clip_products(model, fraction=1.5, loss=1.0, input_shape=input_shape)


def test_clipped_binary_cross_entropy_has_the_direction_of_kantorovich_rubinstein():
    """The paper's proposition: with a small threshold on the logit's gradient, a step on clipped
    binary cross-entropy points the way of a Kantorovich-Rubinstein step."""
    torch.manual_seed(0)
    model = nn.Sequential(
        lip.BoundedInput(1.0), lip.SpectralLinear(6, 8), lip.GroupSort(2),
        lip.SpectralLinear(8, 1), lip.ClipGradient(1e-4),
    ).double()  # fmt: skip
    twin = copy.deepcopy(model)
    twin[4] = nn.Identity()
    x = torch.randn(200, 6, dtype=torch.float64)
    labels = torch.randint(2, (200,))
    losses.BinaryCrossEntropy(reduction="sum")(model(x), labels).backward()
    losses.KantorovichRubinstein(reduction="sum")(twin(x), 2 * labels - 1).backward()
    for layer in (1, 3):
        one, other = model[layer].weight.grad, twin[layer].weight.grad
        cosine = (one * other).sum() / (one.norm() * other.norm())
        assert cosine > 1 - 1e-9
        assert one.norm() == pytest.approx(1e-4 * other.norm().item(), rel=1e-6)
    unclipped = copy.deepcopy(twin)
    unclipped.zero_grad()
    losses.BinaryCrossEntropy(tau=20.0, reduction="sum")(unclipped(x), labels).backward()
    one, other = unclipped[1].weight.grad, twin[1].weight.grad
    assert (one * other).sum() / (one.norm() * other.norm()) < 0.99  # clipping is what does it
