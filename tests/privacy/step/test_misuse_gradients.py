"""Misuse of gradients and optimizers: other ways into the parameters, and steps that do not count.

See `tests.privacy.misuse_helpers` for how every case must end. Here: layers and weights used on
their own, gradients read, assigned and edited, hooks, steps without a batch or twice, closures,
second optimizers, foreign parameters, gradient scalers.
"""

import contextlib
import copy
import math
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipless
from clipless import nn as lip
from clipless.errors import (
    ConstraintError,
    PrivacyError,
)
from tests.privacy.misuse_helpers import (
    assert_close,
    ball,
    bounded_or_refused,
    counted,
    counting_skipped_steps,
    expected_gradients,
    full,
    gradients_of,
    refused,
    refused_unharmed,
    weights_of,
)
from tests.privacy.runs import Run, mlp

# --- gradients: other paths into the parameters --------------------------------------------------


def test_a_layer_called_on_its_own():
    run = Run()
    x, _ = run.batch()
    with refused_unharmed(run, "called outside the model", "torch.no_grad()"):
        run.model[1](x)
    with torch.no_grad():
        run.model[1](x)


def test_a_part_of_the_model_called_on_its_own():
    run = Run()
    x, _ = run.batch()
    with refused_unharmed(run, "called outside the model"):
        run.model[:2](x)


def test_forward_called_directly():
    run = Run()
    x, _ = run.batch()
    with refused_unharmed(run, "called outside the model"):
        run.model.forward(x)


def _two_losses(extra):
    """One backward for the private loss and a term that reaches parameters another way."""

    def attack(run):
        x, y = run.batch()
        loss = run.criterion(run.model(x), y)
        (loss + extra(run, x)).backward()
        run.optimizer.step()

    return attack


def test_a_term_that_uses_a_weight_directly():
    # "Encourage sparse features": the input of this product was never bounded.
    bounded_or_refused(_two_losses(lambda run, x: F.linear(x, run.model[1].weight).abs().mean()))


def test_a_term_through_a_layer_in_evaluation_mode():
    def features(run, x):
        run.model.eval()
        features = run.model[1](x)
        run.model.train()
        return features.var()

    bounded_or_refused(_two_losses(features))


def test_a_term_through_a_layer_without_constraints():
    def build():
        return nn.Sequential(
            lip.BoundedInput(1.0),
            lip.SpectralLinear(6, 8),
            lip.Householder(8),
            lip.SpectralLinear(8, 3),
        )

    weights = torch.arange(8.0)
    bounded_or_refused(
        _two_losses(lambda run, x: (run.model[2](x[:, [0, 1, 2, 3, 4, 5, 0, 1]]) * weights).sum()),
        build=build,
    )


class Remembering(nn.Module):
    """Keeps its features for a regulariser, as many tutorials do."""

    def __init__(self, place):
        super().__init__()
        self.guard = lip.BoundedInput(1.0)
        self.body = lip.SpectralLinear(6, 8)
        self.head = lip.SpectralLinear(8, 3)
        self.place = place

    def forward(self, x):
        features = self.body(self.guard(x))
        if self.place is None:
            self.features = features
        else:
            self.place.features = features
        return self.head(features)


@pytest.mark.parametrize("place", [lambda: None, types.SimpleNamespace], ids=["self", "elsewhere"])
def test_a_term_on_remembered_features(place):
    def term(run, x):
        kept = run.model if run.model.place is None else run.model.place
        return 1000 * kept.features.square().mean()

    def attack(run):
        with torch.no_grad():
            run.model(run.loader.dataset.tensors[0])  # an evaluation before the training
        _two_losses(term)(run)

    bounded_or_refused(attack, build=lambda: Remembering(place()))


def test_a_term_on_activations_seen_by_a_global_hook():
    def attack(run):
        seen = []
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, inputs, out: seen.append(out) if module is run.model[1] else None
        )
        try:
            _two_losses(lambda run, x: 1000 * seen[0].square().mean())(run)
        finally:
            handle.remove()

    bounded_or_refused(attack)


class WithASpareLayer(nn.Module):
    """Has a layer that its forward does not use, so that its bound is zero and so is its noise."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.spare = lip.SpectralLinear(6, 3)

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize("together", [True, False])
def test_a_term_that_trains_a_layer_the_model_does_not_use(together):
    def attack(run):
        x, y = run.batch()
        loss = run.criterion(run.model(x), y)
        other = F.cross_entropy(F.linear(x, run.model.spare.weight), y)
        if together:
            (loss + other).backward()
        else:
            loss.backward()
            other.backward()
        run.optimizer.step()

    bounded_or_refused(attack, build=WithASpareLayer)


def test_another_head_on_top_of_the_model():
    run = Run()
    x, y = run.batch()
    head = nn.Linear(3, 3)
    with refused_unharmed(run, "output itself, unchanged"):
        run.criterion(head(run.model(x)), y)
    with refused_unharmed(run, "besides the criterion"):
        F.cross_entropy(head(run.model(x)), y).backward()


def test_a_trainable_layer_before_the_model():
    # Its gradients would have no noise.
    run = Run()
    x, y = run.batch()
    encoder = nn.Linear(6, 6)
    with refused_unharmed(run, "input was computed by something that can be trained"):
        run.model(encoder(x))
    assert not gradients_of(encoder)
    with torch.no_grad():
        encoded = encoder(x)
    run.backward(encoded, y)
    run.optimizer.step()
    assert counted(run, 1)


def test_a_penalty_on_the_weights_is_harmless_or_refused():
    # It reads no data, so it changes no sensitivity.
    bounded_or_refused(
        _two_losses(lambda run, x: 1e-2 * sum(p.square().sum() for p in run.model.parameters()))
    )


def test_a_second_loss_before_the_criterion():
    run = Run()
    x, y = run.batch()
    run.model[1].weight.square().sum().backward()
    with refused_unharmed(run, "did not come through the private criterion", "discarded"):
        run.backward(x, y)
    run.optimizer.zero_grad()
    # Refused once, with the stray gradients thrown away: the run can go on.
    with counting_skipped_steps():
        run.step()
    assert counted(run, 2)


def test_a_second_loss_after_the_criterion():
    run = Run()
    run.backward(*run.batch())
    run.model[1].weight.square().sum().backward()
    with refused_unharmed(run, "did not come through the private criterion", "discarded"):
        run.optimizer.step()


# --- gradients: edited before the noise ----------------------------------------------------------


def _scale(parameters):
    for parameter in parameters:
        parameter.grad.mul_(1000)


def _replace(parameters):
    for parameter in parameters:
        parameter.grad = parameter.grad * 1000


def _add(parameters):
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1000.0)


def _normalise(parameters):
    for parameter in parameters:
        parameter.grad.div_(parameter.grad.norm())


@pytest.mark.parametrize("edit", [_scale, _replace, _add, _normalise], ids=lambda f: f.__name__)
def test_gradients_edited_between_backward_and_step(edit):
    run = full()
    run.backward(*run.batch())
    words = ("gradient", "NoneType", "has no attribute")
    with refused_unharmed(run, words, error=(PrivacyError, AttributeError, TypeError)):
        edit(run.model.parameters())
        run.optimizer.step()


def test_clipping_the_norm_of_all_gradients_before_the_noise():
    # The clipped gradient of the bias depends on that of the weight, which an example can change
    # 100 times as much; the noise of the bias does not hide it. Clip after the noise of the step,
    # or per example with clipless.nn.ClipGradient.
    def attack(run):
        run.backward(*run.batch())
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        run.optimizer.step()

    x, y = torch.zeros(64, 6), torch.zeros(64).long()
    bounded_or_refused(
        attack,
        build=lambda: nn.Sequential(lip.BoundedInput(100.0), lip.SpectralLinear(6, 3, bias=True)),
        data=((x, y), (x.index_fill(0, torch.tensor([0]), 100.0), y)),
    )


def test_gradients_assigned_from_autograd_grad_of_a_copy():
    run = full()
    x, y = run.batch()
    copied = copy.deepcopy(run.model)
    gradients = torch.autograd.grad(F.cross_entropy(copied(x), y), list(copied.parameters()))
    run.backward(x, y)
    for parameter, gradient in zip(run.model.parameters(), gradients, strict=True):
        parameter.grad = 1000 * gradient
    with refused_unharmed(run, "did not come through the private criterion", "cannot be edited"):
        run.optimizer.step()
    assert counted(run, 0)


def test_gradients_are_not_there_to_be_read():
    run = full(micro_batch_size=8)
    for x, y in run.loader:
        run.backward(x, y)
        assert not gradients_of(copy.deepcopy(run.model))
        if not run.loader.current.is_last:
            assert not gradients_of(run.model)
    for read in (
        gradients_of,
        lambda model: torch.stack([p.grad.sum() for p in model.parameters()]),
    ):
        with refused("between backward and the optimizer's step", "no noise yet"):
            read(run.model)
    run.optimizer.step()
    assert gradients_of(run.model)  # with noise
    assert counted(run, 1)


def test_a_hook_on_a_parameter():
    run = Run()
    run.model[1].weight.register_hook(lambda gradient: 1000 * gradient)
    with refused_unharmed(run, "gradient hook"):
        run.step()


def test_a_hook_after_accumulation():
    run = Run()

    def scale(parameter):
        parameter.grad.mul_(1000)

    run.model[1].weight.register_post_accumulate_grad_hook(scale)
    with refused_unharmed(run, "gradient"):
        run.step()


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu")], ids=["", "scaler"])
def test_a_step_hook_that_runs_before_the_noise(scaler):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []

    def scale(optimizer, args, kwargs):
        found.extend(gradients_of(model).values())
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(1000.0)

    optimizer.register_step_pre_hook(scale)
    run = full(model=model, optimizer=optimizer, noise_multiplier=0.0, grad_scaler=scaler)
    x, y = run.batch()
    run.backward(x, y)
    if scaler is None:
        with refused_unharmed(run, "no noise yet", "after make_private"):
            run.optimizer.step()
        assert counted(run, 0)
        return
    run.optimizer.step()
    assert not any(gradient.any() for gradient in found)  # zeros, for the scaler
    assert_close(gradients_of(model), expected_gradients(run, x, y))


def test_a_step_hook_after_the_noise_is_post_processing():
    run = Run(noise_multiplier=1e3)
    run.optimizer.register_step_pre_hook(
        lambda *_: nn.utils.clip_grad_norm_(run.model.parameters(), 1.0) and None
    )
    run.steps(2)
    assert counted(run, 2)


@pytest.mark.parametrize("to_none", [True, False])
def test_zeroing_gradients_before_the_step_costs_no_less(to_none):
    # There is nothing to zero: the step gets the gradients of its batch, all of them.
    run = full(noise_multiplier=0.0, lr=0.0)
    for number in range(1, 4):
        run.optimizer.zero_grad(set_to_none=to_none)
        x, y = run.batch()
        run.backward(x, y)
        run.optimizer.zero_grad(set_to_none=to_none)
        run.optimizer.step()
        assert run.engine.ledger.releases == number
        assert_close(gradients_of(run.model), expected_gradients(run, x, y))


# --- optimizers ----------------------------------------------------------------------------------


def test_a_step_without_a_batch():
    run = Run()
    with refused_unharmed(run, "without a batch", "draw one from the private loader"):
        run.optimizer.step()


def test_a_step_without_backward():
    run = Run()
    x, y = run.batch()
    run.criterion(run.model(x), y)
    with refused_unharmed(run, "backward was called for 0 of the 1"):
        run.optimizer.step()


def test_two_steps_in_a_row():
    run = Run().steps(1)
    with refused_unharmed(run, "without a batch"):
        run.optimizer.step()
    assert counted(run, 1)


@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_a_closure_is_called_once_and_its_loss_goes_nowhere(how):
    run = full()
    plain = full(model=copy.deepcopy(run.model))
    calls = []
    for _ in range(3):
        plain.step()
        x, y = run.batch()

        def closure(x=x, y=y):
            calls.append(torch.is_grad_enabled())
            run.optimizer.zero_grad()
            return run.backward(x, y)

        with torch.no_grad():
            given = ((closure,), {}) if how == "positional" else ((), {"closure": closure})
            assert run.optimizer.step(*given[0], **given[1]) is None
    assert calls == [True] * 3
    assert counted(run, 3)
    weights = weights_of(plain.model)
    assert all(weights[name].equal(w) for name, w in weights_of(run.model).items())


def test_a_closure_that_draws_no_batch_or_runs_half_of_the_step():
    run = full(micro_batch_size=8)
    with refused_unharmed(run, "without a batch"):
        run.optimizer.step(lambda: None)
    with refused_unharmed(run, "1 of the 2 micro-batches"):
        run.optimizer.step(lambda: run.backward(*run.batch()))
    assert counted(run, 0)


def test_an_optimizer_that_depends_on_a_closure():
    """It would look at losses, which have no noise: nothing is run, nothing is spent."""
    model = mlp()
    run = Run(model, optimizer=torch.optim.LBFGS(model.parameters()))
    x, y = run.batch()
    calls = []
    with refused_unharmed(run, "LBFGS", "closure", "steps on the gradients it finds"):
        run.optimizer.step(lambda: calls.append(run.backward(x, y)))
    assert not calls
    assert counted(run, 0)


@pytest.mark.parametrize(
    "look",
    [
        lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0),
        lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False),
        lambda parameters: nn.utils.clip_grad_value_(parameters, 1.0),
        lambda parameters: [parameter.grad.norm() for parameter in parameters],
        lambda parameters: [parameter.grad.detach().cpu() for parameter in parameters],
        lambda parameters: torch.optim.SGD(parameters, lr=0.1).step(),
        lambda parameters: torch.optim.Adam(parameters, lr=0.1).step(),
    ],
)
def test_what_looks_for_gradients_before_the_noise_is_told(look):
    """`clip_grad_norm_` used to find nothing there, and to do nothing, in silence."""
    run = full()
    run.backward(*run.batch())
    with refused_unharmed(run, "kept back until the step", "ClipGradient"):
        look(list(run.model.parameters()))
    run.optimizer.step()
    look(list(run.model.parameters()))  # has noise
    assert counted(run, 1)


def test_after_the_session_gradients_are_ordinary():
    run = full()
    x, y = run.batch()
    run.backward(x, y)
    run.engine.detach()
    F.cross_entropy(run.model(x), y).backward()
    assert_close(gradients_of(run.model), expected_gradients(run, x, y))


def test_an_optimizer_that_lacks_parameters():
    model = mlp()
    with refused("lacks trainable parameters", "1.weight, 1.bias", "requires_grad_(False)"):
        Run(model, optimizer=torch.optim.SGD(model[3].parameters(), lr=0.1)).step()


def test_an_optimizer_with_foreign_parameters():
    model, other = mlp(), nn.Linear(2, 2)
    parameters = [*model.parameters(), *other.parameters()]
    with refused("not the model's", "optimizer of their own"):
        Run(model, optimizer=torch.optim.SGD(parameters, lr=0.1)).step()


def test_a_parameter_group_added_later():
    run = Run().steps(1)
    run.optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    with refused_unharmed(run, "not the model's"):
        run.step()


def test_an_optimizer_of_another_model():
    with refused("not the model's"):
        Run(mlp(), optimizer=torch.optim.SGD(mlp().parameters(), lr=0.1)).step()


def test_a_second_optimizer_on_the_same_parameters():
    run = full(model=ball())
    second = torch.optim.SGD(run.model.parameters(), lr=1e-3)
    before = weights_of(run.model)
    run.backward(*run.batch())
    with refused_unharmed(run, "other optimizers"):
        second.step()
    assert all(before[n].equal(w) for n, w in weights_of(run.model).items())
    run.optimizer.step()
    run.backward(*run.batch())
    with torch.no_grad():
        run.model[1].weight.add_(1e-3)  # as an optimizer with a memory would
    with refused_unharmed(run, "weights were edited", "another optimizer"):
        run.optimizer.step()
    assert counted(run, 1)


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu")], ids=["", "scaler"])
def test_only_a_second_optimizer(scaler):
    run = full(model=ball(), grad_scaler=scaler)
    second = torch.optim.SGD(run.model.parameters(), lr=1e-3)
    before = weights_of(run.model)
    alone = refused("other optimizers") if scaler is None else contextlib.nullcontext()
    run.backward(*run.batch())
    with alone:
        second.step()
    second.zero_grad()
    with counting_skipped_steps():
        run.backward(*run.batch())
    assert all(before[n].equal(w) for n, w in weights_of(run.model).items())  # learned nothing
    assert counted(run, 1)  # and paid


def test_a_second_optimizer_after_the_step_is_post_processing():
    run = full(model=ball(), noise_multiplier=1e3, lr=0.0)
    second = torch.optim.SGD(run.model.parameters(), lr=1e-6)
    for _ in range(2):
        run.step()
        second.step()  # the gradients it finds are noisy
    assert run.engine.ledger.releases == 2


def test_updating_weights_by_hand():
    run = full(model=ball())
    with refused(("weights", "optimizer", "NoneType"), error=(PrivacyError, TypeError)):
        for _ in range(2):
            run.backward(*run.batch())
            with torch.no_grad():
                for parameter in run.model.parameters():
                    parameter -= 1e-3 * parameter.grad
            run.optimizer.zero_grad()


def test_sharpness_aware_ascent():
    run = full(model=ball())
    x, y = run.batch()
    run.backward(x, y)
    with refused("no noise yet"):
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter += 1e-3 * parameter.grad
        run.backward(x, y)


def test_a_copied_optimizer():
    run = Run().steps(1)
    model, optimizer = copy.deepcopy((run.model, run.optimizer))
    F.cross_entropy(model(torch.randn(4, 6)), torch.zeros(4).long()).backward()
    optimizer.step()  # of the copy: an ordinary one, on other data
    run.step()
    assert counted(run, 2)


def test_a_restored_optimizer_keeps_the_noise():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = Run(model, optimizer=optimizer, noise_multiplier=1e3).steps(2)
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    run.step()
    assert gradients_of(run.model)["1.weight"].norm() > 10
    assert counted(run, 3)


_OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_ordinary_optimizers_and_schedulers(name):
    model = mlp()
    optimizer = _OPTIMIZERS[name](
        [{"params": model[1].parameters(), "lr": 0.01}, {"params": model[3].parameters()}]
    )
    before = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    run = Run(model, optimizer=optimizer, noise_multiplier=1e3)
    after = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 10)
    for _ in range(3):
        run.step()
        assert gradients_of(run.model)["3.weight"].norm() > 10  # noisy
        before.step()
        after.step()
    assert counted(run, 3)
    assert clipless.certify(run.model)


def test_a_disabled_gradient_scaler():
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    run = Run()
    for _ in range(2):
        x, y = run.batch()
        run.optimizer.zero_grad()
        scaler.scale(run.criterion(run.model(x), y)).backward()
        scaler.step(run.optimizer)
        scaler.update()
    assert counted(run, 2)


def test_a_gradient_scaler_nobody_was_told_of():
    scaler = torch.amp.GradScaler("cpu")
    run = Run()
    x, y = run.batch()
    with refused_unharmed(run, "multiplied by 65536", "grad_scaler"):
        scaler.scale(run.criterion(run.model(x), y)).backward()


def test_a_gradient_scaler_and_a_fused_optimizer():
    # They divide by the scale inside their step, after the noise was added.
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    with refused("a fused optimizer", "divide the noise", "fused=False"):
        full(model=model, optimizer=optimizer, grad_scaler=torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize("unscaled", [False, True])
def test_the_noise_under_a_gradient_scaler(unscaled):
    scaler = torch.amp.GradScaler("cpu")
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run = full(model=model, optimizer=optimizer, noise_multiplier=1e3, grad_scaler=scaler)
    moved = {}

    def watch(optimizer, args, kwargs):
        moved["start"] = weights_of(model)

    def measure(optimizer, args, kwargs):
        moved["step"] = {n: w - moved["start"][n] for n, w in weights_of(model).items()}

    optimizer.register_step_pre_hook(watch)
    # The first hook runs first: what the optimizer did is seen before the projection.
    handle = optimizer.register_step_post_hook(measure)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)
    squares = dict.fromkeys(run.engine.plan.noise_deviations, 0.0)
    for _ in range(50):
        x, y = run.batch()
        run.optimizer.zero_grad()
        scaler.scale(run.criterion(run.model(x), y)).backward()
        if unscaled:  # in order to clip gradients, which finds zeros here
            scaler.unscale_(run.optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(run.optimizer)
        scaler.update()
        for name in squares:
            squares[name] += moved["step"][name].square().mean().item() / 50
    for name, deviation in run.engine.plan.noise_deviations.items():
        assert math.sqrt(squares[name]) == pytest.approx(deviation, rel=0.2)
    assert counted(run, 50)


def test_a_scaled_loss_and_an_ordinary_step():
    # scaler.step(optimizer) was forgotten: nobody divides by the scale.
    scaler = torch.amp.GradScaler("cpu")

    run = full(noise_multiplier=0.0, lr=0.0, grad_scaler=scaler)
    x, y = run.batch()
    scaler.scale(run.criterion(run.model(x), y)).backward()
    run.optimizer.step()
    assert_close(gradients_of(run.model), expected_gradients(run, x, y))


def test_a_gradient_scaler_that_is_not_used():
    run = full(noise_multiplier=0.0, lr=0.0, grad_scaler=torch.amp.GradScaler("cpu"))
    x, y = run.batch()
    run.backward(x, y)
    run.optimizer.step()
    assert_close(gradients_of(run.model), expected_gradients(run, x, y))


def test_a_second_optimizer_on_gradients_of_evaluation():
    # Nobody can tell this from an edit of the weights, which are certified again; the report
    # says that such gradients are not covered.
    run = full(model=ball())
    second = torch.optim.SGD(run.model.parameters(), lr=10.0)
    x, y = run.batch()
    F.cross_entropy(run.model.eval()(x), y).backward()
    second.step()
    second.zero_grad()
    run.model.train()
    with torch.no_grad():
        run.model[1].weight.mul_(100)
    with refused("1.weight", error=ConstraintError):
        run.backward(x, y)
    assert any("evaluation mode" in caveat for caveat in run.engine.report().caveats)
