"""Constructions that once passed with bounds that were not true.

Each of them must be refused, or get bounds that hold.
"""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from clipless import nn as lip
from clipless.errors import (
    CliplessError,
)
from tests.bounds.refused import Code, assert_refused_or_true, guarded, refusal, report_of


def test_the_check_itself_can_fail():
    model = guarded(lip.SpectralLinear(4, 4))
    assert_refused_or_true(model, (4,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lip.SpectralLinear, "forward", lambda self, x: 2 * F.linear(x, self.weight))
        with pytest.raises(AssertionError):
            assert_refused_or_true(model, (4,))
        patch.setattr(lip.SpectralLinear, "forward", lambda self, x: x - x.mean(0))
        assert "mixes rows" in refusal(model)
        hidden = lambda self, x: x - x.mean(0) if len(x) > 3 else x  # noqa: E731
        patch.setattr(lip.SpectralLinear, "forward", hidden)
        with pytest.raises(AssertionError):
            assert_refused_or_true(model, (4,))


@pytest.mark.parametrize(
    "line",
    [
        lambda m, x: x * (1 + x.shape[0] // 4),
        lambda m, x: x * (1 + 9 * (x.shape[0] > 4)),
        lambda m, x: x / (1 / (1 + x.size(0) // 4)),
        lambda m, x: x + x.shape[0] // 4,
    ],
)
def test_numbers_that_depend_on_large_batches_only(line):
    """Two trial batches agree on `n // 4`; a batch of eight does not."""
    assert_refused_or_true(guarded(Code(line)), (4,))


def test_shapes_that_mix_examples_in_large_batches_only():
    def mix(m, x):
        n = x.shape[0]
        return m.layers[0](x.reshape(n - 4 * (n // 8), -1)).reshape(n, -1)

    assert_refused_or_true(guarded(Code(mix, lip.LayerCentering())), (4,))


def test_axes_that_become_the_batch_in_large_batches_only():
    message = refusal(guarded(Code(lambda m, x: x.amax(dim=1 - x.shape[0] // 8))), (4, 3))
    assert "batch" in message


SPIKE_1D = torch.eye(7)[3].expand(2, 7) * 0.5
SPIKE_2D = torch.outer(torch.eye(7)[3], torch.eye(7)[3]).expand(2, 7, 7) * 0.5


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (nn.MaxPool1d(3, 1), SPIKE_1D),
        (nn.MaxPool2d(3, 1), SPIKE_2D),
        (nn.AvgPool1d(3, 1), SPIKE_1D),
        (nn.AvgPool2d(3, 1, divisor_override=1), torch.full((2, 7, 7), 0.5 / 7)),
        (nn.AvgPool2d((3, 3), 1), torch.full((2, 7, 7), 0.5 / 7)),
        (nn.AdaptiveAvgPool1d(14), torch.full((2, 7), 0.1)),
        (nn.AdaptiveAvgPool2d((14, 7)), torch.full((2, 7, 7), 0.5 / 7)),
        (Code(lambda m, x: F.max_pool1d(x, 3, 1)), SPIKE_1D),
        (Code(lambda m, x: F.max_pool2d(x, 3, 1)), SPIKE_2D),
        (Code(lambda m, x: F.adaptive_avg_pool1d(x, 14)), torch.full((2, 7), 0.1)),
        (lip.ScaledAvgPool1d(3, 1), SPIKE_1D),
        (lip.ScaledL2NormPool2d(3, 1), SPIKE_2D),
    ],
    ids=lambda value: repr(value) if isinstance(value, nn.Module) else "",
)
def test_pooling_without_a_channel_axis(module, inputs):
    """torch takes (batch, length) for one example of many channels: windows run over all axes."""
    assert_refused_or_true(guarded(module), tuple(inputs.shape[1:]), inputs)


def test_padding_that_reaches_the_batch():
    """Adding a row above and removing one below hands every example to its neighbour."""
    assert_refused_or_true(guarded(nn.ZeroPad2d((0, 0, 1, -1))), (4,))


@pytest.mark.parametrize("shape", [(2,), (2, 3)])
def test_householder_on_fewer_channels_than_angles(shape):
    assert_refused_or_true(guarded(lip.Householder(8)), shape)


@pytest.mark.parametrize("dim", [(), []])
def test_centering_over_no_axes(dim):
    try:
        layer = lip.LayerCentering(dim)
    except ValueError:
        return
    assert_refused_or_true(guarded(layer), (4,))


class TenfoldGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, cotangent):
        return 10 * cotangent


class TenfoldGradientNewStyle(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, cotangent):
        return 10 * cotangent


@pytest.mark.parametrize("function", [TenfoldGradient, TenfoldGradientNewStyle])
def test_a_users_own_backward_pass(function):
    """Symbolic tracing sees the forward of an autograd function and never its backward."""
    block = Code(lambda m, x: function.apply(m.layers[0](x)), lip.SpectralLinear(4, 4))
    assert_refused_or_true(guarded(block), (4,))


def test_augmented_assignment_changes_other_names():
    """`h *= 10` works in place on a tensor, and every other name of it changes as well."""

    def alias(m, x):
        hidden = m.layers[0](x)
        kept = hidden
        hidden *= 10
        return kept

    assert_refused_or_true(guarded(Code(alias, lip.SpectralLinear(4, 4))), (4,))


def test_branches_on_whether_a_value_is_a_tensor():
    """While a model is traced its values are no tensors, and such a branch goes the other way."""
    for line in (
        lambda m, x: 10 * x if isinstance(x, torch.Tensor) else x,
        lambda m, x: 10 * x if torch.is_tensor(x) else x,
    ):
        assert_refused_or_true(guarded(Code(line)), (4,))


@pytest.mark.parametrize(
    "fetch",
    [
        lambda m: next(m.parameters()),
        lambda m: dict(m.named_parameters())["gain"],
        lambda m: m._parameters["gain"],
        lambda m: m.get_parameter("gain"),
    ],
)
def test_parameters_reached_by_other_routes(fetch):
    block = Code(lambda m, x: x * fetch(m).exp(), gain=nn.Parameter(torch.zeros(4)))
    assert_refused_or_true(guarded(block), (4,))


def test_hooks_on_parameters():
    model = guarded(lip.SpectralLinear(4, 4))
    model[1].weight.register_hook(lambda gradient: 10 * gradient)
    assert_refused_or_true_after_backward(model)


def test_hooks_on_all_modules():
    from torch.nn.modules import module as machinery

    def tenfold(module, inputs, output):
        return 10 * output if type(module) is lip.SpectralLinear else None

    handle = machinery.register_module_forward_hook(tenfold)
    try:
        assert_refused_or_true(guarded(lip.SpectralLinear(4, 4)), (4,))
    finally:
        handle.remove()


def assert_refused_or_true_after_backward(model):
    try:
        report = report_of(model)
    except CliplessError:
        return
    model(torch.tensor([[0.5, 0.0, 0.0, 0.0]])).norm().backward()
    for name, bound in report.gradient_bounds.items():
        assert model.get_parameter(name).grad.norm() <= bound * (1 + 1e-5)


def test_circular_padding_changed_after_construction():
    layer = lip.SpectralConv1d(1, 3, 3, padding="same", padding_mode="circular")
    model = guarded(layer)
    report_of(model, (1, 4))
    layer.padding = ((4, 4),)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(3)[:, None])
    layer.project()
    assert_refused_or_true(model, (1, 4), torch.full((2, 1, 4), 0.2))


@pytest.mark.parametrize("module", [nn.LeakyReLU(math.nan), nn.ELU(math.nan)], ids=repr)
def test_slopes_that_are_no_numbers(module):
    with pytest.raises(CliplessError):
        report_of(guarded(module))


def test_softplus_with_a_jump_has_no_lipschitz_constant():
    """Beyond its threshold torch returns x itself: at threshold 0 the value jumps by log 2."""
    model = guarded(nn.Softplus(beta=1.0, threshold=0.0)).double()
    try:
        report = report_of(model, (1,))
    except CliplessError:
        return
    a, b = torch.tensor([[0.0]]).double(), torch.tensor([[1e-3]]).double()
    assert (model(a) - model(b)).norm() <= report.lipschitz * (a - b).norm() * (1 + 1e-6)


@pytest.mark.parametrize(
    "first", [lip.BallProjection(1.0), nn.Tanh(), nn.Sigmoid(), nn.Hardtanh()], ids=repr
)
def test_bounded_activations_are_no_input_guard(first):
    """They bound finite inputs, and hand on a NaN, which would destroy every weight."""
    model = nn.Sequential(first, lip.SpectralLinear(4, 4))
    try:
        report = report_of(model)
    except CliplessError:
        return
    model(torch.tensor([[math.nan, math.inf, 1.0, 0.0]])).sum().backward()
    assert model[1].weight.grad.norm() <= report.gradient_bounds["1.weight"] * (1 + 1e-5)


class Counting(nn.Module):
    """Its forward depends on how often it was called."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1.0 if self.calls < 4 else 10.0)


def test_a_forward_that_changes_its_own_module():
    model = guarded(Counting())
    try:
        report = report_of(model)
    except CliplessError:
        return
    x = torch.tensor([[0.5, 0.0, 0.0, 0.0]])
    assert all(model(x).norm() <= report.output_bound for _ in range(8))
