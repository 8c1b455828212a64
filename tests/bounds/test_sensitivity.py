"""The walk over the graph and the report: sharing, freezing, caching, plain data, cost."""

import json
import math
import time

import pytest
import torch
from torch import nn

from clipless import losses
from clipless import nn as lip
from clipless.bounds import Bound, _shapes, register, sensitivity, unregister
from clipless.errors import UnboundedSensitivityError


def bounds(model, shape, **options):
    return sensitivity(model, loss=1.0, input_shape=shape, **options).gradient_bounds


class Guarded(nn.Module):
    """A guard, then whatever `body` does with layers `a` and `b`."""

    def __init__(self, body, width=4):
        super().__init__()
        self.guard = lip.BoundedInput(2.0)
        self.a = lip.SpectralLinear(width, width)
        self.b = lip.SpectralLinear(width, width)
        self.body = body

    def forward(self, x):
        return self.body(self, self.guard(x))


def test_consumers_of_a_node_add_up():
    found = bounds(Guarded(lambda m, x: m.b(m.a(x)) + m.a(x)), (4,))
    # `a` is used twice: its gradient gets 1 from the plain use and 1 through b.
    assert found == {"a.weight": 4.0, "b.weight": 2.0}


def test_one_call_with_two_consumers():
    def body(m, x):
        y = m.a(x)
        return m.b(y) + y

    assert bounds(Guarded(body), (4,)) == {"a.weight": 4.0, "b.weight": 2.0}


def test_tied_weights_of_two_layers_add_up():
    model = Guarded(lambda m, x: m.b(m.a(x)))
    model.b.weight = model.a.weight
    report = sensitivity(model, loss=1.0, input_shape=(4,))
    assert report.gradient_bounds == {"a.weight": 4.0}
    assert report.parameters[0].uses == 2


def test_the_same_operand_twice():
    assert bounds(Guarded(lambda m, x: m.b((lambda y: y + y)(m.a(x)))), (4,)) == {
        "a.weight": 4.0,
        "b.weight": 4.0,
    }


def test_scalar_arithmetic():
    assert bounds(Guarded(lambda m, x: m.b(1 - m.a(x) / 4)), (4,)) == {
        "a.weight": 0.5,
        "b.weight": pytest.approx(2.5),
    }


def test_concatenation_is_pythagorean():
    model = Guarded(lambda m, x: torch.cat([m.a(x), m.b(x)], dim=1))
    report = sensitivity(model, loss=1.0, input_shape=(4,))
    assert report.output_bound == pytest.approx(2 * math.sqrt(2))
    assert report.gradient_bounds == {"a.weight": 2.0, "b.weight": 2.0}


def test_chunks_and_indexing():
    def body(m, x):
        first, second = m.a(x).chunk(2, dim=1)
        return torch.cat([first, 3 * second], dim=1)[:, 1:]

    assert bounds(Guarded(body), (4,))["a.weight"] == 2.0 * (1 + 3)


def test_reshape_with_the_size_of_the_batch():
    model = Guarded(lambda m, x: m.a(x).view(x.size(0), -1).reshape(x.shape[0], 2, 2).flatten(1))
    assert bounds(model, (4,))["a.weight"] == 2.0


def test_constant_buffers_scale_and_shift():
    model = Guarded(lambda m, x: m.a(x) * m.scale + m.shift)
    model.register_buffer("scale", torch.tensor([1.0, -3.0, 2.0, 0.5]))
    model.register_buffer("shift", torch.tensor([[3.0, 0.0, 4.0, 0.0]]))
    report = sensitivity(model, loss=1.0, input_shape=(4,))
    assert report.gradient_bounds["a.weight"] == 6.0
    assert report.output_bound == pytest.approx(2 * 3 + 5)
    model.scale.mul_(2)  # read afresh every time
    assert bounds(model, (4,))["a.weight"] == 12.0


def test_tensors_made_in_forward_leave_no_trace_on_the_model():
    model = Guarded(lambda m, x: m.a(x) * torch.tensor(2.0))
    before = set(vars(model))
    assert bounds(model, (4,))["a.weight"] == 4.0
    assert set(vars(model)) == before


def test_unused_and_frozen_parameters():
    model = Guarded(lambda m, x: m.a(x))
    assert bounds(model, (4,)) == {"a.weight": 2.0, "b.weight": 0.0}
    model.a.weight.requires_grad_(False)
    report = sensitivity(model, loss=1.0, input_shape=(4,))
    assert report.gradient_bounds == {"b.weight": 0.0}
    assert not report.parameters[0].trainable
    assert "frozen" in str(report)


def test_several_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = lip.SpectralLinear(3, 2), lip.SpectralLinear(5, 2)

        def forward(self, x, y):
            return self.left(x) + self.right(y)

    report = sensitivity(Two(), loss=1.0, input_shape=((3,), (5,)), input_norm=(1.0, 4.0))
    assert report.gradient_bounds == {"left.weight": 1.0, "right.weight": 4.0}
    assert report.lipschitz == pytest.approx(math.sqrt(2))


def test_gradient_clipping_caps_bounds_but_not_the_network():
    model = nn.Sequential(
        lip.BoundedInput(1.0), lip.SpectralLinear(4, 4, norm=3.0), lip.ClipGradient(0.1)
    )
    report = sensitivity(model, loss=5.0, input_shape=(4,))
    assert report.gradient_bounds["1.weight"] == pytest.approx(0.1)
    assert report.lipschitz == 3.0


def test_input_norm_can_be_promised():
    layer = nn.Sequential(lip.SpectralLinear(4, 2))
    with pytest.raises(UnboundedSensitivityError, match="BoundedInput"):
        bounds(layer, (4,))
    assert bounds(layer, (4,), input_norm=3.0) == {"0.weight": 3.0}


def test_losses_give_the_constant_for_the_number_of_outputs():
    model = nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(4, 9))
    report = sensitivity(model, loss=losses.MulticlassHinge(), input_shape=(4,))
    assert report.loss_lipschitz == pytest.approx(1 / 3)


def test_report_is_plain_data_and_a_table():
    model = nn.Sequential(lip.BoundedInput(1.0), lip.SpectralConv2d(1, 2, 3, bias=True))
    report = sensitivity(model, loss=1.0, input_shape=(1, 5, 5))
    data = json.loads(json.dumps(report.to_dict()))
    assert data["gradient_bounds"] == {"1.weight": 1.0, "1.bias": 3.0}
    assert data["global_bound"] == pytest.approx(math.sqrt(10))
    assert data["nodes"][1]["operation"] == "SpectralConv2d"
    text = str(report)
    assert "1.weight" in text
    assert "3.162" in text


def test_certificates_are_part_of_the_report():
    model = nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(4, 2))
    parameter = sensitivity(model, loss=1.0, input_shape=(4,)).parameters[0]
    assert parameter.certificate is not None
    assert parameter.certificate.holds


# --- rules of one's own --------------------------------------------------------------------------


class Halve(nn.Module):
    def forward(self, x):
        return x / 2


def test_a_rule_of_ones_own():
    """The documented way, also shown in the error for a missing rule."""
    model = nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(4, 4), Halve())
    assert bounds(model, (4,))["1.weight"] == 0.5  # traced through: it is ordinary code

    @register(Halve)
    def halve(site, x):
        return Bound(lipschitz=0.25, output=x.norm / 4, rows_apart=True)

    try:
        assert bounds(model, (4,))["1.weight"] == 0.25  # now a leaf, judged by its rule
        with pytest.raises(ValueError, match="already has a rule"):
            register(Halve)(halve)
    finally:
        unregister(Halve)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.factor.clamp(-1, 1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda x: Bound(1.0, x.norm, rows_apart=True), "every parameter needs a Jacobian bound"),
        (lambda x: Bound((1.0, 1.0), x.norm, {"factor": x.norm}), "2 Jacobian bounds for 1 input"),
        (lambda x: Bound(math.nan, x.norm, {"factor": x.norm}), "no bound"),
        (lambda x: Bound(-1.0, x.norm, {"factor": x.norm}), "no bound"),
        (lambda x: Bound(1.0, x.norm, {"factor": x.norm}, roundings=-1), "no bound"),
        (lambda x: Bound(1.0, x.norm, {"factor": x.norm}, roundings=math.nan), "no bound"),
        (lambda x: Bound(1.0, x.norm, {"factor": x.norm}), "does not state that rows stay apart"),
    ],
)
def test_answers_of_rules_are_checked(answer, words):
    register(Scale)(lambda site, x: answer(x))
    try:
        with pytest.raises(TypeError, match=words):
            bounds(nn.Sequential(lip.BoundedInput(1.0), Scale()), (4,))
    finally:
        unregister(Scale)


def test_a_rule_with_a_parameter():
    register(Scale)(lambda site, x: Bound(1.0, x.norm, {"factor": x.norm}, rows_apart=True))
    try:
        assert bounds(nn.Sequential(lip.BoundedInput(2.0), Scale()), (4,)) == {"1.factor": 2.0}
    finally:
        unregister(Scale)


# --- tracing anew, and cheaply -------------------------------------------------------------------


class Switch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = lip.SpectralLinear(4, 4)
        self.double = False

    def forward(self, x):
        y = self.layer(x)
        return y + y if self.double else y


@pytest.fixture
def traces(monkeypatch):
    """Count how often a model is traced."""
    count = []
    original = _shapes.trace
    monkeypatch.setattr(_shapes, "trace", lambda *a: (count.append(1), original(*a))[1])
    return count


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m[1], "double", True),
        lambda m: m.append(lip.SpectralLinear(4, 4)),
        lambda m: m[1].eval(),
        lambda m: m[1].layer.weight.requires_grad_(False),
        lambda m: m.__setitem__(1, lip.SpectralLinear(4, 2)),
    ],
    ids=["attribute", "layer added", "mode", "frozen", "layer replaced"],
)
def test_a_change_of_structure_traces_again(traces, change):
    model = nn.Sequential(lip.BoundedInput(1.0), Switch())
    bounds(model, (4,))
    change(model)
    bounds(model, (4,))
    assert len(traces) == 2


def test_a_switched_branch_is_seen():
    model = nn.Sequential(lip.BoundedInput(1.0), Switch())
    assert bounds(model, (4,))["1.layer.weight"] == 1.0
    model[1].double = True
    assert bounds(model, (4,))["1.layer.weight"] == 2.0


def test_models_can_be_freed():
    import gc
    import weakref

    model = nn.Sequential(lip.BoundedInput(1.0), Switch())
    bounds(model, (4,))
    ghost = weakref.ref(model)
    del model
    gc.collect()
    assert ghost() is None


def test_a_50_layer_residual_network_takes_less_than_a_second():
    blocks = [
        lip.Residual(
            nn.Sequential(
                lip.SpectralConv2d(32, 32, 3, padding="same"),
                lip.GroupSort(2),
                lip.SpectralConv2d(32, 32, 3, padding="same"),
            )
        )
        for _ in range(24)
    ]
    model = nn.Sequential(
        lip.BoundedInput(1.0),
        lip.SpectralConv2d(3, 32, 3, padding="same"),
        *blocks,
        lip.ScaledGlobalAvgPool2d(),
        lip.SpectralLinear(32, 10),
    )
    bounds(nn.Sequential(lip.BoundedInput(1.0)), (1,))  # torch's own first-use imports
    start = time.process_time()  # a busy machine takes longer, and computes no more
    report = sensitivity(model, loss=losses.CrossEntropy(), input_shape=(3, 32, 32))
    assert time.process_time() - start < 1.0
    assert len(report.parameters) == 50
    assert report.lipschitz == pytest.approx(1.0)


def test_a_report_draws_no_random_numbers_of_the_program():
    model = nn.Sequential(lip.BoundedInput(1.0), nn.Dropout(0.5), lip.SpectralLinear(4, 2)).train()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    sensitivity(model, loss=1.0, input_shape=(4,))
    assert torch.equal(torch.rand(3), expected)
