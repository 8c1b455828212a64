"""Scores of canaries are the inner products they are said to be, of what was really released."""

import copy

import pytest
import torch
from torch.func import functional_call, grad, vmap

from clipless import losses
from clipless import nn as lip
from clipless.audit import (
    ReleaseScores,
    audit_training,
    draw_coins,
    insert_canaries,
    one_run_audit,
    orthogonal_canaries,
)
from clipless.errors import PrivacyError
from clipless.training import Trainer
from tests.audit.broken import background, table_trainer, tokens
from tests.audit.nominal import nominal_epsilons  # noqa: F401
from tests.privacy.runs import SHAPES, Run, cnn, examples, mlp


def direct_scores(run, canaries, released, weights):
    """Per-example gradients, inner products, noise variances: all in the plain way."""
    x, y = canaries
    plan = run.engine.plan
    model = copy.deepcopy(run.model).double()

    def loss(own, one, target):
        output = functional_call(model, own, (one[None],))
        return run.criterion.per_example(output, target[None])[0]

    own = {name: value.double() for name, value in weights.items()}
    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(own, x.double(), y)
    total = 0.0
    for name, deviation in plan.noise_deviations.items():
        products = (gradients[name] * released[name].double()).flatten(1).sum(dim=1)
        total = total + products / (plan.expected_batch_size * deviation**2)
    # Of a normal variable that has this mean with the probability of being drawn, and else none.
    rate, sigma = plan.sampling.rate, plan.noise_multiplier
    likelihood = rate * (total - 0.5 / sigma**2).exp() + 1.0 - rate
    return likelihood.log()


@pytest.mark.parametrize("build", [mlp, cnn], ids=lambda build: build.__name__)
@pytest.mark.parametrize("noise", ["optimal", "global"])
def test_scores_are_inner_products(build, noise):
    shape = SHAPES[build]
    run = Run(
        build(), examples(100, shape), losses.CrossEntropy(tau=2.0), noise=noise, lr=0.5,
        noise_multiplier=1.0,
    )  # fmt: skip
    canaries = examples(7, shape, seed=3)
    expected = torch.zeros(7, dtype=torch.float64)
    with ReleaseScores(run.engine, canaries) as watch:
        for _ in range(3):
            weights = {name: p.detach().clone() for name, p in run.model.named_parameters()}
            run.step()
            released = {name: p.grad.clone() for name, p in run.model.named_parameters()}
            expected += direct_scores(run, canaries, released, weights)
    torch.testing.assert_close(watch.scores, expected, rtol=1e-5, atol=1e-5)
    assert watch.steps == 3
    run.step()
    assert watch.steps == 3  # closed: it no longer looks


def test_watching_changes_nothing():
    def weights(watched):
        torch.manual_seed(0)
        run = Run(mlp(), examples(100))
        if watched:
            ReleaseScores(run.engine, examples(5, seed=1))
        run.steps(4)
        return [p.detach().clone() for p in run.model.parameters()]

    for one, other in zip(weights(True), weights(False), strict=True):
        assert one.equal(other)


def test_stand_ins_are_subtracted():
    canaries, others = examples(5, seed=1), examples(5, seed=2)
    run = Run(mlp(), examples(100))
    both = ReleaseScores(run.engine, canaries, stand_ins=others)
    first, second = ReleaseScores(run.engine, canaries), ReleaseScores(run.engine, others)
    run.steps(2)
    torch.testing.assert_close(both.scores, first.scores - second.scores)


def test_a_loop_of_ones_own():
    """The pieces, put together for PrivacyEngine: what the documentation shows."""
    canaries = orthogonal_canaries(300, input_shape=(300,), classes=2, norm=1.0)
    coins = draw_coins(300, seed=0)
    data = insert_canaries((torch.zeros(10, 300), torch.zeros(10).long()), canaries, coins)
    model = torch.nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(300, 2))
    run = Run(model, data, noise_multiplier=0.3, sampling="full_batch", batch_size=len(data[0]))
    with ReleaseScores(run.engine, canaries) as watch:
        run.steps(2)
    result = one_run_audit(
        watch.scores, coins, delta=1e-6, claimed_epsilon=run.engine.get_epsilon(1e-6)
    )
    assert 1.0 < result.lower_bound < result.claimed_epsilon


def test_scores_of_the_final_model_have_power():
    """Loud training, black-box: the fall of the loss alone tells who was in."""
    result = audit_training(
        table_trainer(504, noise=0.3, steps=3, seed=0, lr=1.0),
        background(),
        canaries=tuple(part[4:] for part in tokens(504)),
        observed="model",
        guesses=(100, 100),
        seed=0,
    )
    assert 1.0 < result.lower_bound < result.claimed_epsilon


# --- canaries ------------------------------------------------------------------------------------


def test_orthogonal_canaries():
    x, y = orthogonal_canaries(50, input_shape=(2, 5, 5), classes=3, norm=4.0)
    assert x.shape == (50, 2, 5, 5)
    gram = x.flatten(1) @ x.flatten(1).T
    torch.testing.assert_close(gram, 16.0 * torch.eye(50), atol=1e-4, rtol=0)
    assert set(y.tolist()) == {0, 1, 2}
    many, _ = orthogonal_canaries(25, input_shape=(10,), classes=2)
    torch.testing.assert_close(many.norm(dim=1), torch.ones(25))
    torch.testing.assert_close(many[10:20] @ many[10:20].T, torch.eye(10), atol=1e-5, rtol=0)
    assert not x.equal(orthogonal_canaries(50, input_shape=(2, 5, 5), classes=3, seed=1)[0])


def test_coins_are_fair_and_independent_of_their_number():
    coins = draw_coins(40_000, seed=0)
    assert abs(coins.double().mean() - 0.5) < 4 * 0.5 / 200
    repeats = (coins[1:] == coins[:-1]).double().mean()
    assert abs(repeats - 0.5) < 4 * 0.5 / 200
    assert not draw_coins(64).equal(draw_coins(64))
    assert draw_coins(64, seed=3).equal(draw_coins(64, seed=3))


def test_insertion():
    x, y = insert_canaries(
        background(), tokens(6), torch.tensor([1, 0, 0, 1, 1, 0]).bool(),
        stand_ins=(torch.full((6, 1), 99), torch.full((6,), 7)),
    )  # fmt: skip
    assert x.flatten().tolist() == [0, 1, 2, 3, 0, 99, 99, 3, 4, 99]
    assert y.tolist() == [0, 0, 0, 0, 0, 7, 7, 1, 0, 7]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"included": torch.ones(3, dtype=torch.bool)}, "6 booleans"),
        ({"included": torch.ones(6)}, "6 booleans"),
        ({"canaries": (torch.zeros(6, 2).long(), torch.zeros(6).long())}, "another shape"),
        ({"canaries": (torch.zeros(6, 1).long(), torch.zeros(5).long())}, "5 targets"),
        ({"stand_ins": tokens(3)}, "3 stand-ins"),
    ],
)
def test_insertion_refuses_what_does_not_fit(change, message):
    arguments = {"canaries": tokens(6), "included": torch.ones(6, dtype=torch.bool)} | change
    with pytest.raises(ValueError, match=message):
        insert_canaries(background(), **arguments)


# --- what audit_training refuses ------------------------------------------------------------------


def test_the_relation_decides_about_stand_ins():
    x, y = tokens(20)
    fixed = table_trainer(20, noise=1.0, steps=1, seed=0, fixed=5)
    with pytest.raises(ValueError, match="Give a stand-in"):
        audit_training(fixed, background(), canaries=(x, y))
    full = table_trainer(20, noise=1.0, steps=1, seed=0)
    with pytest.raises(ValueError, match="Leave the stand-ins out"):
        audit_training(full, background(), canaries=(x, y), stand_ins=(x, 1 - y))
    with pytest.raises(ValueError, match="observed"):
        audit_training(full, background(), canaries=(x, y), observed="weights")


def test_a_resumed_run_is_refused(tmp_path):
    def make(size):
        return Trainer(
            mlp(), losses.CrossEntropy(), noise_multiplier=1.0, steps=4, batch_size=20,
            run_dir=tmp_path,
        )  # fmt: skip

    data, canaries = examples(100), examples(10, seed=1)
    audit_training(make, data, canaries=canaries, seed=0)
    with pytest.raises(PrivacyError, match="resumed"):
        audit_training(make, data, canaries=canaries, seed=0)
