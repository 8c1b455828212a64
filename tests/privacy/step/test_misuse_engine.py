"""Misuse of the engine, its ledger and its budget, and what happens when things break off.

See `tests.privacy.misuse_helpers` for how every case must end. Here: copies, compiled models,
interruptions, threads; budgets exceeded, ledgers shared, lost and mixed up; and the failures of an
earlier implementation, one by one.
"""

import copy
import gc
import io
import itertools
import math
import os
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)

import clipless
from clipless import PrivacyEngine, losses
from clipless import nn as lip
from clipless.errors import (
    BudgetExhaustedError,
    ConstraintError,
    LedgerError,
    PrivacyError,
)
from clipless.privacy import FixedSizeSampling, LargeDelta, Ledger, PoissonSampling
from clipless.privacy import epsilon as account
from clipless.privacy.step._output_guard import call_of
from tests.nn.operators import norm_of, singular_values
from tests.privacy.misuse_helpers import (
    bounded_or_refused,
    clipped,
    counted,
    counting_skipped_steps,
    fixed,
    full,
    gradients_of,
    refused,
    refused_unharmed,
    weights_of,
)
from tests.privacy.runs import Run, cnn, examples, filtered_engine, mlp, residual

# --- copies, compilation and interruptions -------------------------------------------------------


def test_copies_are_ordinary_and_the_original_is_unharmed():
    run = Run().steps(1)
    run.backward(*run.batch())
    buffer = io.BytesIO()
    torch.save(run.model, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(run.model),
        pickle.loads(pickle.dumps(run.model)),
        torch.load(buffer, weights_only=False),
    ]
    for copied in copies:
        copied.zero_grad()
        F.cross_entropy(copied(torch.randn(4, 6)), torch.zeros(4).long()).backward()
        with refused_unharmed(run, "output of the private model"):
            run.criterion(copied(torch.randn(4, 6)), torch.zeros(4).long())
    run.optimizer.step()
    assert counted(run, 2)


def test_averaged_weights():
    run = Run()
    average = torch.optim.swa_utils.AveragedModel(run.model)
    for _ in range(4):
        run.step()
        average.update_parameters(run.model)
    kept = copy.deepcopy(run.model.state_dict())
    run.model.load_state_dict(average.module.state_dict())  # evaluate the average ...
    with torch.no_grad():
        run.model(torch.randn(4, 6))
    run.model.load_state_dict(kept)  # ... and go on
    run.step()
    assert counted(run, 5)


@pytest.mark.parametrize("when", ["before", "used before", "after"])
def test_compiled_models(when):
    model = mlp()
    if when != "after":
        model = torch.compile(model, backend="eager")
    if when == "used before":
        model(torch.randn(4, 6))
    run = Run(model, noise_multiplier=1e3)
    if when == "after":
        run.model = torch.compile(run.model, backend="eager")
    run.steps(2)
    assert counted(run, 2)
    assert all(g.norm() > 10 for g in gradients_of(run.model).values())


def test_a_compiled_optimizer_step():
    run = full(noise_multiplier=1e3)
    step = torch.compile(run.optimizer.step, backend="eager")
    for _ in range(2):
        run.optimizer.zero_grad()
        run.backward(*run.batch())
        step()
        assert all(g.norm() > 10 for g in gradients_of(run.model).values())
    assert counted(run, 2)


def test_activation_checkpointing():
    run = full(noise_multiplier=0.0)
    x, y = run.batch()
    out = torch.utils.checkpoint.checkpoint(run.model, x, use_reentrant=False)
    run.criterion(out, y).backward()
    run.optimizer.step()
    assert run.engine.ledger.releases == 1
    for name, sensitivity in run.engine.plan.sensitivities.items():
        assert gradients_of(run.model)[name].norm() <= 16 * sensitivity


def test_functional_calls():
    run = full()
    x, y = run.batch()
    named = dict(run.model.named_parameters())
    large = named | {"3.weight": nn.Parameter(100 * named["3.weight"].detach())}
    with refused_unharmed(run, "3.weight", error=ConstraintError):
        run.criterion(torch.func.functional_call(run.model, large, (x,)), y)
    run.criterion(torch.func.functional_call(run.model, named, (x,)), y).backward()
    run.optimizer.step()
    assert counted(run, 1)


def test_an_error_in_the_middle_of_a_forward_pass(monkeypatch):
    run = Run()
    x, y = run.batch()
    with monkeypatch.context() as patched:
        patched.setattr(F, "linear", _fail)
        with pytest.raises(MemoryError):
            run.model(x)
    with refused_unharmed(run, "called outside the model"):
        run.model[1](x)
    with monkeypatch.context() as patched:
        patched.setattr(F, "linear", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.model(x)
    run.backward(x, y)
    run.optimizer.step()
    assert counted(run, 1)


def test_an_error_in_the_middle_of_a_backward_pass(monkeypatch):
    run = full(model=clipped())
    x, y = run.batch()
    loss = run.criterion(run.model(x), y)
    reached = []

    def fail(*_):
        reached.append(True)
        run.model[1].weight.grad = torch.ones_like(run.model[1].weight)  # part of a gradient
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("clipless.nn._gradient.clip_rows", fail)
        with pytest.raises(MemoryError):
            loss.backward()
    assert reached
    assert not gradients_of(run.model)  # what there was had no noise
    with refused_unharmed(run, "backward was called for 0 of the 1"):
        run.optimizer.step()
    with counting_skipped_steps():
        run.step()
    assert counted(run, 2)


def test_backward_in_two_threads():
    # Both would collect what the other has left in the parameters.
    run = full(micro_batch_size=8)
    one, two = (run.criterion(run.model(x), y) for x, y in run.loader)
    run.engine.session._delivering.acquire()  # as if the other thread were at it
    with refused_unharmed(run, "two threads", "one after the other"):
        one.backward()
    run.engine.session._delivering.release()
    two.backward()
    with refused_unharmed(run, "backward was called for 1 of the 2"):
        run.optimizer.step()


def test_outputs_kept_after_their_step_hold_no_graph():
    run = full()
    x, y = run.batch()
    out = run.model(x)
    assert call_of(out).output.grad_fn is not None
    run.criterion(out, y).backward()
    assert call_of(out).output.grad_fn is None


def _fail(*_):
    raise MemoryError


def _interrupt(*_):
    raise KeyboardInterrupt


def test_an_interrupted_step_is_counted(monkeypatch):
    run = full(noise_multiplier=1e3)
    run.backward(*run.batch())
    run.optimizer.register_step_pre_hook(_interrupt)  # after the noise, before the update
    with pytest.raises(KeyboardInterrupt):
        run.optimizer.step()
    assert counted(run, 1)
    run.optimizer._optimizer_step_pre_hooks.popitem()
    with refused_unharmed(run, "without a batch"):
        run.optimizer.step()  # the step was taken, as far as the ledger is concerned
    run.step()
    assert counted(run, 2)


# --- budget, ledger and engine -------------------------------------------------------------------


def test_no_noise_is_no_privacy():
    run = Run(engine=PrivacyEngine(), noise_multiplier=0.0)
    assert run.engine.get_epsilon() == 0.0
    run.step()
    assert run.engine.get_epsilon() == math.inf


@pytest.mark.parametrize("sigma", [-1.0, math.nan, math.inf])
def test_noise_multipliers_without_a_meaning(sigma):
    with refused("noise_multiplier", error=ValueError):
        Run(noise_multiplier=sigma)
    run = Run()
    with refused("noise_multiplier", error=ValueError):
        run.engine.set_noise_multiplier(sigma)
    run.step()
    assert counted(run, 1)


def test_noise_changed_in_the_middle_of_a_step():
    run = Run(engine=filtered_engine())
    run.backward(*run.batch())
    with refused("a step is under way", "between steps"):
        run.engine.set_noise_multiplier(0.1)
    run.optimizer.step()
    run.engine.set_noise_multiplier(2.0)
    run.step()
    assert [m.noise_multiplier for m, _ in run.engine.ledger.history()] == [1.0, 2.0]


def test_noise_without_projection():
    with refused("bounds='none' needs noise_multiplier=0"):
        Run(bounds="none")
    run = Run(bounds="none", noise_multiplier=0.0)
    with refused("without projection"):
        run.engine.set_noise_multiplier(1.0)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan])
def test_deltas_without_a_meaning(delta):
    with refused("delta must lie strictly between 0 and 1", error=ValueError):
        Run(target_delta=delta)
    run = Run(engine=PrivacyEngine()).steps(1)
    with refused("delta must lie strictly between 0 and 1", error=ValueError):
        run.engine.get_epsilon(delta)


def test_a_delta_that_permits_to_publish_an_example():
    assert Run().engine.plan.delta <= 0.1 / 100
    for delta in (0.01, 0.05):
        with refused("at least 1/N", "publishing"):
            Run(target_delta=delta)
    with pytest.warns(UserWarning, match="0.1/N"):
        run = Run(target_delta=LargeDelta(0.0099))
    with refused("0.1/N", "LargeDelta"):
        Run(target_delta=0.0099)
    assert any("publishing" in caveat for caveat in run.steps(1).engine.report().caveats)
    assert not any("publishing" in caveat for caveat in Run().steps(1).engine.report().caveats)


def test_an_unknown_accountant():
    with refused("'pld' or 'rdp'", error=ValueError):
        Run(engine=PrivacyEngine(accountant="gdp"))


def test_a_step_beyond_the_budget():
    run = Run(engine=PrivacyEngine(), target_epsilon=1.0, steps=3).steps(3)
    before = weights_of(run.model)
    for _ in range(2):
        with refused("would exceed epsilon=1", "Stop here", error=BudgetExhaustedError):
            run.step()
        with pytest.raises(PrivacyError):
            run.optimizer.step()
    assert all(before[n].equal(w) for n, w in weights_of(run.model).items())
    assert run.engine.get_epsilon() <= 1.0


def test_less_noise_than_agreed_does_not_exceed_the_budget():
    engine = PrivacyEngine(accountant="filter")
    run = Run(engine=engine, target_epsilon=2.0, steps=50).steps(5)
    run.engine.set_noise_multiplier(run.engine.plan.noise_multiplier / 1.5)
    with refused("would exceed epsilon=2", error=BudgetExhaustedError):
        run.steps(50)
    declared = engine.ledger.filter
    assert 0.9 * declared.limit < declared.spent(engine.ledger.history()) <= declared.limit
    assert account(engine.ledger.history(), engine.plan.delta) <= engine.get_epsilon() == 2.0


def test_a_target_that_is_spent():
    engine = PrivacyEngine()
    Run(engine=engine, noise_multiplier=0.5).steps(5)
    with pytest.raises((PrivacyError, ValueError), match=r"spent|exceed|already|budget"):
        Run(engine=engine, target_epsilon=1.0, steps=10)


@pytest.mark.parametrize("target", [0.0, -1.0, math.inf, math.nan])
def test_targets_without_a_meaning(target):
    with pytest.raises(ValueError, match="epsilon"):
        Run(target_epsilon=target, steps=5)


def test_a_second_make_private_goes_on():
    engine = PrivacyEngine()
    first = Run(engine=engine).steps(3)
    mechanism = first.engine.plan.mechanism
    second = Run(engine=engine, model=first.model, optimizer=first.optimizer)
    assert engine.get_epsilon() == account([(mechanism, 3)], engine.plan.delta)
    second.steps(2)
    assert counted(second, 5)


def test_two_models_under_one_engine():
    """Both are private and counted, or the one that is not is refused."""
    engine = PrivacyEngine()
    first = full(engine=engine, noise_multiplier=1e3)
    second = full(engine=engine, noise_multiplier=1e3)
    second.step()
    try:
        first.step()
    except PrivacyError:
        return
    assert gradients_of(first.model)["1.weight"].norm() > 10
    assert engine.ledger.releases == 2


def test_an_engine_that_goes_out_of_scope():
    def build():
        run = full(noise_multiplier=1e3)
        return run.model, run.optimizer, run.loader, run.criterion

    model, optimizer, loader, criterion = build()
    gc.collect()
    x, y = next(iter(loader))
    loss = criterion(model(x), y)
    assert loss.ndim == 0
    loss.backward()
    optimizer.step()
    assert all(g.norm() > 10 for g in gradients_of(model).values())


def test_ending_private_training_in_the_middle_of_a_step():
    run = full()
    run.backward(*run.batch())
    before = weights_of(run.model)
    run.engine.detach()
    run.optimizer.step()  # the gradients of the last batch got no noise
    assert all(before[n].equal(w) for n, w in weights_of(run.model).items())


@pytest.mark.parametrize("end", ["detach", "make_private again"])
def test_a_loss_from_before_the_end_of_private_training(end):
    run = full()
    x, y = run.batch()
    loss = run.criterion(run.model(x), y)
    if end == "detach":
        run.engine.detach()
    else:
        full(engine=run.engine, model=run.model, criterion=run.criterion)
    with refused_unharmed(run, "after the step it belongs to"):
        loss.backward()
    assert not gradients_of(run.model)


def test_make_private_in_the_middle_of_a_step():
    engine = PrivacyEngine()
    run = full(engine=engine)
    run.backward(*run.batch())
    old = run.optimizer
    before = weights_of(run.model)
    full(engine=engine, model=run.model, criterion=run.criterion)
    try:
        old.step()
    except PrivacyError:
        return
    assert all(before[n].equal(w) for n, w in weights_of(run.model).items())


def test_a_copied_engine():
    run = Run().steps(1)
    with refused("cannot be copied", error=LedgerError):
        copy.deepcopy(run.engine)


def test_two_engines_on_one_model():
    """The second one takes over, and what is left of the first one refuses."""
    run = Run()
    other = Run(model=run.model, optimizer=run.optimizer, criterion=run.criterion)
    with refused_unharmed(run, "the loader belongs to a private training session that is over"):
        run.step()
    other.steps(2)
    assert counted(other, 2)
    assert counted(run, 0)


@pytest.mark.parametrize("again", ["same engine", "same ledger"])
def test_a_seed_does_not_repeat_its_noise(again, tmp_path):
    """Equal noise in two releases cancels in their difference."""
    path = tmp_path / "ledger"
    data = (torch.zeros(16, 6), torch.zeros(16).long())
    engine = PrivacyEngine(insecure_seed=0, ledger=path)
    first = full(engine=engine, data=data, noise_multiplier=10.0)
    first.step()
    if again == "same ledger":
        engine.ledger.close()
        engine = PrivacyEngine(insecure_seed=0, ledger=path)
    second = full(engine=engine, data=data, noise_multiplier=10.0)
    second.step()
    name = "1.weight"  # of which all true gradients are zero here
    assert not gradients_of(first.model)[name].equal(gradients_of(second.model)[name])


def test_a_ledger_in_use(tmp_path):
    path = tmp_path / "ledger"
    run = Run(engine=PrivacyEngine(ledger=path)).steps(1)
    with refused("in use by", "(this one)", "one writer", error=LedgerError):
        Run(engine=PrivacyEngine(ledger=path))
    assert _in_child(lambda: Ledger(path)) == "LedgerInUseError"
    run.step()
    assert counted(run, 2)


def test_training_in_a_forked_child():
    run = Run().steps(1)
    assert _in_child(run.step) == "LedgerError"
    run.step()
    assert counted(run, 2)


def _in_child(action):
    """The name of the error that `action` ends in when it runs in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        outcome = "nothing"
        try:
            action()
        except BaseException as error:
            outcome = type(error).__name__
        os.write(writing, outcome.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        return pipe.read()


def test_the_ledger_of_another_data_set(tmp_path):
    path = tmp_path / "ledger"
    engine = PrivacyEngine(ledger=path)
    Run(engine=engine).steps(1)
    with refused("100 examples", "one engine for each data set"):
        Run(engine=engine, data=examples(50), batch_size=10)
    engine.ledger.close()
    with refused("100 examples", "another ledger", error=LedgerError):
        Run(engine=PrivacyEngine(ledger=path), data=examples(50), batch_size=10)
    with refused("replace_one", "another ledger", error=LedgerError):
        Run(engine=PrivacyEngine(ledger=path), relation="replace_one")


def test_a_ledger_deleted_while_in_use(tmp_path):
    path = tmp_path / "ledger"
    run = Run(engine=PrivacyEngine(ledger=path)).steps(1)
    path.unlink()
    with refused_unharmed(run, "moved or deleted", error=LedgerError):
        run.step()


def test_a_closed_ledger():
    run = Run().steps(1)
    run.engine.ledger.close()
    with refused_unharmed(run, "closed", "open it again", error=LedgerError):
        run.step()
    assert counted(run, 1)


def test_asking_before_anything_is_private():
    with refused("call make_private first"):
        PrivacyEngine().get_epsilon()


def test_zero_out_for_batches_of_fixed_size():
    with refused("REPLACE_ONE", "PoissonSampling"):
        fixed(relation="zero_out")


def test_noise_is_what_the_plan_says():
    data = (torch.zeros(16, 6), torch.zeros(16).long())
    run = full(data=data, noise_multiplier=5.0, lr=0.0)
    seen = []
    for _ in range(60):
        run.step()
        seen.append(gradients_of(run.model)["1.weight"])
    measured = torch.stack(seen).std().item()
    assert measured == pytest.approx(run.engine.plan.noise_deviations["1.weight"], rel=0.05)


def test_what_cannot_be_noticed_is_said():
    caveats = " ".join(Run(engine=PrivacyEngine()).engine.report().caveats).lower()
    for word in ("gradients", "evaluation mode", "mix", "losses", "choosing"):
        assert word in caveats, f"no caveat speaks of {word}"


# --- the failures of an earlier implementation ---------------------------------------------------


def _image_run(model, image, label):
    """One step on one example; returns gradients over sensitivities."""
    run = Run(
        model, (image[None], torch.tensor([label])), batch_size=1, sampling="full_batch",
        noise_multiplier=0.0, lr=0.0,
    )  # fmt: skip
    run.step()
    return {
        name: gradients_of(run.model)[name].norm().item() / sensitivity
        for name, sensitivity in run.engine.plan.sensitivities.items()
    }


@pytest.mark.parametrize("window", [3, 5, 7])
def test_kernels_on_a_constant_image(window):
    worst = 0.0
    for label, seed in itertools.product(range(2), range(3)):
        torch.manual_seed(seed)
        model = nn.Sequential(
            lip.BoundedInput(1.0),
            lip.SpectralConv2d(1, 2, window, padding="same", bias=True),
            lip.ScaledGlobalAvgPool2d(),
            lip.SpectralLinear(2, 2),
        )
        ratios = _image_run(model, torch.ones(1, 12, 12), label)
        assert max(ratios.values()) <= 1
        worst = max(worst, *ratios.values())
    assert worst > 0.1


def test_a_bias_on_a_large_map():
    model = nn.Sequential(
        lip.BoundedInput(1.0),
        lip.SpectralConv2d(1, 2, 3, padding="same", bias=True),
        lip.ScaledGlobalAvgPool2d(),
        lip.SpectralLinear(2, 2),
    )
    ratios = _image_run(model, torch.zeros(1, 28, 28), 0)
    assert 0.3 < ratios["1.bias"] <= 1  # 28 times the bound of a single position


@pytest.mark.parametrize("shape", [(6,), (2, 6)])
def test_centering_keeps_examples_apart(shape):
    layers = [lip.BoundedInput(1.0), lip.LayerCentering()]
    if len(shape) > 1:
        layers.append(nn.Flatten())
    width = math.prod(shape)

    def build():
        return nn.Sequential(*layers, lip.SpectralLinear(width, 3))

    assert not bounded_or_refused(lambda run: run.step(), build=build, shape=shape)
    x = torch.randn(4, *shape)
    together = lip.LayerCentering()(x)
    alone = torch.cat([lip.LayerCentering()(row[None]) for row in x])
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("name", ["binary KR", "KR", "HKR"])
def test_a_rare_class_weighs_no_more(name):
    binary = name == "binary KR"
    criterion = {
        "binary KR": losses.KantorovichRubinstein,
        "KR": losses.KantorovichRubinstein,
        "HKR": lambda: losses.HingeKR(alpha=1.0),
    }[name]
    x, _ = examples(64)
    common = torch.ones(64).long()
    rare = common.index_fill(0, torch.tensor([0]), -1 if binary else 0)
    assert not bounded_or_refused(
        lambda run: run.step(),
        build=lambda: mlp(1) if binary else mlp(3),
        criterion=criterion,
        data=((x, common), (x, rare)),
    )


@pytest.mark.parametrize("sort", [lip.GroupSort(2), lip.MaxMin(), lip.FullSort(), lip.GroupSort(4)])
def test_exact_ties(sort):
    model = nn.Sequential(
        lip.BoundedInput(1.0), lip.SpectralLinear(4, 4), sort, lip.SpectralLinear(4, 3)
    )
    with torch.no_grad():
        model[1].weight.copy_(torch.full((4, 4), 0.25))  # all features are equal
    clipless.project(model)
    with torch.no_grad():
        model[1].weight.copy_(torch.full((4, 4), 0.25))
    assert max(_image_run(model, torch.ones(4), 0).values()) <= 1


@pytest.mark.parametrize(("window", "size"), [(3, 5), (5, 3), (7, 2), (7, 9)])
def test_convolutions_stay_lipschitz_in_training(window, size):
    model = nn.Sequential(
        lip.BoundedInput(5.0),
        lip.SpectralConv2d(1, 2, window, padding="same"),
        lip.ScaledGlobalL2NormPool2d(),
        lip.SpectralLinear(2, 3),
    )
    run = Run(model, examples(20, (1, size, size)), batch_size=10, lr=10.0).steps(5)
    layer = copy.deepcopy(run.model[1]).double()
    assert norm_of(layer, (1, size, size)) <= 1 + 1e-6


def test_projections_are_exact_also_in_residual_blocks():
    run = Run(residual(), examples(20, (1, 4, 4)), batch_size=10, lr=50.0).steps(5)
    certificates = clipless.certify(run.model)
    assert any("2." in name for name in certificates)
    for _, layer in run.model.named_modules():
        if isinstance(layer, lip.SpectralConv2d):
            channels = layer.weight.shape[1]
            assert norm_of(copy.deepcopy(layer).double(), (channels, 4, 4)) <= 1 + 1e-6
        elif isinstance(layer, lip.SpectralLinear):
            assert singular_values(layer.weight).max() <= 1 + 1e-6


def test_shuffled_epochs_are_not_what_is_sampled():
    run = Run()
    loader = DataLoader(TensorDataset(*examples(100)), batch_size=20, shuffle=True)
    engine = PrivacyEngine(insecure_seed=0)
    model = mlp()
    _, _, private = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
        criterion=losses.CrossEntropy(), noise_multiplier=1.0,
    )  # fmt: skip
    drawn = [private.current.indices for _ in private]
    together = torch.cat(drawn)
    assert len({len(each) for each in drawn}) > 1  # sizes vary ...
    assert len(together.unique()) < len(together)  # ... and examples come again in an epoch
    assert engine.plan.sampling == PoissonSampling(dataset_size=100, rate=0.2) == private.sampling
    assert fixed().engine.plan.sampling == FixedSizeSampling(dataset_size=100, batch_size=20)
    assert run.engine.plan.mechanism.sampling == run.loader.sampling


def test_every_trainable_parameter_is_in_the_plan():
    for build in (mlp, cnn, residual):
        model = build()
        shape = (6,) if build is mlp else (1, 4, 4)
        run = Run(model, examples(20, shape), batch_size=10)
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        assert list(run.engine.plan.noise_deviations) == names
        assert all(deviation > 0 for deviation in run.engine.plan.noise_deviations.values())
