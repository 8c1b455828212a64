"""Sessions that are replaced, closed, refused or detached: nothing trains without noise.

A session holds a model, its optimizer, criterion and loader. Whatever ends it, what it held refuses
to train until it is made private again or, in so many words, ordinary.
"""

import copy

import pytest
import torch
from torch import nn

from clipless import PrivacyEngine, losses
from clipless import nn as lip
from clipless.errors import CliplessError, PrivacyError
from clipless.privacy import Ledger, PoissonSampling, PrivateLoader, Relation
from tests.privacy.misuse_helpers import (
    counted,
    gradients_of,
    refused,
    refused_unharmed,
    weights_of,
)
from tests.privacy.runs import Run, engine_arguments, examples, mlp

OVER = "belongs to a private training session that is over"


def make(engine, run=None, **given):
    """Call `make_private` with the objects of a run, or with others."""
    model = given.pop("module", None) or (mlp() if run is None else run.model)
    options = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": PrivateLoader(
            examples(100), sampling=PoissonSampling(dataset_size=100, rate=0.2)
        ),
        "criterion": losses.CrossEntropy(),
        "noise_multiplier": 1.0,
    } | given
    return engine.make_private(**engine_arguments(engine.make_private, options))


def refuses_to_train(run):
    """All ways into a step are closed, and evaluation is not."""
    x, y = examples(10)
    with refused(OVER, "engine.detach()"):
        run.model.train()(x)
    with refused(OVER, "engine.detach()"):
        run.criterion(torch.zeros(10, 3, requires_grad=True), y)
    with refused_unharmed(run, OVER, "engine.detach()"):
        run.optimizer.step()
    with refused(OVER, "engine.detach()"):
        next(iter(run.loader))
    with torch.no_grad():
        assert run.criterion(run.model(x), y).ndim == 0
    assert run.criterion(run.model.eval()(x), y).ndim == 0
    run.model.train()
    return True


# --- one loader, one session ---------------------------------------------------------------------


@pytest.mark.parametrize("engines", ["one engine", "two engines"])
def test_a_second_session_cannot_have_the_loader(engines):
    """It printed 2.88 where 4.67 was true: one sample was released twice, as two events."""
    run = Run(noise_multiplier=1e3).steps(2)
    other = run.engine if engines == "one engine" else PrivacyEngine()
    state = run.loader.state_dict()
    with refused("belongs to another private training session", "Nothing was changed"):
        make(other, data_loader=run.loader)
    assert run.loader.state_dict() == state
    run.step()
    assert all(g.norm() > 10 for g in gradients_of(run.model).values())
    assert counted(run, 3)


def test_the_batch_of_another_session_is_refused():
    first, second = Run(sampling="fixed_size"), Run(sampling="fixed_size")
    for _ in range(3):
        second.step()
    x, y = second.batch()
    first.batch()
    with refused("drawn from another private loader"):
        first.model(x)
    second.backward(x, y)
    second.optimizer.step()
    assert counted(second, 4)


def test_a_sample_is_released_once_whoever_asks():
    """Not by the session that follows on the same loader either."""
    run = Run(sampling="fixed_size", engine=PrivacyEngine()).steps(1)
    x, y = run.batch()
    run.engine.detach()
    used = run.loader.state_dict()["key"]
    engine, criterion = PrivacyEngine(), losses.CrossEntropy()
    model, optimizer, loader = make(engine, data_loader=run.loader, criterion=criterion)
    assert loader is run.loader
    with refused("drawn from another private loader"):
        model(x)
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.step()
    assert engine.ledger.releases == len(loader)
    assert loader.state_dict()["key"] != used


def test_copies_and_states_of_a_loader_draw_samples_of_their_own():
    loaders = [
        PrivateLoader(examples(100), sampling=PoissonSampling(dataset_size=100, rate=0.5))
        for _ in range(2)
    ]
    loaders[1].load_state_dict(loaders[0].state_dict())
    loaders.append(copy.deepcopy(loaders[0]))
    drawn = []
    for loader in loaders:
        engine = PrivacyEngine()
        make(engine, data_loader=loader)
        next(iter(loader))
        drawn.append(loader.current.indices.tolist())
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]


# --- sessions that end ---------------------------------------------------------------------------


def test_a_closed_engine_leaves_nothing_that_trains():
    run = Run().steps(2)
    run.engine.close()
    assert refuses_to_train(run)
    assert counted(run, 2)
    with refused(OVER):
        run.engine.set_noise_multiplier(2.0)
    with refused(OVER):
        run.engine.compile()


def test_a_step_that_is_under_way_ends_with_its_session():
    run = Run()
    x, y = run.batch()
    output = run.model(x)
    loss = run.criterion(run.model(x), y)
    run.engine.close()
    with refused(OVER):
        run.criterion(output, y)
    with refused("after the step it belongs to"):
        loss.backward()
    with refused_unharmed(run, OVER):
        run.optimizer.step()
    assert not gradients_of(run.model)


def test_detach_makes_everything_ordinary():
    run = Run().steps(2)
    run.engine.close()
    run.engine.detach()
    x, y = examples(10)
    reduction = losses.CrossEntropy().reduction
    assert run.criterion.reduction == reduction
    assert run.criterion(run.model.train()(x), y).equal(losses.CrossEntropy()(run.model(x), y))
    run.criterion(run.model(x), y).backward()
    run.optimizer.step()
    assert len(list(run.loader)) > 0
    assert counted(run, 2)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in run.model.modules())
    assert "_clipless_reduction" not in vars(run.criterion)


@pytest.mark.parametrize("engines", ["one engine", "two engines"])
@pytest.mark.parametrize("shared", ["model", "optimizer", "everything"])
def test_a_session_that_is_replaced(engines, shared):
    run = Run(noise_multiplier=1e3).steps(2)
    engine = run.engine if engines == "one engine" else PrivacyEngine()
    given = {"optimizer": run.optimizer} if shared != "model" else {}
    given |= {"criterion": run.criterion} if shared == "everything" else {}
    criterion = given.setdefault("criterion", losses.CrossEntropy())
    model, optimizer, loader = make(engine, run, noise_multiplier=1e3, **given)
    with refused(OVER, "another make_private"):
        next(iter(run.loader))
    if shared == "model":
        with refused(OVER, "another make_private"):
            run.optimizer.step()
    if shared != "everything":
        with refused(OVER, "another make_private"):
            run.criterion(torch.zeros(10, 3, requires_grad=True), examples(10)[1])
    before = engine.ledger.releases
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        assert all(g.norm() > 10 for g in gradients_of(model).values())
    assert engine.ledger.releases == before + len(loader)
    if engine is not run.engine:  # what the first one has left to give back, and no more
        run.engine.detach()
        x, y = next(iter(loader))
        criterion(model(x), y).backward()
        optimizer.step()
        assert all(g.norm() > 10 for g in gradients_of(model).values())
        assert run.criterion.reduction == ("none" if shared == "everything" else "mean")


def test_a_model_that_became_a_part_of_another_one():
    run = Run().steps(1)
    larger = nn.Sequential(*run.model, lip.SpectralLinear(3, 3))
    engine, criterion = PrivacyEngine(), losses.CrossEntropy()
    _, optimizer, loader = make(engine, module=larger, criterion=criterion)
    with refused(OVER):
        run.model(examples(5)[0])
    with refused_unharmed(run, OVER):
        run.optimizer.step()
    x, y = next(iter(loader))
    criterion(larger(x), y).backward()
    optimizer.step()
    assert engine.ledger.releases == 1


def test_a_criterion_may_serve_two_models():
    criterion = losses.CrossEntropy()
    runs = [Run(criterion=criterion, noise_multiplier=1e3) for _ in range(2)]
    for run in (*runs, *runs):
        run.step()
        assert all(g.norm() > 10 for g in gradients_of(run.model).values())
    assert all(counted(run, 2) for run in runs)
    runs[0].engine.detach()
    runs[1].step()
    assert counted(runs[1], 3)
    assert criterion.reduction == "none"
    runs[1].engine.close()
    assert refuses_to_train(runs[1])
    runs[1].engine.detach()
    assert criterion.reduction == "mean"


def test_a_closed_session_is_made_private_again():
    run = Run().steps(2)
    run.engine.close()
    again = Run(
        model=run.model, optimizer=run.optimizer, criterion=run.criterion, engine=PrivacyEngine()
    )
    again.steps(2)
    assert counted(again, 2)


# --- a failed make_private changes nothing -------------------------------------------------------


class Batched(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def wrong(run):
    """Calls of `make_private` that are refused, at different stages."""
    other = [nn.Parameter(torch.zeros(2))]
    twice = nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(6, 3), Batched())
    state = run.engine.state_dict()
    return {
        "a model without bounds": {"module": twice},
        "an optimizer of other parameters": {"optimizer": torch.optim.SGD(other, lr=0.1)},
        "another criterion": {"criterion": nn.CrossEntropyLoss()},
        "a loader in use": {"data_loader": run.loader},
        "a noise without a meaning": {"noise_multiplier": -1.0},
        "a state of another plan": {"resume_from": state, "noise": "global"},
        "noise of another device": {"resume_from": {**state, "noise": {"cuda:0": None}}},
        "another ledger's run": {"resume_from": {**state, "run": "unknown"}},
        "data of another size": {
            "data_loader": PrivateLoader(
                examples(50), sampling=PoissonSampling(dataset_size=50, rate=0.2)
            )
        },
    }


@pytest.mark.parametrize("engines", ["one engine", "two engines"])
@pytest.mark.parametrize("what", [*wrong(Run())])
def test_a_refused_make_private_changes_nothing(what, engines, tmp_path):
    """Before, the model went on training without noise and without ledger, silently."""
    clip = nn.Sequential(*mlp(), lip.ClipGradient(0.1))
    run = Run(clip, noise_multiplier=1e3).steps(2)
    path = tmp_path / "ledger"
    engine = run.engine if engines == "one engine" else PrivacyEngine(ledger=path)
    given = wrong(run)[what]
    if what == "data of another size" and engine is not run.engine:
        return  # nothing is wrong with it
    options = {"optimizer": run.optimizer, "criterion": run.criterion, "noise_multiplier": 1e3}
    if "data_loader" not in given:
        free = PrivateLoader(examples(100), sampling=run.loader.sampling)
        options["data_loader"] = free
        loader_state = free.state_dict()
    before = weights_of(run.model)
    scale, entries = clip[-1].loss_scale, run.engine.ledger.entries()
    state, gradients = run.loader.state_dict(), gradients_of(run.model)
    with pytest.raises((CliplessError, ValueError)):
        make(engine, run, **(options | given))
    assert engine is run.engine or not path.exists()
    assert run.engine.session.over is None
    assert run.criterion.reduction == "none"
    assert clip[-1].loss_scale == scale
    assert run.engine.ledger.entries() == entries
    assert run.loader.state_dict() == state
    if "data_loader" in options and "data_loader" not in given:
        assert options["data_loader"].state_dict() == loader_state
    assert all(before[n].equal(w) for n, w in weights_of(run.model).items())
    assert all(gradients[n].equal(g) for n, g in gradients_of(run.model).items())
    run.step()
    assert all(g.norm() > 10 for g in gradients_of(run.model).values())
    assert counted(run, 3)


def test_an_engine_that_refused_once_can_be_about_other_data():
    engine = PrivacyEngine()
    with pytest.raises(PrivacyError):
        make(engine, criterion=nn.CrossEntropyLoss())
    small = PrivateLoader(examples(50), sampling=PoissonSampling(dataset_size=50, rate=0.2))
    make(engine, data_loader=small)
    assert engine.ledger.dataset_size == 50


def test_a_ledger_that_was_given_stays_open():
    with Ledger.in_memory(dataset_size=100, relation=Relation.ZERO_OUT) as ledger:
        engine = PrivacyEngine(ledger=ledger)
        with pytest.raises((PrivacyError, ValueError)):
            make(engine, noise_multiplier=-1.0)
        make(engine)
        assert not ledger.closed


def test_detaching_a_model_leaves_the_session_of_a_part_of_it_alone():
    """Its thresholds were those of an ordinary model then, and it could not go on."""
    part = nn.Sequential(mlp(), lip.ClipGradient(0.5))
    whole = Run(nn.Sequential(lip.BoundedInput(2.0), part), engine=PrivacyEngine())
    run = Run(part, engine=PrivacyEngine())  # takes over
    whole.engine.detach()
    assert part[1].loss_scale == 1 / run.engine.plan.loss_divisor
    run.steps(2)
    run.engine.detach()
    assert part[1].loss_scale == 1.0
