"""What is refused about parameters, hooks, constants, guards, weights, ends and odd calls."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from clipless import nn as lip
from clipless.bounds import sensitivity
from clipless.errors import (
    CliplessError,
    ConstraintError,
    UnboundedSensitivityError,
)
from tests.bounds.refused import Code, guarded, refusal, report_of

# Parameters used directly ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        lambda m, x: x * m.gain,
        lambda m, x: x + m.gain,
        lambda m, x: m.gain - x,
        lambda m, x: x / m.gain,
        lambda m, x: x * m.gain.abs(),
        lambda m, x: torch.maximum(x, m.gain),
        lambda m, x: m.layers[0](x) * m.layers[0].weight[0],
        lambda m, x: torch.cat([x, m.gain.reshape(1, 4)], 1),
    ],
)
def test_direct_use_of_a_parameter(line):
    block = Code(line, lip.SpectralLinear(4, 4), gain=nn.Parameter(torch.ones(4)))
    message = refusal(guarded(block))
    assert "in the forward of 1" in message


def test_direct_use_of_a_parameter_names_it_and_the_remedy():
    block = Code(lambda m, x: x * m.gain, gain=nn.Parameter(torch.ones(4)))
    message = refusal(guarded(block))
    assert "'1.gain'" in message
    assert "project()" in message
    assert "registered rule" in message


# Modules that are no longer what their type says ------------------------------------------------


def test_hooks():
    for register in (
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ):
        model = guarded(nn.Sequential(lip.SpectralLinear(4, 4)))
        report_of(model)  # the graph is known; the hook must be noticed all the same

        def scale(*arguments):
            return None

        handle = getattr(model[1][0], register)(scale)
        message = refusal(model)
        assert message.startswith("1.0 (SpectralLinear): ")
        assert "scale" in message
        assert "Remove it" in message
        handle.remove()
        report_of(model)


def test_hooks_on_containers_and_the_model():
    model = guarded(nn.Sequential(lip.SpectralLinear(4, 4)))
    handle = model[1].register_forward_hook(lambda *a: None)
    assert refusal(model).startswith("1 (Sequential)")
    handle.remove()
    model.register_forward_hook(lambda *a: None)
    assert refusal(model).startswith("the model (Sequential)")


def test_a_replaced_forward():
    model = guarded(lip.SpectralLinear(4, 4))
    report_of(model)
    model[1].forward = lambda x: 100 * x
    message = refusal(model)
    assert message.startswith("1 (SpectralLinear)")
    assert "forward was replaced" in message
    assert "module of its own" in message


def test_parametrizations():
    model = guarded(lip.SpectralLinear(4, 4))
    report_of(model)
    parametrize.register_parametrization(model[1], "weight", nn.Identity())
    message = refusal(model)
    assert message.startswith("1 (ParametrizedSpectralLinear)")
    assert "subclass of SpectralLinear" in message


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_old_style_weight_norm():
    model = guarded(torch.nn.utils.weight_norm(lip.SpectralLinear(4, 4)))
    assert "hook" in refusal(model)


def test_a_replaced_submodule_is_noticed():
    model = guarded(lip.SpectralLinear(4, 4), nn.ReLU())
    report_of(model)
    model[2] = nn.BatchNorm1d(4)
    assert "mixes examples" in refusal(model)


# Arithmetic ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (lambda m, x: x * x, "multiplies two tensors"),
        (lambda m, x: torch.mul(x, m.layers[0](x)), "multiplies two tensors"),
        (lambda m, x: x * torch.sigmoid(x), "multiplies two tensors"),
        (lambda m, x: x / x, "divides by a tensor"),
        (lambda m, x: 1 / x, "divides by a tensor"),
        (lambda m, x: x / 0, "divides by zero"),
        (lambda m, x: x / torch.tensor([1.0, 0, 1, 1]), "divides by zero"),
        (lambda m, x: x * math.inf, "not finite"),
        (lambda m, x: x * math.nan, "not finite"),
        (lambda m, x: x * torch.tensor([1.0, math.nan, 1, 1]), "not finite"),
        (lambda m, x: x + torch.tensor([1.0, math.nan, 1, 1]), "no bound|not finite"),
        (lambda m, x: x[:, :1] + x, "broadcasts"),
        (lambda m, x: x.mean(1, keepdim=True) - x, "broadcasts"),
        (lambda m, x: x[:, :1] * torch.ones(4), "broadcasts"),
        (lambda m, x: x[:, [0, 0]], "repeat entries"),
        (lambda m, x: x[:, torch.tensor([0, 0])], "repeat entries"),
    ],
)
def test_arithmetic_without_a_bound(line, reason):
    message = refusal(guarded(Code(line, lip.GroupSort(2))))
    assert "in the forward of 1" in message
    assert any(part in message for part in reason.split("|"))


# The input guard -------------------------------------------------------------------------------


def test_a_missing_guard_names_the_layer_and_the_remedy():
    message = refusal(
        nn.Sequential(nn.Flatten(), lip.SpectralLinear(4, 2)), error=UnboundedSensitivityError
    )
    assert message.startswith("1.weight: ")
    assert "clipless.nn.BoundedInput(norm=...)" in message
    assert "input_norm=" in message


def test_a_guard_behind_the_first_layer_comes_too_late():
    model = nn.Sequential(lip.SpectralLinear(4, 2), lip.BoundedInput(1.0))
    assert "0.weight" in refusal(model, error=UnboundedSensitivityError)


def test_a_guard_on_one_of_two_inputs_is_not_enough():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.guard = lip.BoundedInput(1.0)
            self.a, self.b = lip.SpectralLinear(4, 2), lip.SpectralLinear(3, 2)

        def forward(self, x, y):
            return self.a(self.guard(x)) + self.b(y)

    message = refusal(Two(), ((4,), (3,)), error=UnboundedSensitivityError)
    assert message.startswith("b.weight")


def test_a_frozen_layer_needs_no_guard():
    model = nn.Sequential(lip.SpectralLinear(4, 2).requires_grad_(False))
    assert report_of(model).gradient_bounds == {}


def test_a_sphere_in_the_middle_has_no_lipschitz_constant():
    model = guarded(lip.SpectralLinear(4, 4), lip.BoundedInput(1.0, "sphere"))
    message = refusal(model, error=UnboundedSensitivityError)
    assert message.startswith("1.weight")
    assert "sphere" in message


@pytest.mark.parametrize("norm", [0, -1.0, math.nan, math.inf, [1.0, 2.0]])
def test_input_norms_must_be_positive(norm):
    with pytest.raises(ValueError, match="input_norm"):
        report_of(nn.Sequential(lip.SpectralLinear(4, 2)), input_norm=norm)


# Weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [2.0, math.nan, math.inf])
def test_weights_outside_their_constraint(value):
    model = guarded(nn.Sequential(lip.SpectralLinear(4, 4)))
    report_of(model)
    model[1][0].weight.data.mul_(value)
    message = refusal(model, error=ConstraintError)
    assert message.startswith("1.0.weight ")
    assert "clipless.nn.project(model)" in message


def test_a_bias_outside_its_ball():
    model = guarded(lip.SpectralLinear(4, 4, bias=True))
    nn.init.constant_(model[1].bias, 1.0)
    assert refusal(model, error=ConstraintError).startswith("1.bias ")


def test_unused_layers_are_certified_too():
    model = guarded(Code(lambda m, x: x, lip.SpectralLinear(4, 4)))
    model[1].layers[0].weight.data.mul_(2)
    assert "1.layers.0.weight" in refusal(model, error=ConstraintError)


# Inputs and outputs ----------------------------------------------------------------------------


def test_the_number_of_inputs():
    model = guarded(lip.SpectralLinear(4, 2))
    with pytest.raises(ValueError, match=r"takes 1 input\(s\), but input_shape names 2"):
        report_of(model, ((4,), (4,)))


@pytest.mark.parametrize("shape", [(0,), (-1, 4), (4, 0)])
def test_shapes_must_be_positive(shape):
    with pytest.raises(ValueError, match="input_shape"):
        report_of(guarded(nn.Identity()), shape)


def test_a_shape_that_is_one_number():
    """One axis is easily written without its comma: understood, or refused by name."""
    try:
        assert report_of(guarded(nn.Identity()), 4).input_shapes == ((4,),)
    except (TypeError, ValueError) as error:
        assert "input_shape" in str(error)  # noqa: PT017


def test_a_shape_the_model_cannot_take_names_the_layer():
    message = refusal(guarded(lip.SpectralLinear(4, 2)), (5,))
    assert message.startswith("1: ")
    assert "(5,)" in message


@pytest.mark.parametrize(
    "line",
    [
        lambda m, x: (x, x),
        lambda m, x: [x],
        lambda m, x: {"logits": x},
        lambda m, x: x.chunk(2, 1),
        lambda m, x: None,
        lambda m, x: torch.ones(4),
        lambda m, x: x.shape,
    ],
)
def test_the_output_must_be_one_tensor(line):
    message = refusal(Code(line), input_norm=1.0)
    assert "return one tensor" in message


@pytest.mark.parametrize("loss", [0.0, -1.0, math.nan, math.inf])
def test_loss_constants_must_be_positive(loss):
    with pytest.raises(ValueError, match="Lipschitz constant"):
        sensitivity(guarded(nn.Identity()), loss=loss, input_shape=(4,))


# Layers outside the conditions of their rule ----------------------------------------------------


def circular(kernel, stride=1, dilation=1):
    return lip.SpectralConv1d(1, 1, kernel, stride, "same", dilation, padding_mode="circular")


@pytest.mark.parametrize(
    ("module", "shape", "remedy"),
    [
        (circular(3, stride=4), (1, 6), "stride divide"),
        (circular(5), (1, 4), "must fit the image"),
        (circular(3, dilation=3), (1, 6), "must fit the image"),
        (lip.SpectralConv1d(1, 1, 3, certificate_size=5), (1, 6), "certificate_size"),
        (
            lip.SpectralConv1d(
                1, 1, 3, padding="same", padding_mode="circular", certificate_size=6
            ),
            (1, 5),
            "certificate_size",
        ),
        (nn.AvgPool2d(2, padding=1, count_include_pad=False), (1, 4, 4), "count_include_pad=True"),
        (nn.AvgPool1d(2, padding=1, count_include_pad=False), (1, 4), "count_include_pad=True"),
        (nn.AvgPool2d(2, ceil_mode=True), (1, 5, 5), "ceil_mode=False"),
        (nn.AvgPool1d(2, ceil_mode=True), (1, 5), "ceil_mode=False"),
        (nn.MaxPool2d(2, return_indices=True), (1, 4, 4), "return_indices=False"),
        (nn.AdaptiveAvgPool2d(3), (1, 4, 4), "divides"),
        (nn.AdaptiveAvgPool1d(8), (1, 4), "divide"),
        (nn.Dropout(1.0), (4,), "p < 1"),
        (nn.Softplus(beta=-1), (4,), "beta"),
        (nn.Softplus(threshold=-1), (4,), "threshold"),
        (nn.Hardtanh(0.5, 1.0), (4,), "0"),
    ],
    ids=repr,
)
def test_layers_outside_the_conditions_of_their_rule(module, shape, remedy):
    message = refusal(guarded(nn.Sequential(module)), shape)
    assert message.startswith("1.0: ")
    assert remedy in message


def test_pooling_functions_outside_their_conditions():
    for line, remedy in (
        (lambda m, x: F.avg_pool1d(x, 2, ceil_mode=True), "ceil_mode=False"),
        (lambda m, x: F.avg_pool1d(x, 2, 2, 1, False, False), "count_include_pad=True"),
    ):
        message = refusal(guarded(Code(line)), (1, 5))
        assert "in the forward of 1" in message
        assert remedy in message


# Odd calls: refused in this library's own words, whatever their arguments ------------------------

ODD = {
    "keyword of the input": lambda m, x: torch.mean(input=x, dim=1),
    "another dtype": lambda m, x: x.mean(1, dtype=torch.float32),
    "alias of dim": lambda m, x: x.mean(axis=1),
    "dims by keyword": lambda m, x: torch.permute(x, dims=(0, 2, 1)),
    "rounding division": lambda m, x: torch.div(x, 2, rounding_mode="floor"),
    "boolean constant": lambda m, x: x * torch.tensor(True),
    "boolean number": lambda m, x: x * True,
    "complex number": lambda m, x: x * 1j,
    "no index": lambda m, x: x[()],
    "several results sliced": lambda m, x: x.chunk(2, 1)[0:2][0],
    "several results repeated": lambda m, x: (x.chunk(2, 1) * 2)[0],
    "several results joined": lambda m, x: (x.chunk(2, 1) + x.chunk(2, 1))[0],
    "empty constant": lambda m, x: x[:, :0] * torch.zeros(0, 3),
    "viewed as integers": lambda m, x: x.view(torch.int32),
    "viewed as integers by keyword": lambda m, x: x.view(dtype=torch.int32),
    "output argument": lambda m, x: torch.add(x, x, out=x),
    "nothing times the unbounded": lambda m, x: x * 0,
    "axis from the size of the batch": lambda m, x: x * x.shape[x.shape[0] - 2],
    "axis from the rank": lambda m, x: x / x.size(x.dim() - 1),
}


@pytest.mark.parametrize("name", list(ODD))
def test_odd_calls_end_in_a_refusal_or_a_bound(name):
    model = Code(ODD[name])
    if name != "nothing times the unbounded":
        model = guarded(model)
    try:
        report = report_of(model, (4, 3))
    except CliplessError as error:
        assert len(str(error)) > 40  # noqa: PT017
    else:
        assert math.isfinite(report.lipschitz)
