"""Ways to a parameter's gradient that are not a planned use of its layer: none of them leads there.

Every model passes its proof and does something else afterwards, as in `test_enforcement`.
"""

import types

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from clipless import nn as lip
from tests.privacy.misuse_helpers import bounded_or_refused

SWITCH = types.SimpleNamespace(on=False)


@pytest.fixture(autouse=True)
def switched_off():
    SWITCH.on = False
    yield
    SWITCH.on = False


class Odd(nn.Module):
    """Two layers, used in an odd way once a global says so."""

    shape = (6,)

    def __init__(self):
        super().__init__()
        self.guard = lip.BoundedInput(1.0)
        self.first = lip.SpectralLinear(6, 8, bias=True)
        self.second = lip.SpectralLinear(8, 3)

    def forward(self, x):
        hidden = self.first(self.guard(x))
        return self.odd(hidden) if SWITCH.on else self.second(hidden)


class DoubleBackward(Odd):
    """A gradient with respect to an input is a function of the weight."""

    def odd(self, hidden):
        probe = hidden.detach().requires_grad_()
        output = self.second(probe)
        (slope,) = torch.autograd.grad(output.sum(), probe, create_graph=True)
        return output + 1e4 * slope[:, :3]


class DoubleBackwardOfConvolution(Odd):
    shape = (1, 4, 4)

    def __init__(self):
        super().__init__()
        self.first = lip.SpectralConv2d(1, 2, 3, padding="same", bias=True)
        self.second = nn.Sequential(nn.Flatten(), lip.SpectralLinear(32, 3))

    def forward(self, x):
        x = self.guard(x)
        if not SWITCH.on:
            return self.second(self.first(x))
        probe = x.detach().requires_grad_()
        hidden = self.first(probe)
        (slope,) = torch.autograd.grad(hidden.sum(), probe, create_graph=True)
        return self.second(hidden) + 1e4 * slope.flatten(1)[:, :3]


class PullBack(Odd):
    def odd(self, hidden):
        output, pull = torch.func.vjp(self.second, hidden)
        return output + 1e4 * pull(torch.ones_like(output))[0][:, :3]


class ForwardMode(Odd):
    def odd(self, hidden):
        output, slope = torch.func.jvp(self.second, (hidden,), (1e4 * torch.ones_like(hidden),))
        return output + slope


class Mapped(Odd):
    """One call becomes a hundred, of which each would have the bound of one."""

    def odd(self, hidden):
        several = 1e4 * hidden.expand(100, *hidden.shape)
        return torch.func.vmap(self.second)(several).sum(0)


class MappedExamples(Odd):
    def odd(self, hidden):
        return torch.func.vmap(self.second)(1e4 * hidden)


class Replaced(Odd):
    """The layer's parameters are other tensors for the time of a call."""

    def odd(self, hidden):
        own = {name: 1e4 * p for name, p in self.second.named_parameters()}
        return torch.func.functional_call(self.second, own, hidden)


class Checkpointed(Odd):
    def odd(self, hidden):
        return checkpoint(lambda h: self.second(1e4 * h), hidden, use_reentrant=SWITCH.reentrant)


class ClassMethod(Odd):
    def odd(self, hidden):
        return type(self.second).forward(self.second, 1e4 * hidden) + self.second(hidden)


class Recursive(Odd):
    def odd(self, hidden):
        SWITCH.on = False
        again = Odd.forward(self, 1e4 * hidden[:, :6])
        SWITCH.on = True
        return self.second(1e4 * hidden) + again


class SecondModel(Odd):
    """The model calls itself, hooks included, in the middle of its pass."""

    def odd(self, hidden):
        SWITCH.on = False
        inner = self(hidden[:, :6].detach())
        SWITCH.on = True
        return self.second(1e4 * hidden) + inner


class NewLayer(Odd):
    def odd(self, hidden):
        weight = self.second.weight
        self.second = lip.SpectralLinear(8, 3)
        self.second.weight = weight
        return self.second(1e4 * hidden)


class TensorHook(Odd):
    def odd(self, hidden):
        hidden.register_hook(lambda cotangent: 1e4 * cotangent)
        return self.second(hidden)


class OtherSaved(Odd):
    """What a layer keeps for its backward pass is something else when it is taken out again."""

    def odd(self, hidden):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: 1e4 * x):
            return self.second(hidden)


KINDS = [
    DoubleBackward, DoubleBackwardOfConvolution, PullBack, ForwardMode, Mapped, MappedExamples,
    Replaced, Checkpointed, ClassMethod, Recursive, SecondModel, NewLayer, TensorHook, OtherSaved,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_other_way_leads_to_a_gradient(kind, reentrant, monkeypatch):
    if reentrant and kind is not Checkpointed:
        pytest.skip("says how activations are checkpointed")
    SWITCH.reentrant = reentrant
    # What is held to a bound must be, whether a trial is held or not.
    monkeypatch.setattr("clipless.privacy.step._row_trial.RowTrial.hold", lambda *_: False)

    def build():
        SWITCH.on = False
        return kind()

    def attack(run):
        run.step()
        SWITCH.on = True
        run.step()

    bounded_or_refused(attack, build=build, shape=kind.shape)
