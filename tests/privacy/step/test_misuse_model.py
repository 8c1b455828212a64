"""Misuse of the model: what a careless user can do to it in the middle of a private run.

See `tests.privacy.misuse_helpers` for how every case must end. Here: weights edited, loaded and
converted; layers added, removed, frozen, hooked; constants moved; models without a bound.
"""

import math
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipless
from clipless import PrivacyEngine
from clipless import nn as lip
from clipless.errors import (
    CliplessError,
    ConstraintError,
    UnboundedSensitivityError,
    UnsupportedOperationError,
)
from tests.privacy.misuse_helpers import (
    bounded_or_refused,
    clipped,
    counted,
    counting_skipped_steps,
    full,
    gradients_of,
    refused,
    refused_unharmed,
    weights_of,
)
from tests.privacy.runs import Run, examples, mlp

# --- the model: weights --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "edit",
    {
        "in place": lambda w: w.mul_(3),
        "through data": lambda w: w.data.mul_(3),
        "copied": lambda w: w.copy_(3 * w),
        "initialised": lambda w: nn.init.normal_(w),
        "poisoned": lambda w: w.fill_(math.nan),
    }.items(),
    ids=lambda item: item[0],
)
def test_weights_edited_out_of_their_sets(edit):
    run = Run().steps(1)
    with torch.no_grad():
        edit[1](run.model[1].weight)
    with refused("1.weight", "clipless.nn.project(model)", error=ConstraintError):
        run.step()
    # The way out that the message names.
    with torch.no_grad():
        run.model[1].weight.nan_to_num_(0.0)
    clipless.project(run.model)
    with counting_skipped_steps():
        run.step()
    assert counted(run, 3)


def test_weights_edited_inside_their_sets():
    run = Run().steps(1)
    with torch.no_grad():
        run.model[1].weight.mul_(0.5)
    run.step()
    assert counted(run, 2)


def test_loading_weights_that_break_the_constraints():
    run = Run().steps(1)
    run.model.load_state_dict({name: 2 * w for name, w in run.model.state_dict().items()})
    with refused("1.weight", "after loading or editing weights", error=ConstraintError):
        run.step()


def test_loading_weights_as_new_parameters():
    run = Run().steps(1)
    state = {name: w.clone() for name, w in run.model.state_dict().items()}
    run.model.load_state_dict(state, assign=True)
    with refused("parameters", "make_private again"):
        run.step()


def test_a_parameter_replaced():
    run = Run().steps(1)
    run.model[1].weight = nn.Parameter(run.model[1].weight.detach().clone())
    with refused("parameters", "make_private again"):
        run.step()


def test_weights_edited_in_a_way_that_keeps_their_norm():
    run = Run().steps(1)
    weight = run.model[3].weight
    with torch.no_grad():
        norm = torch.linalg.vector_norm(weight)
        weight.zero_()
        weight[0, 0] = norm  # now the spectral norm, which was 1 before
    assert torch.linalg.vector_norm(weight) == norm > 1.5
    with refused("3.weight", error=ConstraintError):
        run.step()


def test_weights_edited_between_forward_and_backward():
    def attack(run):
        loss = run.criterion(run.model((batch := run.batch())[0]), batch[1])
        for parameter in run.model.parameters():
            parameter.data.mul_(100)
        loss.backward()
        run.optimizer.step()

    bounded_or_refused(attack)


def test_half_precision():
    run = Run()
    run.model.half()
    x, y = run.batch()
    with refused_unharmed(run, "converted to torch.float16", "make_private"):
        run.backward(x.half(), y)


def test_half_precision_and_projected():
    run = Run()
    run.model.to(torch.bfloat16)
    clipless.project(run.model)
    x, y = run.batch()
    with pytest.raises((CliplessError, ValueError), match=r"float32|bfloat16|dtype"):
        run.backward(x.bfloat16(), y)


def test_half_precision_from_the_start():
    model = mlp().to(torch.bfloat16)
    clipless.project(model)
    with refused("bfloat16", "Keep parameters in float32", error=ValueError):
        Run(model)


def test_double_precision_in_the_middle_of_a_run():
    run = full(noise_multiplier=0.0)
    run.step()
    run.model.double()
    x, y = run.batch()
    run.optimizer.zero_grad()
    run.backward(x.double(), y)
    run.optimizer.step()
    assert run.engine.ledger.releases == 2
    for name, sensitivity in run.engine.plan.sensitivities.items():
        assert gradients_of(run.model)[name].norm() <= 16 * sensitivity


def test_autocast():
    # bfloat16 keeps 8 bits: this example's gradient is rounded up by more than the slack of the
    # plan, which is for float32.
    x = torch.full((1, 256), 0.06276)
    model = nn.Sequential(
        lip.BoundedInput(x.norm().item()), lip.SpectralLinear(256, 2, norm=500.0, constraint="ball")
    )
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, 256))
    run = Run(
        model, (x, torch.tensor([1])), batch_size=1, sampling="full_batch", noise_multiplier=0.0
    )
    x, y = run.batch()
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run.criterion(run.model(x), y)
        loss.backward()
        run.optimizer.step()
    except CliplessError:
        return
    sensitivity = run.engine.plan.sensitivities["1.weight"]
    assert run.model[1].weight.grad.norm() <= sensitivity


# --- the model: structure ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    {
        "a layer added": (lambda m: m.append(lip.SpectralLinear(3, 3)), "a new layer"),
        "a layer removed": (lambda m: m.pop(1), "shape"),
        "a layer frozen": (lambda m: m[1].requires_grad_(False), "make_private again"),
        "the guard removed": (lambda m: m.__setitem__(0, nn.Identity()), "BoundedInput"),
        "a layer replaced": (lambda m: m.__setitem__(1, nn.Linear(6, 8)), "SpectralLinear"),
        "BatchNorm": (lambda m: m.insert(2, nn.BatchNorm1d(8)), "mixes examples"),
        "a forward hook": (lambda m: m[1].register_forward_hook(lambda *_: None), "hook"),
        "a pre-hook": (lambda m: m[1].register_forward_pre_hook(lambda *_: None), "hook"),
        "a hook on the model": (lambda m: m.register_forward_hook(lambda *_: None), "hook"),
        "a backward hook": (lambda m: m[2].register_full_backward_hook(lambda *_: None), "hook"),
        "a forward of its own": (
            lambda m: setattr(m[2], "forward", lambda x: 100 * x), "forward was replaced"
        ),
        "a smaller norm": (lambda m: setattr(m[1], "norm", 0.5), "project(model)"),
    }.items(),
    ids=lambda item: item[0],
)  # fmt: skip
def test_a_model_changed_between_steps(change):
    run = Run().steps(1)
    change[1][0](run.model)
    with refused(change[1][1], error=CliplessError):
        run.step()
    assert counted(run, 1)


@pytest.mark.parametrize(
    "register",
    [
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
        nn.modules.module.register_module_full_backward_pre_hook,
    ],
    ids=lambda f: f.__name__,
)
def test_a_hook_on_all_modules(register):
    # For instance one that subtracts the mean of the batch from every output.
    run = Run()
    x, y = run.batch()
    handle = register(lambda *_: None)
    try:
        words = "hook on all modules", "Remove it"
        with refused_unharmed(run, *words, error=UnsupportedOperationError):
            run.backward(x, y)
    finally:
        handle.remove()
    run.backward(x, y)
    run.optimizer.step()
    assert counted(run, 1)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.guard, self.body = lip.BoundedInput(1.0), lip.SpectralLinear(6, 3)

    def forward(self, a, b):
        return self.body(self.guard(a)) + self.body(self.guard(b))


def test_inputs_of_two_batches_at_once():
    x, y = examples(40)
    run = Run(
        TwoInputs(), (x, x.flip(0), y), sampling="fixed_size", input_shape=((6,), (6,))
    )  # fmt: skip
    (a1, _, _), (a2, b2, y2) = run.batch(), run.batch()
    with refused_unharmed(run, "tensors of several batches at once"):
        run.model(a1, b2)
    with counting_skipped_steps():
        run.criterion(run.model(a2, b2), y2).backward()
    run.optimizer.step()
    assert counted(run, 2)


def test_a_layer_unfrozen():
    model = mlp()
    model[1].requires_grad_(False)
    run = Run(model).steps(1)
    model[1].requires_grad_(True)
    with refused_unharmed(run, "unfrozen", "make_private again"):
        run.step()


def test_a_model_changed_between_forward_and_step():
    """The gradients were held to the plan of their forward pass, and get its noise."""
    run = full(noise_multiplier=0.0)
    plan = run.engine.plan
    run.backward(*run.batch())
    run.model[1].norm = 2.0
    run.optimizer.step()
    assert run.engine.plan is plan
    for name, gradient in gradients_of(run.model).items():
        assert gradient.norm() <= 16 * plan.sensitivities[name]
    run.step()
    assert run.engine.plan.sensitivities["3.weight"] > 1.4 * plan.sensitivities["3.weight"]


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_a_larger_norm_gets_more_noise(layer):
    run = full(noise_multiplier=0.0)
    run.step()
    before = run.engine.plan.sensitivities
    run.model[layer].norm = 3.0
    run.step()
    after = run.engine.plan.sensitivities
    grown = {0: "1.weight", 1: "3.weight", 3: "1.weight"}[layer]
    assert after[grown] > 1.9 * before[grown]
    for name, gradient in gradients_of(run.model).items():
        assert gradient.norm() <= 16 * after[name]


def test_a_clipping_norm_that_moves_takes_the_noise_along():
    run = full(model=clipped())
    run.step()
    small = run.engine.plan.noise_deviations["1.weight"]
    run.model[2].norm = 0.3
    run.step()
    assert run.engine.plan.noise_deviations["1.weight"] == pytest.approx(3 * small)
    assert run.engine.plan.releases[0].deviation == pytest.approx(3 * small)
    assert counted(run, 2)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_bound_lowered_after_the_forward_pass(layer):
    # The second call gets its noise by the lower bound; the first was made under the higher one.
    run = full(model=clipped())
    x, y = run.batch()
    run.model[layer].norm *= 10
    out = run.model(x)
    run.model[layer].norm /= 10
    run.model(x)
    with refused_unharmed(run, "changed and called again", "between steps"):
        run.criterion(out, y)
    run.step()
    assert run.engine.plan.noise_deviations == full(model=clipped()).engine.plan.noise_deviations


def test_a_bound_lowered_between_the_batches_of_a_step():
    run = full(model=clipped(), micro_batch_size=8)
    run.model[2].norm *= 100
    batches = iter(run.loader)
    run.backward(*next(batches))
    run.model[2].norm /= 100
    with refused_unharmed(run, "between the batches of one step"):
        run.backward(*next(batches))


def test_a_bound_lowered_and_the_model_called_before_the_step():
    """The gradients were held to the higher bound, and get its noise."""
    run = full(model=clipped())
    run.model[2].norm *= 100
    x, y = run.batch()
    run.backward(x, y)
    noise, released = run.engine.plan.releases, []
    run.model[2].norm /= 100
    run.model(x)
    assert run.engine.plan.releases != noise
    session = run.engine.session
    session.outcomes.add_noise = lambda step, tensors, queries: released.append(queries)
    run.optimizer.step()
    assert released == [noise]


def test_the_loss_scale_of_a_clipping_layer():
    run = full(model=clipped())
    run.model[2].loss_scale = 1.0
    with refused_unharmed(run, "loss_scale", "change `norm` or"):
        run.step()


class Scaled(nn.Module):
    """Multiplies by something that is kept outside the parameters."""

    def __init__(self, factor):
        super().__init__()
        self.guard = lip.BoundedInput(1.0)
        self.body = lip.SpectralLinear(6, 8)
        self.head = lip.SpectralLinear(8, 3)
        if isinstance(factor, torch.Tensor):
            self.register_buffer("factor", factor)
        else:
            self.factor = factor

    def forward(self, x):
        factor = getattr(self.factor, "value", self.factor)
        return self.head(self.body(self.guard(x)) * factor)


@pytest.mark.parametrize("kind", ["buffer", "number", "settings", "tensor"])
def test_a_factor_of_the_model_that_grows(kind):
    """Whatever holds it, the bound follows or the run is refused."""

    def build():
        if kind == "settings":
            return Scaled(types.SimpleNamespace(value=1.0))
        if kind == "tensor":
            model = Scaled(1.0)
            model.factor = torch.ones(())
            return model
        return Scaled(torch.ones(()) if kind == "buffer" else 1.0)

    def attack(run):
        run.step()
        if kind == "number":
            run.model.factor = 1000.0
        elif kind == "settings":
            run.model.factor.value = 1000.0
        else:
            run.model.factor.fill_(1000.0)
        run.step()

    bounded_or_refused(attack, build=build)


def test_examples_of_another_shape():
    """Bounds are proved for the shape of the data set; more positions mean larger gradients."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.guard = lip.BoundedInput(1.0)
            self.body = lip.SpectralLinear(2, 3, bias=True)

        def forward(self, x):  # (batch, positions, 2)
            return self.body(self.guard(x)).sum(1)

    run = Run(Positions(), examples(16, (3, 2)), batch_size=16, sampling="full_batch",
              noise_multiplier=0.0)  # fmt: skip
    x, y = run.batch()
    with refused("shape", error=CliplessError):
        run.backward(x.repeat(1, 50, 1), y)
        run.optimizer.step()
        for name, gradient in gradients_of(run.model).items():
            assert gradient.norm() <= 16 * run.engine.plan.sensitivities[name]


class FakeNorm(nn.BatchNorm1d):
    """Passes validators that look for the exact type."""


_MODELS = {
    "BatchNorm": (lambda: nn.BatchNorm1d(6), "mixes examples", "LayerCentering"),
    "a subclass of BatchNorm": (lambda: FakeNorm(6), "mixes examples", "FakeNorm"),
    "nn.Linear": (lambda: nn.Linear(6, 6), "not constrained", "SpectralLinear"),
    "a subclass of a layer": (
        lambda: type("Mine", (lip.SpectralLinear,), {})(6, 6), "subclass", "exact type"
    ),
    "LayerNorm": (lambda: nn.LayerNorm(6), "no Lipschitz constant", "LayerCentering"),
    "in-place ReLU": (lambda: nn.ReLU(inplace=True), "place", ""),
    "weight_norm": (
        lambda: nn.utils.parametrizations.weight_norm(lip.SpectralLinear(6, 6)), "", "rule"
    ),
    "softmax over the batch": (lambda: nn.Softmax(dim=0), "rule", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", _MODELS)
def test_models_without_a_bound(name):
    build, *words = _MODELS[name]
    model = nn.Sequential(lip.BoundedInput(1.0), build(), lip.SpectralLinear(6, 3))
    with refused(*words, error=UnsupportedOperationError):
        Run(model)
    assert PrivacyEngine.validate(model, input_shape=(6,))


def test_a_model_with_nothing_to_train():
    with refused("no trainable parameters"):
        Run(mlp().requires_grad_(False), optimizer=torch.optim.SGD([torch.zeros(1)], lr=0.1))


def test_a_model_without_an_input_guard():
    model = nn.Sequential(lip.SpectralLinear(6, 3))
    with refused("0.weight", "BoundedInput", error=UnboundedSensitivityError):
        Run(model)


class MixesExamples(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.body = mlp()
        self.mix = mix

    def forward(self, x):
        return self.mix(self.body(x))


@pytest.mark.parametrize(
    "mix",
    [
        lambda h: h - h.mean(0),
        lambda h: h - h.mean(0, keepdim=True),
        lambda h: h + h.roll(1, 0),
        lambda h: h.flip(0),
        lambda h: h[torch.arange(len(h))],
        lambda h: h * h.shape[0],
        lambda h: h / len(h),
        lambda h: h.detach(),
    ],
    ids=["centred", "centred kept", "rolled", "flipped", "indexed", "times size", "over len",
         "detached"],
)  # fmt: skip
def test_a_forward_that_mixes_examples(mix):
    with refused("forward", error=UnsupportedOperationError):
        Run(MixesExamples(mix))


@pytest.mark.parametrize("factor", [1.0, 0.5], ids=["as it began", "pretrained"])
def test_frozen_parameters_are_unchanged_and_cost_nothing(factor):
    model = mlp()
    with torch.no_grad():
        model[1].weight.mul_(factor)  # inside its set, which is all that is asked of it
    model[1].requires_grad_(False)
    before = weights_of(model[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    run = Run(model, optimizer=optimizer).steps(3)
    assert set(run.engine.plan.sensitivities) == {"3.weight"}
    assert counted(run, 3)
    assert all(before[n].equal(w) for n, w in weights_of(model[1]).items())


def test_a_frozen_parameter_with_an_old_gradient():
    model = mlp()
    F.cross_entropy(model(torch.randn(4, 6)), torch.zeros(4).long()).backward()
    model[1].requires_grad_(False)
    before = weights_of(model[1])
    run = Run(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    run.backward(*run.batch())
    run.optimizer.step()
    for name, weight in weights_of(model[1]).items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=1e-6)


def test_gradients_from_before_are_not_released():
    model = mlp()
    F.cross_entropy(100 * model(torch.randn(4, 6)), torch.zeros(4).long()).backward()
    run = full(model=model, noise_multiplier=0.0)
    run.backward(*run.batch())
    run.optimizer.step()
    for name, sensitivity in run.engine.plan.sensitivities.items():
        assert gradients_of(run.model)[name].norm() <= 16 * sensitivity


def test_a_module_used_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.guard = lip.BoundedInput(1.0)
            self.body = lip.SpectralLinear(6, 6)
            self.head = lip.SpectralLinear(6, 3)

        def forward(self, x):
            return self.head(self.body(self.body(self.guard(x))))

    run = Run(Twice())
    bounds = {p.name: p.gradient_bound for p in run.engine.plan.parameters}
    assert bounds["body.weight"] == pytest.approx(2 * math.sqrt(2))
    assert not bounded_or_refused(lambda run: run.step(), build=Twice)


def test_layers_with_the_same_name():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = lip.SpectralLinear(6, 6)

        def forward(self, x):
            return self.layer(x)

    model = nn.Sequential(lip.BoundedInput(1.0), Block(), Block(), lip.SpectralLinear(6, 3))
    run = Run(model, noise_multiplier=100.0).steps(1)
    assert list(run.engine.plan.sensitivities) == ["1.layer.weight", "2.layer.weight", "3.weight"]
    assert all(g.norm() > 1 for g in gradients_of(model).values())
