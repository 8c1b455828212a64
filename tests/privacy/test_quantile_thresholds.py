"""Thresholds in private training: fixed, scheduled, following a quantile; and product clipping."""

import math
import warnings

import pytest
import torch
from torch import nn

import clipless
from clipless import losses
from clipless import nn as lip
from clipless.kernels import joint_multiplier
from clipless.privacy import PrivacyEngine
from tests.privacy.runs import Run, examples, mlp
from tests.privacy.step.test_neighbours import ADVERSARIES, Silence, differences, sample_of


def following(norm=0.5, **options):
    return nn.Sequential(*mlp(), lip.ClipGradient(norm, follow=lip.FollowQuantile(**options)))


def test_the_count_is_one_more_query_of_the_same_mechanism():
    plan = Run(following(), noise_multiplier=1.4).engine.plan
    assert [q.name for q in plan.queries] == ["examples above the threshold of 4"]
    assert plan.sensitivities["examples above the threshold of 4"] == pytest.approx(
        1 / 20, rel=2e-3
    )
    joint = joint_multiplier(
        list(plan.sensitivities.values()), list(plan.noise_deviations.values())
    )
    assert joint == pytest.approx(1.4)
    assert plan.epsilon(steps=9) == Run(mlp(), noise_multiplier=1.4).engine.plan.epsilon(steps=9)


def test_the_threshold_finds_its_quantile():
    """Without noise, the fraction above settles at 1 - quantile."""
    torch.manual_seed(0)
    model = following(norm=1.4, quantile=0.7, rate=0.5)
    run = Run(
        model, examples(400), noise_multiplier=0.0, sampling="full_batch", batch_size=400, lr=0.0
    )
    run.steps(80)
    x, y = examples(400)
    with torch.no_grad():
        logits = model[:4](x)
    logits.requires_grad_()
    losses.CrossEntropy(reduction="sum")(logits, y).backward()
    above = (logits.grad.norm(dim=1) > model[4].norm).float().mean().item()
    assert above == pytest.approx(0.3, abs=0.08)


class UsedMoreOften(nn.Module):
    """Clips once when it is traced, and four times, or token by token, as soon as `how` says so."""

    how = None

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.clip = lip.ClipGradient(1e-3, follow=lip.FollowQuantile())

    def forward(self, x):
        x = self.clip(self.body(x))
        for _ in range(3 if self.how == ["often"] else 0):
            x = self.clip(2 * x)
        return self.clip(x.reshape(-1, 1)).reshape(x.shape) if self.how == ["rows"] else x


@pytest.mark.parametrize("how", ["often", "rows"])
def test_an_example_is_counted_as_often_as_planned(how):
    model = UsedMoreOften()
    model.how = []
    run = Run(model, examples(16), batch_size=16, sampling="full_batch", noise_multiplier=1.0)
    run.steps(2)
    model.how.append(how)
    run.backward(*run.batch())
    (count,) = run.engine.session._book.progress.counts.values()
    assert count <= 16


def test_noise_on_the_count_reaches_the_threshold():
    finals = set()
    for seed in range(3):
        model = following(norm=0.5)
        run = Run(model, engine=clipless.PrivacyEngine(insecure_seed=seed), noise_multiplier=2.0)
        run.steps(3)
        finals.add(model[4].norm)
    assert len(finals) == 3


def test_bounds_and_noise_follow_the_threshold():
    model = following(norm=1.0, quantile=0.01, rate=1.0)
    run = Run(model, noise_multiplier=0.5)
    before = run.engine.plan.noise_deviations["1.weight"]
    run.steps(4)
    run.batch()
    run.model(examples(20)[0][: run.loader.current.rows])
    bound = min(model[4].norm, math.sqrt(2))
    expected = clipless.sensitivity(model, loss=run.criterion, input_shape=(6,)).gradient_bounds
    assert expected["1.weight"] == pytest.approx(bound)
    assert run.engine.plan.parameters[0].gradient_bound == pytest.approx(bound)
    assert run.engine.plan.noise_deviations["1.weight"] != before


def test_the_threshold_stays_between_its_limits():
    rule = lip.FollowQuantile(quantile=0.9, rate=5.0, smallest=0.01)
    assert rule.moved(0.5, fraction_above=1.0, largest=0.6) == 0.6
    assert rule.moved(0.5, fraction_above=-99.0, largest=0.6) == pytest.approx(0.5 * math.exp(-0.7))
    assert rule.moved(0.0001, fraction_above=-99.0, largest=0.6) == pytest.approx(0.006)


def test_a_threshold_that_falls_far_is_warned_about():
    run = Run(following(norm=0.5), noise_multiplier=0.0)
    followers = run.engine.session._followers
    low = [torch.tensor([-99.0])]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            followers.move(low)  # halved each time
    with pytest.warns(UserWarning, match="imbalanced"):
        followers.move(low)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        followers.move(low)  # once is enough


def test_the_threshold_is_part_of_the_models_state():
    model = following(norm=0.5)
    Run(model, noise_multiplier=0.0).steps(3)
    twin = following(norm=0.9)
    twin.load_state_dict(model.state_dict())
    assert twin[4].norm == model[4].norm != 0.5


def test_settings_are_checked():
    with pytest.raises(ValueError, match="quantile"):
        lip.FollowQuantile(quantile=1.0)
    with pytest.raises(ValueError, match="smallest"):
        lip.FollowQuantile(smallest=2.0)


def fractions_of(run):
    """What the step under way would release about its thresholds, without noise."""
    session = run.engine.session
    return session._followers.fractions(session._book.progress.counts, torch.zeros(1))


def test_one_example_moves_the_count_by_at_most_one():
    """Two neighbouring batches: their counts differ by at most the sensitivity of the query."""
    x, y = examples(60)
    counts = []
    for rows in (30, 31):
        torch.manual_seed(0)
        model = following(norm=0.3)
        run = Run(model, (x, y), noise_multiplier=0.0)
        run.batch()
        run.loader.current = sample_of(0, rows)
        run.backward(x[:rows].clone(), y[:rows].clone())
        counts.append(fractions_of(run)[0].item())
    sensitivity = run.engine.plan.sensitivities["examples above the threshold of 4"]
    assert abs(counts[0] - counts[1]) <= sensitivity


@pytest.mark.parametrize("where", ["before backward", "between micro-batches", "before the step"])
def test_other_passes_within_a_step_are_not_counted(where):
    """An evaluation in the middle of a step made counts of 511 for 20 rows."""
    run = Run(
        following(norm=1e-6), examples(20), sampling="full_batch", batch_size=20,
        noise_multiplier=0.0, micro_batch_size=10,
    )  # fmt: skip

    def evaluate():
        run.model.eval()
        for _ in range(25):
            x, y = examples(20, seed=5)
            run.criterion(run.model(x), y).backward()
        for parameter in run.model.parameters():
            parameter.grad = None
        run.model.train()

    for number in range(2):
        loss = run.criterion(run.model((batch := run.batch())[0]), batch[1])
        if where == "before backward":
            evaluate()
        loss.backward()
        if where == "between micro-batches" and number == 0:
            evaluate()
    if where == "before the step":
        evaluate()
    counts = run.engine.session._book.progress.counts
    assert [count.item() for count in counts.values()] == [20]
    run.optimizer.step()


@pytest.mark.parametrize("fraction", [0.3, 0.01])
@pytest.mark.parametrize("adversary", ["huge", "nan", "constant"])
def test_product_clipping_through_the_engine(adversary, fraction):
    """Limits are per example: with the criterion dividing by b, they are divided as well."""
    data = examples(60)
    model, criterion = mlp(), losses.CrossEntropy(tau=8.0)
    clipless.clip_products(model, fraction=fraction, loss=criterion, input_shape=(6,))
    run = Run(model, data, criterion, noise_multiplier=0.3)
    bounds = {p.name: p.gradient_bound for p in run.engine.plan.parameters}
    assert bounds["1.weight"] == pytest.approx(fraction * math.sqrt(2))
    worst = differences(run, data, ADVERSARIES[adversary]((6,)), 8, torch.tensor([0, 1, 2]))
    assert max(worst.values()) <= 1.0
    if adversary != "nan":
        assert worst["1.weight"] > 0.5  # small limits are reached


def test_product_clipping_can_be_scheduled():
    model = mlp()
    run = Run(model, noise_multiplier=0.5)
    run.engine.session.noise = Silence()
    before = run.engine.plan.noise_deviations["1.weight"]
    model[1].weight_clip = 0.1
    run.steps(1)
    assert run.engine.plan.noise_deviations["1.weight"] < before


def test_the_scale_of_a_layer_cannot_be_changed():
    model = mlp()
    clipless.clip_products(model, fraction=0.3, loss=1.0, input_shape=(6,))
    run = Run(model).steps(1)
    model[1].loss_scale = 1.0
    with pytest.raises(clipless.errors.PrivacyError, match="loss_scale"):
        run.step()


def followed_products(fraction=0.3, **options):
    model, criterion = mlp(), losses.CrossEntropy()
    clipless.clip_products(
        model, fraction=fraction, loss=criterion, input_shape=(6,),
        follow=lip.FollowQuantile(**options),
    )  # fmt: skip
    return model, criterion


def test_product_clipping_can_follow_a_quantile():
    model, criterion = followed_products(quantile=0.7, rate=0.5)
    run = Run(
        model, examples(400), criterion, noise_multiplier=0.0, sampling="full_batch",
        batch_size=400, lr=0.0,
    )  # fmt: skip
    names = [query.name for query in run.engine.plan.queries]
    assert names == ["examples above the threshold of 1", "examples above the threshold of 3"]
    run.steps(80)
    model[1].exceeded.take()
    run.backward(*run.batch())
    for fraction in fractions_of(run):
        assert fraction.item() == pytest.approx(0.3, abs=0.05)
    bounds = {p.name: p.gradient_bound for p in run.engine.plan.parameters}
    assert bounds["1.weight"] == pytest.approx(model[1].weight_clip)


def test_followed_products_hold_at_every_threshold():
    """One more example moves the sum by at most the sensitivity that belongs to the threshold."""
    x, y = examples(60)
    for rate in (0.0001, 0.3, 3.0):
        found = []
        for rows in (30, 31):
            torch.manual_seed(0)
            model, criterion = followed_products(fraction=0.05, quantile=0.5, rate=rate)
            run = Run(model, (x, y), criterion, noise_multiplier=0.0, sampling="full_batch")
            run.steps(3)
            run.batch()
            run.loader.current = sample_of(run.loader.current.step, rows)
            run.backward(x[:rows].clone(), y[:rows].clone())
            found.append(run.gradients())
        for name, gradient in found[0].items():
            difference = (gradient - found[1][name]).norm()
            assert difference <= run.engine.plan.sensitivities[name]


def test_followed_thresholds_are_part_of_the_state():
    model, criterion = followed_products(quantile=0.5, rate=0.3)
    Run(model, criterion=criterion, noise_multiplier=0.3).steps(3)
    twin, _ = followed_products(quantile=0.5)
    twin.load_state_dict(model.state_dict())
    assert twin[1].weight_clip == model[1].weight_clip
    clipless.clip_products(twin, fraction=None, loss=1.0, input_shape=(6,))
    assert list(twin.state_dict()) == list(mlp().state_dict())


def test_a_run_whose_thresholds_moved_is_resumed(tmp_path):
    """It is planned with the thresholds that it began with, and goes on with those it had."""

    def run_on(model, **given):
        engine = PrivacyEngine(ledger=tmp_path / "ledger", insecure_seed=0)
        return Run(model, engine=engine, noise_multiplier=1.4, **given)

    torch.manual_seed(0)
    run = run_on(following(norm=0.5, quantile=0.99, rate=1.0)).steps(4)
    layer = run.model[-1]
    assert layer.norm > 0.55  # bounds that were proved at first no longer hold
    state = run.engine.state_dict()
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    expected = run.steps(3).model.state_dict()
    bounds = run.engine.plan.sensitivities
    run.engine.close()

    model = following(norm=0.5, quantile=0.99, rate=1.0)
    model.load_state_dict(weights)
    place = str(len(model) - 1)
    again = run_on(model, resume_from=state)
    assert model[-1].norm == weights[f"{place}.norm_state"].item()  # where it was, and not at first
    again.steps(3)
    for name, value in expected.items():
        assert torch.equal(model.state_dict()[name], value), name
    assert again.engine.plan.sensitivities == bounds
    assert again.engine.state_dict()["thresholds"] == {place: 0.5}
    assert again.engine.ledger.releases == 7
    again.engine.close()
