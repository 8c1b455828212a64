"""Bounds that hold by construction: whatever `forward` really does, one example stays in its bound.

Every model here passes its proof, and then does something else: it reads a global, an edited
buffer, a list of layers, random numbers. The sums of two data sets of which one example differs may
then differ by twice the sensitivity, and parameters without a bound have a gradient of zero.
"""

import math
import types
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipless
from clipless import bounds
from clipless import nn as lip
from clipless.errors import PrivacyError
from clipless.kernels import example_norm
from clipless.kernels._bounded_gradients import _factors
from tests.privacy.misuse_helpers import bounded_or_refused, full, gradients_of, neighbours
from tests.privacy.runs import Run, examples

SWITCH = types.SimpleNamespace(on=False, factor=1.0, rows=None)


@pytest.fixture(autouse=True)
def switched_off():
    SWITCH.on, SWITCH.factor = False, 1.0
    yield
    SWITCH.on, SWITCH.factor = False, 1.0


def fresh(kind):
    """How a model is built before anything of it is changed."""

    def build():
        SWITCH.on, SWITCH.factor = False, 1.0
        return kind()

    return build


class Slotted:
    __slots__ = ("factor",)

    def __init__(self):
        self.factor = 1.0


class Odd(nn.Module):
    """Two layers, and something that neither the trace nor a look at attributes shows."""

    def __init__(self):
        super().__init__()
        self.guard = lip.BoundedInput(1.0)
        self.first = lip.SpectralLinear(6, 8, bias=True)
        self.second = lip.SpectralLinear(8, 3)
        self.extra = lip.SpectralLinear(8, 8)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("shift", torch.zeros(8))
        self.numbers = np.ones(1)
        self.slots = Slotted()
        self.functions = [torch.relu]

    def middle(self, x):
        return x

    def forward(self, x):
        return self.second(self.middle(self.first(self.guard(x))))


class Global(Odd):
    def middle(self, x):
        return x * SWITCH.factor

    def change(self):
        SWITCH.factor = 225.0


class Closure(Odd):
    def __init__(self):
        super().__init__()
        factor = [1.0]
        self.scale, self.change = lambda x: x * factor[0], lambda: factor.__setitem__(0, 225.0)

    def middle(self, x):
        return self.scale(x)


class Numpy(Odd):
    def middle(self, x):
        return x * float(self.numbers[0])

    def change(self):
        self.numbers[0] = 225.0


class Slots(Odd):
    def middle(self, x):
        return x * self.slots.factor

    def change(self):
        self.slots.factor = 225.0


class Buffer(Odd):
    def middle(self, x):
        return x + self.shift

    def change(self):
        self.shift.fill_(1000.0)


class Frozen(Odd):
    def middle(self, x):
        return x * self.frozen

    def change(self):
        with torch.no_grad():
            self.frozen.fill_(225.0)


class FunctionsInLists(Odd):
    def middle(self, x):
        return self.functions[0](x)

    def change(self):
        self.functions[0] = lambda x: 225 * x


class WeightUsedDirectly(Odd):
    def middle(self, x):
        if SWITCH.on:
            return x + 100 * F.linear(x, self.second.weight).sum(1, keepdim=True)
        return x

    def change(self):
        SWITCH.on = True


class CalledMoreOften(Odd):
    def forward(self, x):
        x = self.guard(x)
        out = self.second(self.first(x))
        if SWITCH.on:
            for _ in range(20):
                out = out + self.second(self.first(x))
        return out

    def change(self):
        SWITCH.on = True


class RandomDepth(Odd):
    def middle(self, x):
        return x * 225 if SWITCH.on and torch.rand(1) < 2 else x

    def change(self):
        SWITCH.on = True


class OtherBackward(Odd):
    def middle(self, x):
        return _Amplified.apply(x) if SWITCH.on else x

    def change(self):
        SWITCH.on = True


class _Amplified(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        return 1e4 * cotangent


class OverwrittenInput(Odd):
    """In a way that autograd does not notice, when the layer has already seen it."""

    def middle(self, x):
        out = self.second(x)
        if SWITCH.on:
            x.data.mul_(1000)
        return out

    def forward(self, x):
        return self.middle(self.first(self.guard(x)))

    def change(self):
        SWITCH.on = True


ODD = [
    OverwrittenInput,
    Global, Closure, Numpy, Slots, Buffer, Frozen, FunctionsInLists, WeightUsedDirectly,
    CalledMoreOften, RandomDepth, OtherBackward,
]  # fmt: skip


def attacked(run):
    """A step as planned, then the change, then another one."""
    run.step()
    run.model.change()
    run.step()


@pytest.mark.parametrize("kind", ODD, ids=lambda kind: kind.__name__)
def test_one_example_stays_within_its_bound(kind):
    if bounded_or_refused(attacked, build=fresh(kind)):
        assert kind in (RandomDepth,)  # of which the trace may see that it draws numbers


# The leaves alone cut off what a weight gets by another way; one model is refused by its trace.
BOUNDED_BY_SCALING = [kind for kind in ODD if kind not in (WeightUsedDirectly, RandomDepth)]


@pytest.mark.parametrize("kind", BOUNDED_BY_SCALING, ids=lambda kind: kind.__name__)
def test_without_enforcement_it_would_not(kind, monkeypatch):
    """The same attacks, with layers that compute as they do outside of private training."""
    monkeypatch.setattr(
        "clipless.privacy.step._enforcement._BoundedCall.__call__",
        lambda call, x: _unbounded(call, x),
    )
    monkeypatch.setattr("clipless.privacy.step._row_trial.RowTrial.hold", lambda *_: None)
    with pytest.raises(AssertionError, match="one example moved the sum"):
        bounded_or_refused(attacked, build=fresh(kind))


def _unbounded(call, x):
    use = min(call.used, len(call._uses) - 1)
    seen = {n: p if p is None else p.to(x.dtype) for n, p in call._parameters[use].items()}
    return call.module.forward_bounded(x, seen, {})


class SwitchedOn(Odd):
    def middle(self, x):
        return x + self.extra(x) if SWITCH.on else x


def test_a_layer_that_is_switched_on_after_tracing_has_no_gradient():
    with pytest.warns(UserWarning, match=r"extra\.weight: the forward pass does not depend on it"):
        run = full(model=SwitchedOn(), noise_multiplier=0.0)
    assert run.engine.plan.sensitivities["extra.weight"] == 0
    SWITCH.on = True
    run.step()
    assert not gradients_of(run.model)["extra.weight"].any()
    assert gradients_of(run.model)["second.weight"].any()


class Overflowing(Odd):
    def middle(self, x):
        if not SWITCH.on:
            return x
        bad = torch.full_like(x, SWITCH.factor)
        found = (x.detach().sum(1) - SWITCH.rows).abs() < 1e-6  # in batches of any size
        return torch.where(found[:, None], bad, x)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_what_is_not_finite_contributes_nothing(value):
    """One record overflows in the middle of the model: the others' sum is what it is without it."""
    x, y = examples(16)
    model = Overflowing()
    run = Run(model, (x, y), batch_size=16, sampling="full_batch", noise_multiplier=0.0)
    with torch.no_grad():
        SWITCH.rows = model.first(model.guard(x)).sum(1)[3]
    SWITCH.on, SWITCH.factor = True, value
    run.backward(*run.batch())
    found = run.gradients()
    for name, gradient in found.items():
        assert gradient.isfinite().all(), name
    alone = run.engine.plan.sensitivities
    others = torch.arange(16) != 3
    SWITCH.on = False
    expected = _sum_of(model, x[others], y[others])
    for name in ("first.weight", "second.weight", "first.bias"):
        assert (found[name] - expected[name]).norm() <= alone[name] * (1 + 1e-5), name
    assert (found["second.weight"] - expected["second.weight"]).norm() <= 1e-6


def _sum_of(model, x, y):
    plain = Odd()
    plain.load_state_dict(model.state_dict())
    loss = F.cross_entropy(plain(x), y, reduction="sum") / 16
    loss.backward()
    return gradients_of(plain)


def test_compiled_models_do_not_overwrite_what_their_bounds_are_of():
    run = full(model=OverwrittenInput(), compile="aot_eager")
    run.step()
    run.engine.session.trial.due_at = math.inf
    SWITCH.on = True
    with pytest.raises(Exception, match="writes to a tensor in place"):
        run.step()


class Remembering(Odd):
    """Adds something that it has computed in the pass before, with the weights of that time."""

    def __init__(self, detached):
        super().__init__()
        self.detached = detached

    def forward(self, x):
        hidden = self.first(self.guard(x))
        if not SWITCH.on:
            return self.second(hidden)
        before, SWITCH.rows = SWITCH.rows, hidden
        if before is None or self.detached:
            return self.second(hidden.detach())
        return self.second(hidden.detach() + before - before.detach())


def test_what_was_computed_in_another_pass_has_no_way_to_the_gradients():
    found = []
    for detached in (True, False):
        torch.manual_seed(0)
        SWITCH.on, SWITCH.rows = False, None
        run = full(model=Remembering(detached), noise_multiplier=0.0, micro_batch_size=8)
        run.engine.session.trial.due_at = math.inf
        SWITCH.on = True
        run.step()
        found.append(gradients_of(run.model))
    assert not any(each["first.weight"].any() for each in found)


class NotExamples(Odd):
    """Gives a layer something that has not one row for each example."""

    def forward(self, x):
        hidden = self.first(self.guard(x))
        if SWITCH.on == "constant":
            return self.second(torch.full((1, 8), 50.0)) + x[:, :3]
        if SWITCH.on == "positions":
            return self.second(hidden[:, None].expand(-1, 5, -1).transpose(0, 1)).sum(0)
        return self.second(hidden)


@pytest.mark.parametrize("compile", [False, "aot_eager"])
@pytest.mark.parametrize("what", ["constant", "positions"])
def test_rows_that_are_not_examples_are_refused(what, compile):
    run = full(model=NotExamples(), compile=compile)
    run.step()
    run.engine.session.trial.due_at = math.inf
    SWITCH.on = what
    with pytest.raises((PrivacyError, RuntimeError), match="in a batch of 16 examples"):
        run.step()


class CountedOften(nn.Module):
    def __init__(self):
        super().__init__()
        self.guard, self.last = lip.BoundedInput(1.0), lip.SpectralLinear(6, 3)
        self.clip = lip.ClipGradient(1e-3, follow=lip.FollowQuantile())

    def forward(self, x):
        x = self.clip(self.last(self.guard(x)))
        for _ in range(20 if SWITCH.on else 0):
            x = self.clip(x * 2)
        return x


def test_counts_stay_within_their_bound():
    """A threshold that follows a quantile is moved by a count, which is released as well."""
    run = full(model=CountedOften())
    SWITCH.on = True
    run.backward(*run.batch())
    assert run.engine.session._book.progress.counts["clip"] <= 16


def test_factors_have_all_their_digits():
    limit = 1e-6
    bounds = torch.logspace(30, 38, 500)
    assert (_factors(bounds, limit).double() * bounds.double() <= limit * (1 + 1e-6)).all()


class ByKeyword(Odd):
    def forward(self, x):
        return self.second(x=self.first(x=self.guard(x)))


def test_layers_may_be_called_by_keyword():
    full(model=ByKeyword()).step()


def test_an_interrupted_pass_leaves_nothing_behind():
    run = full(model=Interrupted())
    SWITCH.on = True
    with pytest.raises(KeyboardInterrupt):
        run.step()
    run.engine.detach()
    assert not any("forward" in vars(module) for module in run.model.modules())


class Interrupted(Odd):
    def middle(self, x):
        if SWITCH.on:
            raise KeyboardInterrupt
        return x


# --- rules that are wrong ------------------------------------------------------------------------


class Gain(nn.Module):
    """A layer of a user's own, with a parameter and a rule."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.gain


@pytest.fixture
def wrong_rule():
    @bounds.register(Gain)
    def gain(site, x):
        jacobians = {"gain": x.norm / 100}
        return bounds.Bound(1.0, x.norm, jacobians, rows_apart=True)

    yield
    bounds.unregister(Gain)


def with_gain():
    return nn.Sequential(
        lip.BoundedInput(1.0), lip.SpectralLinear(6, 8), Gain(), lip.SpectralLinear(8, 3)
    )


def test_a_rule_that_is_wrong_costs_accuracy_and_not_privacy(wrong_rule):
    def attack(run):
        run.step()
        with torch.no_grad():
            run.model[2].gain.fill_(50.0)
        run.step()

    assert not bounded_or_refused(attack, build=with_gain)


def test_a_layer_of_ones_own_is_trained(wrong_rule):
    run = full(model=with_gain(), noise_multiplier=0.0)
    before = run.model[2].gain.detach().clone()
    run.step()
    assert not run.model[2].gain.equal(before)


# --- the running model is tried ------------------------------------------------------------------


class Mixing(Odd):
    def middle(self, x):
        return x - SWITCH.factor * x.mean(0) if SWITCH.on else x


class MixingBackwards(Odd):
    def middle(self, x):
        return _Exchanged.apply(x) if SWITCH.on else x


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * ctx.saved_tensors[0].sum().cos()


class Counting(Odd):
    def middle(self, x):
        return x * (10.0 / len(x)) if SWITCH.on else x


class Placing(Odd):
    def middle(self, x):
        return x + torch.arange(len(x)).view(-1, *[1] * (x.ndim - 1)) if SWITCH.on else x


@pytest.mark.parametrize("kind", [Counting, Placing], ids=lambda kind: kind.__name__)
def test_examples_that_depend_on_the_size_of_the_sample_are_noticed(kind):
    run = Run(kind(), batch_size=60).steps(1)
    SWITCH.on = True
    with pytest.raises(PrivacyError, match="left out of a batch"):
        run.steps(4)


@pytest.mark.parametrize("compile", [False, "aot_eager"])
@pytest.mark.parametrize("kind", [Mixing, MixingBackwards], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_examples_that_meet_are_noticed(kind, steps, compile):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Run(kind(), compile=compile, batch_size=60).steps(steps)
        SWITCH.on = True
        with pytest.raises(PrivacyError, match="mixes examples"):
            run.steps(4)


def test_trials_change_nothing():
    """Weights, random numbers and counts are what they are without trials."""
    weights, draws = [], []
    for tried in (True, False):
        torch.manual_seed(0)
        run = full(noise_multiplier=0.0)
        if not tried:
            run.engine.session.trial.due_at = math.inf
        run.steps(5)
        weights.append([p.detach().clone() for p in run.model.parameters()])
        draws.append((torch.rand(1), np.random.rand()))
        np.random.seed(1)
    assert all(map(torch.equal, *weights))
    assert draws[0][0].equal(draws[1][0])


def test_trials_leave_other_devices_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("seeded"))
    full().step()


# --- the layers ----------------------------------------------------------------------------------


def rows_and_limits():
    torch.manual_seed(0)
    images, vectors = torch.randn(5, 4, 6, 6), torch.randn(5, 3, 8)
    return {
        "linear": (lip.SpectralLinear(8, 6, bias=True), vectors),
        "one position": (lip.FrobeniusLinear(8, 6, bias=True), vectors[:, 0]),
        "convolution": (lip.SpectralConv2d(4, 6, 3, padding="same", bias=True), images),
        "strided": (lip.SpectralConv2d(4, 6, 3, stride=2, groups=2, bias=True), images),
        "circular": (
            lip.SpectralConv2d(4, 6, 3, padding="same", padding_mode="circular"), images
        ),
        "sequence": (lip.SpectralConv1d(4, 6, 3, dilation=2, bias=True), images[:, :, 0]),
        "embedding": (lip.Embedding(7, 4), torch.randint(7, (5, 9))),
        "angles": (lip.Householder(4), images),
    }  # fmt: skip


@pytest.mark.parametrize("name", rows_and_limits())
@pytest.mark.parametrize("limit", [1e-3, 0.5, 1e6])
@pytest.mark.parametrize("spoilt", [False, True])
def test_layers_keep_their_limits(name, limit, spoilt):
    """For each example alone, and as the exact sum of what each example is allowed."""
    layer, x = rows_and_limits()[name]
    parameters = dict(layer._parameters)
    limits = {n: limit for n, p in parameters.items() if p is not None}
    output = layer.forward_bounded(x, parameters, limits)
    torch.testing.assert_close(output, layer(x))
    cotangent = torch.randn_like(output)
    if spoilt:
        cotangent[(2, *[0] * (cotangent.ndim - 1))] = math.nan
    own = [n for n, p in parameters.items() if p is not None]
    found = torch.autograd.grad(output, [parameters[n] for n in own], cotangent)
    total = {n: torch.zeros_like(parameters[n]) for n in own}
    for row in range(len(x)):
        alone = layer.forward_bounded(x[row : row + 1], parameters, limits)
        each = torch.autograd.grad(alone, [parameters[n] for n in own], cotangent[row : row + 1])
        for n, gradient in zip(own, each, strict=True):
            assert gradient.norm() <= limit * (1 + 1e-4), n
            total[n] += gradient
            if spoilt and row == 2:
                assert not gradient.any()
    for n, gradient in zip(own, found, strict=True):
        torch.testing.assert_close(gradient, total[n], rtol=1e-4, atol=1e-5)
    if limit == 1e6 and not spoilt:
        plain = torch.autograd.grad(layer(x), [parameters[n] for n in own], cotangent)
        for gradient, expected in zip(found, plain, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 3, 4096, 4097, 20_000])
def test_norms_are_upper_bounds(size):
    x = torch.randn(7, size) * torch.logspace(-25, 15, 7)[:, None]
    exact = x.double().norm(dim=1)
    found = example_norm(x).double()
    assert (found >= exact * (1 - 1e-5)).all()
    assert (found[3:] <= exact[3:] * (1 + 1e-5)).all()


def test_compiled_norms_of_long_rows_are_upper_bounds():
    """On the CPU compiled code adds up thousands of squares one by one, small ones to a large."""
    norms = torch.compile(lambda x: example_norm(torch.relu(x)), dynamic=False)
    x = torch.full((2, 65_536), 2.0**-12.02)
    x[:, :16] = 1.0
    exact = x.double().norm(dim=1)
    assert (norms(x).double() >= exact * (1 - 1e-5)).all()


def test_half_precision_data_stays_within_its_bound():
    data = tuple((x.half(), y) for x, y in neighbours())
    assert not bounded_or_refused(lambda run: run.step(), data=data, build=_for_half)


def _for_half():
    return nn.Sequential(lip.BoundedInput(1.0), _Widen(), lip.SpectralLinear(6, 3))


class _Widen(nn.Module):
    def forward(self, x):
        return x.float()


def test_tied_weights_under_two_constraints_cost_accuracy_at_most():
    def build():
        model = nn.Sequential(
            lip.BoundedInput(1.0), lip.SpectralLinear(6, 6), lip.GroupSort(2),
            lip.SpectralLinear(6, 6), lip.SpectralLinear(6, 3),
        )  # fmt: skip
        model[3].weight = model[1].weight
        return model

    def attack(run):
        run.step()
        run.model[3].norm = 5.0
        clipless.project(run.model)
        run.step()

    bounded_or_refused(attack, build=build)
