"""Noise is never used for two different values: not by resuming, by copying, or by a seed.

Two releases with the same noise differ by what the noise was to hide. So every test here looks for
noise that cancels, and for releases that nobody has paid for.
"""

import dataclasses
import json
import math
import shutil

import pytest
import torch
from torch import nn

from clipless import PrivacyEngine
from clipless import nn as lip
from clipless.distributed import fingerprint
from clipless.errors import BudgetExhaustedError, PrivacyError
from clipless.ledger import read_ledger
from clipless.training import Trainer
from tests.privacy.misuse_helpers import gradients_of, weights_of
from tests.privacy.runs import Run, examples, mlp

STEPS = 6
NOISE = 50.0  # far larger than any gradient


def begin(path, state=None, weights=None, **options):
    torch.manual_seed(0)
    model = mlp()
    if weights is not None:
        model.load_state_dict(weights)
    engine = PrivacyEngine(ledger=path, **options.pop("engine", {}))
    if "target_epsilon" not in options:
        options.setdefault("noise_multiplier", NOISE)
    options = {"resume_from": state, "sampling": "full_batch"} | options
    return Run(model, engine=engine, batch_size=100, **options)


def released(run, steps):
    """Take steps, and return what each of them has released, as one vector."""
    found = []
    for _ in range(steps):
        run.step()
        found.append(torch.cat([g.flatten() for g in gradients_of(run.model).values()]))
    return found


def saved_run(path, **options):
    """A run that goes on after its state was saved: the state, and what was released since."""
    run = begin(path, **options)
    run.steps(2)
    state, weights = run.engine.state_dict(), weights_of(run.model)
    weights |= {n: b.clone() for n, b in run.model.named_buffers()}
    since = released(run, STEPS)
    run.engine.close()
    return state, run.model.state_dict() | weights, since


def cancels(one, other):
    """Whether two releases have the same noise: their difference is then of another size."""
    return bool((one - other).norm() < 0.1 * one.norm())


CHANGES = {
    "another learning rate": {"lr": 5.0},
    "other data": {"data": examples(100, seed=9)},
    "one other example": {"data": [part.clone() for part in examples(100)]},
}
CHANGES["one other example"]["data"][0][3] = 7.0


@pytest.mark.parametrize("change", [*CHANGES])
def test_a_resumed_run_that_differs_has_fresh_noise_and_pays(change, tmp_path):
    """30 releases were seen and 10 in the ledger; their noise cancelled."""
    path = tmp_path / "ledger"
    state, weights, since = saved_run(path)
    assert read_ledger(path).counts().popitem()[1] == 2 + STEPS
    run = begin(path, state, weights, **CHANGES[change])
    with pytest.warns(UserWarning, match="does not come out as it did before"):
        again = released(run, STEPS)
    same = [torch.equal(one, other) for one, other in zip(again, since, strict=True)]
    first = same.index(False)
    assert first == (1 if change == "another learning rate" else 0)
    assert not any(same[first:])
    for one, other in zip(again[first:], since[first:], strict=True):
        assert not cancels(one, other)
    assert run.engine.ledger.releases == 2 + STEPS + (STEPS - first)


def test_another_multiplier_has_fresh_noise_and_pays(tmp_path):
    path = tmp_path / "ledger"
    state, weights, since = saved_run(path)
    run = begin(path, state, weights)
    with pytest.raises(PrivacyError, match="looking at results"):
        run.engine.set_noise_multiplier(2 * NOISE)
    session = run.engine.session  # as if a filter had been declared
    session.plan = dataclasses.replace(session.plan, noise_multiplier=2 * NOISE)
    with pytest.warns(UserWarning, match="does not come out as it did before"):
        again = released(run, STEPS)
    for one, other in zip(again, since, strict=True):
        assert not cancels(one, 2 * other)
        assert not cancels(one, other)
    assert sorted(count for _, count in run.engine.ledger.history()) == [STEPS, 2 + STEPS]


@pytest.mark.parametrize("left_out", ["drawn and not taken", "interrupted"])
def test_noise_of_a_repeated_step_that_is_left_out_is_not_used_later(
    left_out, tmp_path, monkeypatch
):
    """The step after the last digest was released with the noise of the last one."""
    path = tmp_path / "ledger"
    state, weights, since = saved_run(path)
    run = begin(path, state, weights)
    released(run, STEPS - 1)
    if left_out == "interrupted":
        monkeypatch.setattr("clipless.privacy.step._book.release_", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.step()
        monkeypatch.undo()
    else:
        run.batch()
    for one in released(run, 2):
        assert not any(cancels(one, other) for other in since)


def interrupt(*arguments):
    raise KeyboardInterrupt


def test_what_comes_out_the_same_is_free_and_the_rest_is_fresh(tmp_path):
    path = tmp_path / "ledger"
    state, weights, since = saved_run(path)
    for _ in range(2):  # as often as one likes
        shutil.copy(path, tmp_path / "copy")
        run = begin(path, state, weights)
        assert run.engine.session.outcomes.left == STEPS
        assert all(map(torch.equal, released(run, STEPS), since))
        assert run.engine.ledger.releases == 2 + STEPS
        assert run.engine.session.outcomes.left == 0
        run.engine.close()
    further = []
    for place in (path, tmp_path / "copy"):
        run = begin(place, state, weights)
        run.steps(STEPS)
        further.append(released(run, 2))
        assert run.engine.ledger.releases == 2 + STEPS + 2
        run.engine.close()
    for one, other in zip(*further, strict=True):
        assert not cancels(one, other)


def test_the_step_that_differs_releases_noise_and_nothing_else(tmp_path):
    """Its sample was released before: with other noise it would be one mechanism, of less noise."""
    path = tmp_path / "ledger"
    data = examples(100, seed=9)
    state, weights, _ = saved_run(path, noise_multiplier=1e-6)
    run = begin(path, state, weights, data=data, noise_multiplier=1e-6)
    with pytest.warns(UserWarning, match="releases nothing but noise"):
        (first,) = released(run, 1)
    deviations = run.engine.plan.noise_deviations.values()
    assert first.norm() < 10 * max(deviations) * math.sqrt(len(first))
    assert released(run, 1)[0].norm() > 1e3 * max(deviations) * math.sqrt(len(first))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_samples_after_a_difference_are_fresh(tmp_path, workers):
    path = tmp_path / "ledger"
    options = {"sampling": "poisson", "micro_batch_size": None}

    def draw(run, count):
        found = []
        for _ in range(count):
            run.step()
            found.append(run.drawn)
        return found

    class Drawing(Run):
        def backward(self, x, y):
            self.drawn = self.loader.current.indices.tolist()
            return super().backward(x, y)

    def start(state=None, weights=None, **given):
        torch.manual_seed(0)
        model = mlp()
        if weights is not None:
            model.load_state_dict(weights)
        engine = PrivacyEngine(ledger=path)
        return Drawing(model, engine=engine, noise_multiplier=NOISE, resume_from=state,
                       **options, **given)  # fmt: skip

    run = start()
    run.steps(2)
    state = run.engine.state_dict()
    weights = {name: each.clone() for name, each in run.model.state_dict().items()}
    expected = draw(run, 8)
    run.engine.close()
    again = start(state, weights)
    assert draw(again, 8) == expected
    assert again.engine.ledger.releases == 10
    assert not set(map(tuple, draw(again, 8))) & set(map(tuple, expected))
    again.engine.close()
    other = start(state, weights, lr=20.0)
    with pytest.warns(UserWarning, match="fresh samples and noise"):
        found = draw(other, 8)
    assert found[:2] == expected[:2]  # the second one came out otherwise: its noise is thrown away
    assert not any(map(list.__eq__, found[2:], expected[2:]))


def test_fresh_steps_do_not_exceed_the_budget(tmp_path):
    path, budget = tmp_path / "ledger", {"target_epsilon": 1.0, "steps": 8}
    run = begin(path, **budget)
    run.steps(4)
    state, weights = run.engine.state_dict(), weights_of(run.model)
    run.steps(4)
    run.engine.close()
    again = begin(path, state, run.model.state_dict() | weights, lr=5.0, **budget)
    again.step()  # with the weights of then, the same
    before = weights_of(again.model)
    with pytest.raises(BudgetExhaustedError):
        again.step()
    assert all(before[n].equal(w) for n, w in weights_of(again.model).items())
    assert again.engine.ledger.releases == 8


def test_a_state_saved_while_steps_are_repeated(tmp_path):
    path = tmp_path / "ledger"
    state, weights, since = saved_run(path)
    run = begin(path, state, weights)
    run.steps(3)
    state, weights = run.engine.state_dict(), run.model.state_dict() | weights_of(run.model)
    run.engine.close()
    again = begin(path, state, weights)
    assert all(map(torch.equal, released(again, STEPS - 3), since[3:]))
    again.steps(1)
    assert again.engine.ledger.releases == 2 + STEPS + 1


def test_accelerators_leave_no_digests(tmp_path, monkeypatch):
    """They would be waited for; a run that is resumed there pays for what it does again."""
    path = tmp_path / "ledger"
    state, weights, since = saved_run(path)
    monkeypatch.setattr("clipless.privacy.step._book.may_look_at", lambda tensor: False)
    run = begin(path, state, weights)
    assert run.engine.session.outcomes.left == 0
    again = released(run, STEPS)
    assert not any(map(cancels, again, since))
    assert run.engine.ledger.released(run.engine.session.outcomes.run) == {}
    assert run.engine.ledger.releases == 2 + 2 * STEPS


# --- seeds ---------------------------------------------------------------------------------------


def test_no_seed_of_anybody_reaches_samples_or_noise(tmp_path):
    """Runs that share a ledger file had the same samples: 5.97 was printed, 26.7 was true."""
    drawn, noise = [], []
    for _ in range(3):
        torch.manual_seed(0)
        run = Run(engine=PrivacyEngine(ledger=tmp_path / "ledger"), noise_multiplier=NOISE)
        noise += released(run, 2)
        drawn.append(run.loader.current.indices.tolist())
        run.engine.close()
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]
    assert not any(cancels(noise[i], noise[j]) for i in range(6) for j in range(i))
    with pytest.raises(TypeError, match="seed"):
        PrivacyEngine(seed=0)
    with pytest.raises(TypeError, match="seed"):
        Trainer(mlp(), None, target_epsilon=1.0, steps=1, seed=0)


def test_an_insecure_seed_is_not_private_and_the_ledger_remembers(tmp_path):
    path = tmp_path / "ledger"
    run = Run(engine=PrivacyEngine(ledger=path, insecure_seed=0), target_epsilon=3.0, steps=5)
    run.steps(5)
    with pytest.raises(BudgetExhaustedError):  # which is counted as ever
        run.step()
    assert run.engine.get_epsilon() == run.engine.get_epsilon(further_steps=3) == math.inf
    assert "not private" in str(run.engine.report())
    assert run.engine.report().to_dict()["epsilon"] is None
    json.dumps(run.engine.report().to_dict(), allow_nan=False)
    run.engine.close()
    assert read_ledger(path).insecure
    later = Run(engine=PrivacyEngine(ledger=path)).steps(1)
    assert later.engine.get_epsilon() == math.inf
    assert "not private" in str(later.engine.report())


# --- digests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_fingerprint_notices_every_bit(dtype):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, generator=generator).to(dtype) for n in (5000, 3, 4096, 1)]
    tensors[0] = tensors[0].view(50, 100).t()
    expected = int(fingerprint(tensors))
    assert int(fingerprint([t.clone() for t in tensors])) == expected
    for index in (0, 1, 2, 3):
        for change in (lambda x: x.nextafter(torch.tensor(9.0)), torch.neg):
            changed = [t.clone() for t in tensors]
            flat = changed[index].view(-1) if index else changed[0][0]
            wide = flat[-1].float() if dtype == torch.bfloat16 else flat[-1]
            new = change(wide.to(torch.float64) if dtype == torch.float64 else wide)
            flat[-1] = new if dtype != torch.bfloat16 else -wide
            assert int(fingerprint(changed)) != expected
    swapped = [tensors[0], tensors[1].flip(0), *tensors[2:]]
    assert int(fingerprint(swapped)) != expected
    assert int(fingerprint(tensors, salt=1)) != int(fingerprint(tensors))


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("seeded", ["noise", "sampler"])
def test_a_seeded_state_of_an_earlier_version_is_not_private(seeded, replay, tmp_path):
    """Ledgers did not say so then; with `replay=False` nobody looked at the state either."""
    path = tmp_path / "ledger"
    state, weights, _ = saved_run(path)
    del state["insecure_noise"], state["sampler"]["insecure"]
    state |= {"seeded_noise": seeded == "noise"}
    state["sampler"]["seeded"] = seeded == "sampler"
    run = begin(path, state, weights, replay=replay, engine={})
    run.steps(STEPS + 1)
    assert run.engine.get_epsilon() == math.inf


DAMAGE = {
    "without a name": lambda state: state.pop("run"),
    "without a sampler": lambda state: state.pop("sampler"),
    "of another sampling": lambda state: state["sampler"].update(sampling="something else"),
    "with a key that is none": lambda state: state["sampler"].update(key="zz"),
    "before the first step": lambda state: state["sampler"].update(step=-1),
    "without noise": lambda state: state.pop("noise"),
    "without a mechanism": lambda state: state.update(spent=[({}, 1)]),
    "without a plan": lambda state: state.pop("plan"),
}


@pytest.mark.parametrize("damage", [*DAMAGE])
def test_a_damaged_state_is_refused_before_anything_is_written(damage, tmp_path):
    path = tmp_path / "ledger"
    state, weights, _ = saved_run(path)
    before = path.read_text()
    DAMAGE[damage](state)
    with pytest.raises(PrivacyError, match=r"not the state of a run|does not fit"):
        begin(path, state, weights)
    assert path.read_text() == before


# --- what a model draws --------------------------------------------------------------------------


def masks(count=3, *, seed=0, bounds="proved", **engine):
    """The outputs of a network of dropout in private passes on all examples, after a seed."""
    torch.manual_seed(1)
    first = [lip.BoundedInput(4.0)] if bounds == "proved" else []
    kind = lip.SpectralLinear if bounds == "proved" else nn.Linear
    model = nn.Sequential(*first, kind(6, 8), nn.Dropout(0.5), kind(8, 3))
    run = Run(
        model, examples(40), batch_size=40, sampling="full_batch", noise_multiplier=0.0, lr=0.0,
        engine=PrivacyEngine(**engine), bounds=bounds,
    )  # fmt: skip
    found = []
    for _ in range(count):
        x, y = run.batch()
        torch.manual_seed(seed)
        output = model(x)
        found.append(output.detach().clone())
        # What the program draws otherwise is what it would be without the model.
        assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(seed))
        run.criterion(output, y).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    return found


@pytest.mark.parametrize("bounds", ["proved", "enforced"])
def test_masks_follow_from_no_seed_of_anybody(bounds):
    """Masks fall on places in a batch, and places tell who is sampled: nobody may know them."""
    one, two = masks(bounds=bounds), masks(bounds=bounds)
    for a, b in zip([*one, one[0]], [*two, one[1]], strict=True):
        assert not torch.equal(a, b)
    # A seed that is not private repeats them, as it does all else.
    again = [masks(bounds=bounds, insecure_seed=3) for _ in range(2)]
    assert all(map(torch.equal, *again))
