"""Models that turn, after their proof, to other ways to their parameters: bounds hold, or it stops.

Each does one thing in `forward` that the trace has not seen. Either it is refused, or no example
contributes more than its threshold, whatever the output and its graph have become; in ordinary and
in compiled passes.
"""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from clipless import losses
from clipless.errors import CliplessError
from clipless.privacy import BatchOptions, EnforcedBounds, PrivacyOptions
from tests.privacy.enforced.runs import enforced_run
from tests.privacy.enforced.test_compiled import norm

HUGE = 1e6


class Turncoat(nn.Module):
    def __init__(self, deed):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(8))
        self.deed, self.turned, self.kept = deed, [False], []

    def forward(self, x):
        if self.turned[0]:
            return self.deed(self, x)
        return self.head(torch.tanh(self.body(x)) * self.scale)


def the_weight_itself(model, x):
    return model.head(torch.tanh(model.body(x)) * model.scale) + HUGE * F.linear(
        x, model.body.weight[:3]
    )  # fmt: skip


def a_copy_of_the_parameter(model, x):
    weight = list(model.parameters())[1]
    return model.head(torch.tanh(model.body(x))) + HUGE * F.linear(x, weight[:3])


def a_second_use(model, x):
    twice = model.body(x) + HUGE * model.body(x * 2)
    return model.head(torch.tanh(twice) * model.scale)


def a_hook_on_an_activation(model, x):
    hidden = model.body(x)
    hidden.register_hook(lambda cotangent: cotangent * HUGE)
    return model.head(torch.tanh(hidden) * model.scale)


def a_hook_on_a_node(model, x):
    output = model.head(torch.tanh(model.body(x)) * model.scale)
    node, seen = output.grad_fn, 0
    while node is not None and seen < 10:
        node.register_prehook(lambda cotangents: tuple(
            None if c is None else c * HUGE for c in cotangents))  # fmt: skip
        node = next((each for each, _ in node.next_functions if each is not None), None)
        seen += 1
    return output


def a_gradient_inside(model, x):
    hidden = model.body(x)
    (slope,) = torch.autograd.grad(hidden.sum(), hidden, create_graph=True)
    return model.head(torch.tanh(hidden) * model.scale * slope * HUGE)


def a_loss_inside(model, x):
    output = model.head(torch.tanh(model.body(x)) * model.scale)
    return output + HUGE * model.head.weight.square().sum()


def the_layer_on_half_rows(model, x):
    halves = model.body(x.repeat(2, 1)).unflatten(0, (2, -1)).sum(0)
    return model.head(torch.tanh(halves) * model.scale)


def what_an_earlier_pass_left(model, x):
    hidden = model.body(x)
    model.kept.append(hidden)
    hidden = hidden + HUGE * model.kept[0][: len(x)].mean()
    return model.head(torch.tanh(hidden) * model.scale)


def the_leaf_behind_the_graph(model, x):
    output = model.head(torch.tanh(model.body(x)) * model.scale)
    waiting, found = [output.grad_fn], []
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [each for each, _ in getattr(node, "next_functions", ()) if each is not None]
    return output + HUGE * sum(leaf.sum() for leaf in found)


DEEDS = [
    the_weight_itself, a_copy_of_the_parameter, a_second_use, a_hook_on_an_activation,
    a_hook_on_a_node, a_gradient_inside, a_loss_inside, the_layer_on_half_rows,
    what_an_earlier_pass_left, the_leaf_behind_the_graph,
]  # fmt: skip


def contributions(session, x, cotangents):
    enforcement = session.enforcement
    for row in range(len(x)):
        alone = torch.zeros_like(cotangents)
        alone[row] = cotangents[row]
        with enforcement.stand_in():
            enforcement.begin_pass([x])
            if session._compiled is None:
                output = session.run_eagerly([x])
            else:
                output, _ = session._compiled._run_passes(x)
            yield enforcement.gradients(output, alone)


@pytest.mark.filterwarnings("ignore:.*uncompiled.*")
@pytest.mark.parametrize("compile", [None, "aot_eager"])
@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)
def test_a_model_that_turns_keeps_to_its_thresholds_or_is_stopped(deed, compile):
    torch.manual_seed(0)
    model, criterion = Turncoat(deed), losses.CrossEntropy()
    data = torch.randn(40, 6), torch.randint(3, (40,))
    engine, _, _ = enforced_run(
        model, data, criterion=criterion, bounds=EnforcedBounds(thresholds=0.05), compile=compile,
        options=PrivacyOptions(batches=BatchOptions(pad=True)),
    )  # fmt: skip
    session, x = engine.session, torch.randn(6, 6)
    model.turned[0] = True
    exceeded: list[tuple[float, float]] = []
    bounds = [session.plan.sensitivities[each.name] for each in session.plan.parameters]
    # Compilers have errors of their own.
    with contextlib.suppress(CliplessError, RuntimeError, AssertionError):
        for found in contributions(session, x, HUGE * torch.randn(6, 3)):
            for gradient, bound in zip(found, bounds, strict=True):
                if gradient is not None and not norm(gradient) <= bound:
                    exceeded.append((norm(gradient), bound))
    engine.detach()
    assert not exceeded
