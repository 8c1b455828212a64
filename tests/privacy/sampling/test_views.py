"""Augmentation with multiplicity: what one example contributes stays what it was, for any views."""

import copy

import pytest
import torch
from torch import nn

import clipless
from clipless import losses
from clipless import nn as lip
from clipless.data import Compose, RandomCrop, RandomFlip
from clipless.errors import PrivacyError
from clipless.privacy import GaussianNoise, Plan, PrivacyEngine
from clipless.privacy.sampling._batches import StepSample
from tests.privacy.misuse_helpers import (
    assert_close,
    counted,
    counting_skipped_steps,
    gradients_of,
    refused_unharmed,
)
from tests.privacy.runs import SHAPES, Run, cnn, examples, mlp
from tests.privacy.step.test_neighbours import ADVERSARIES, Silence


def jitter(batch, generator):
    """A random change of every row."""
    return batch + torch.randn(batch.shape, generator=generator, device=batch.device)


class Mirror:
    """Every row and its mirror image."""

    views = 2

    def __call__(self, batch, generator):
        return torch.stack([batch, batch.flip(-1)], dim=1).flatten(0, 1)


def sample_of(step, size, views):
    return StepSample(
        step=step, indices=torch.arange(size), rows=size * views, weights=None, micro_batch=0,
        micro_batches=1, size=size, views=views,
    )  # fmt: skip


def released(run, x, y, views, step):
    """What a step on these rows would release, without its noise."""
    run.loader.current = sample_of(step, len(x) // views, views)
    run.backward(x, y)
    gradients = run.gradients()
    run.optimizer.step()
    return gradients


def contribution(run, views, others=4, label=0, step=0):
    """What an example with these views adds to the sum, as a part of its sensitivity."""
    count, (x, y) = len(views), examples(others, views.shape[1:])
    x, y = x.repeat_interleave(count, 0), y.repeat_interleave(count, 0)
    run.engine.session.noise = Silence()
    before = copy.deepcopy(run.model.state_dict())  # thresholds included
    found = []
    for batch in (
        (torch.cat([x, views]), torch.cat([y, torch.full((count,), label)])),
        (x, y),
    ):
        found.append(released(run, *batch, count, step))
        step += 1
        run.model.load_state_dict(before)
    return {
        name: (found[0][name] - found[1][name]).double().norm().item() / sensitivity
        for name, sensitivity in run.engine.plan.sensitivities.items()
        if name in found[0]
    }


def with_clipping(kind):
    """A model with one of the ways to clip, and the loss it was made for."""
    criterion = losses.CrossEntropy(tau=8.0)
    follow = lip.FollowQuantile(quantile=0.5)
    if kind == "cnn":
        return cnn(), criterion
    model = mlp()
    if kind == "logits":
        model = nn.Sequential(*model, lip.ClipGradient(0.1))
    elif kind == "following":
        model = nn.Sequential(*model, lip.ClipGradient(0.1, follow=follow))
    elif kind in ("products", "following products"):
        clipless.clip_products(
            model, fraction=0.05, loss=criterion, input_shape=(6,),
            follow=follow if kind == "following products" else None,
        )  # fmt: skip
    return model, criterion


# --- the bound ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["plain", "cnn", "logits", "products", "following", "following products"]
)
def test_one_example_never_contributes_more_than_its_sensitivity(kind):
    """Whatever its views are, different or all the same, with all that a row may hold."""
    model, criterion = with_clipping(kind)
    shape = SHAPES[cnn] if kind == "cnn" else (6,)
    views = 3
    worst = 0.0
    rows = {name: make(shape) for name, make in ADVERSARIES.items()}
    choices = [[name] * views for name in rows]
    choices += [["huge", "nan", "constant"], ["spike", "infinite", "zero"]]
    run = Run(
        model, examples(60, shape), criterion, noise_multiplier=0.3, augment=jitter, views=views
    )
    for number, names in enumerate(choices):
        stacked = torch.stack([rows[name] for name in names])
        found = contribution(run, stacked, label=number % 3, step=2 * number)
        assert max(found.values()) <= 1.0, names
        worst = max(worst, *found.values())
    assert worst > 0.2  # somebody does what he can


@pytest.mark.parametrize("views", [1, 2, 7])
@pytest.mark.parametrize("clip", [None, "logits", "products"])
def test_views_that_coincide_reach_the_bound(views, clip):
    """For one linear layer and a loss that pulls beyond its constant there is equality."""
    model = nn.Sequential(lip.BoundedInput(2.0), lip.SpectralLinear(6, 3))
    criterion = losses.PerExample(lambda output, target: 1000 * output.sum(), lipschitz=0.5)
    if clip == "logits":
        model = nn.Sequential(*model, lip.ClipGradient(0.2))
    if clip == "products":
        clipless.clip_products(model, fraction=0.3, loss=criterion, input_shape=(6,))
    run = Run(model, criterion=criterion, noise_multiplier=0.3, augment=jitter, views=views)
    same = contribution(run, torch.full((views, 6), 50.0))["1.weight"]
    assert 0.998 <= same <= 1.0
    if views > 1:  # views that pull in opposite directions cancel instead
        opposite = torch.full((views, 6), 50.0)
        opposite[1] = -50.0
        assert contribution(run, opposite, step=2)["1.weight"] == pytest.approx(
            same * (views - 2) / views, abs=1e-4
        )


def test_a_row_alone_weighs_its_part():
    """The guard is for rows: K rows of which only one pulls contribute 1/K of the bound."""
    model = nn.Sequential(lip.BoundedInput(2.0), lip.SpectralLinear(6, 3))
    criterion = losses.PerExample(lambda output, target: 1000 * output.sum(), lipschitz=0.5)
    run = Run(model, criterion=criterion, noise_multiplier=0.3, augment=jitter, views=4)
    rows = torch.zeros(4, 6)
    rows[2] = 50.0
    assert contribution(run, rows)["1.weight"] == pytest.approx(0.25, rel=2e-3)


def test_noise_sensitivity_and_cost_do_not_depend_on_the_views():
    class Listening(GaussianNoise):
        def add_(self, gradients, queries):
            before = [each.clone() for each in gradients]
            super().add_(gradients, queries)
            heard.append([a - b for a, b in zip(gradients, before, strict=True)])

    plans, noises = [], []
    for views in (None, 1, 5):
        heard = []
        torch.manual_seed(0)
        run = Run(noise_multiplier=1.3, augment=jitter if views else None, views=views)
        run.engine.session.noise = Listening(insecure_seed=7)
        run.steps(2)
        plans.append(run.engine.plan)
        noises.append(heard)
    assert [plan.views for plan in plans] == [1, 1, 5]
    for plan, noise in zip(plans[1:], noises[1:], strict=True):
        assert plan.sensitivities == plans[0].sensitivities
        assert plan.noise_deviations == plans[0].noise_deviations
        assert plan.mechanism == plans[0].mechanism
        for step, expected in zip(noise, noises[0], strict=True):
            for one, other in zip(step, expected, strict=True):  # up to adding and subtracting
                torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("layer", [4, 1])
def test_a_followed_count_moves_by_at_most_one_example(layer):
    """K rows above the threshold count as one example, not as K."""
    kind = "following" if layer == 4 else "following products"
    counts = []
    for size in (5, 6):
        torch.manual_seed(0)
        model, criterion = with_clipping(kind)
        run = Run(
            model, criterion=criterion, noise_multiplier=0.0, augment=jitter, views=4
        )  # fmt: skip
        x = torch.full((size * 4, 6), 5.0)
        run.loader.current = sample_of(0, size, 4)
        with torch.no_grad():
            wrong = run.model(x).argmin(dim=1)
        run.backward(x, wrong)
        session = run.engine.session
        found = session._followers.fractions(session._book.progress.counts, torch.zeros(1))
        counts.append(found[0].item())
    name = f"examples above the threshold of {layer}"
    assert counts[1] - counts[0] == pytest.approx(1 / 20)  # all of it is above, in every view
    assert abs(counts[1] - counts[0]) <= run.engine.plan.sensitivities[name]


# --- what is released ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"micro_batch_size": 3}, {"pad": True}, {"pad": True, "micro_batch_size": 5}]
)
def test_a_step_averages_over_the_views(options):
    """The sum over examples of the mean over views, over b; padding left out."""
    x, y = examples(100)
    run = Run(mlp(), (x, y), noise_multiplier=0.0, augment=Mirror(), **options)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    indices = []
    while True:
        batch = run.batch()
        indices.append(run.loader.current.indices)
        run.backward(*batch)
        if run.loader.current.is_last:
            break
    run.optimizer.step()
    found = gradients_of(run.model)
    plain = mlp()
    plain.load_state_dict(before)
    chosen = torch.cat(indices)
    for view in (x[chosen], x[chosen].flip(-1)):
        loss = nn.functional.cross_entropy(plain(view), y[chosen], reduction="sum")
        (loss / (2 * 20)).backward()
    assert_close(found, gradients_of(plain))


def test_the_loss_is_that_of_the_views():
    run = Run(noise_multiplier=0.0, augment=jitter, views=3)
    x, y = run.batch()
    with torch.no_grad():
        expected = nn.functional.cross_entropy(run.model(x), y, reduction="sum") / (3 * 20)
    torch.testing.assert_close(run.backward(x, y).detach(), expected)


def test_training_with_images_and_the_usual_augmentation():
    augment = Compose(RandomFlip(), RandomCrop(padding=1))
    run = Run(cnn(), examples(100, (1, 4, 4)), augment=augment, views=4).steps(4)
    assert counted(run, 4)
    assert "4 views of every example" in str(run.engine.report())


def test_an_empty_sample_is_a_step():
    run = Run(batch_size=1, augment=jitter, views=3)
    sizes = []
    for _ in range(8):
        run.step()
        sizes.append(run.loader.current.size)
    assert 0 in sizes
    assert counted(run, 8)


# --- misuse -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda part: part[::4],  # one view of each
        lambda part: part[: len(part) // 2],
        lambda part: part[:-1],
        lambda part: torch.cat([part, part[:1]]),
        lambda part: part.repeat_interleave(2, 0),
    ],
)
def test_views_cannot_be_dropped_or_repeated(change):
    run = Run(noise_multiplier=1.0, augment=jitter, views=4).steps(1)
    x, y = run.batch()
    with refused_unharmed(run, "rows", "whole and once"):
        run.backward(change(x), change(y))
    with counting_skipped_steps():
        run.step()
    assert counted(run, 3)


def test_the_views_of_a_batch_cannot_be_fed_one_after_the_other():
    run = Run(noise_multiplier=1.0, augment=jitter, views=2).steps(1)
    x, y = run.batch()
    run.backward(x, y)
    with refused_unharmed(run, "went through the criterion before"):
        run.backward(x, y)


def test_a_loader_without_views_does_not_fit_rows_with_them():
    run = Run(noise_multiplier=1.0)
    x, y = run.batch()
    with refused_unharmed(run, "rows"):
        run.backward(x.repeat_interleave(3, 0), y.repeat_interleave(3, 0))


# --- the plan -----------------------------------------------------------------------------------


def test_plans_from_before_there_were_views_have_one():
    plan = Run(augment=jitter, views=3).engine.plan
    data = plan.to_dict()
    assert data["views"] == 3
    assert Plan.from_dict(data) == plan
    del data["views"]
    old = Plan.from_dict(data)
    assert old.views == 1
    assert old.differences(plan) == {"views": (1, 3)}
    with pytest.raises(ValueError, match="views"):
        Plan.from_dict({**data, "views": 0})


@pytest.mark.parametrize("options", [{}, {"pad": True}, {"micro_batch_size": 3}])
def test_a_resumed_run_repeats_its_views_bit_for_bit(options, tmp_path):
    def run_on(ledger, steps, **given):
        torch.manual_seed(0)
        model = mlp()
        model.load_state_dict(given.pop("weights", model.state_dict()))
        given = {"views": 3, "augment": jitter} | options | given
        return Run(model, engine=PrivacyEngine(ledger=ledger), **given).steps(steps)

    run = run_on(tmp_path / "ledger", 2)
    state = run.engine.state_dict()
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    expected = run.steps(3).model.state_dict()
    run.engine.close()
    torch.manual_seed(99)  # no global generator takes part
    again = run_on(tmp_path / "ledger", 3, weights=weights, resume_from=state)
    for name, value in again.model.state_dict().items():
        assert value.equal(expected[name])
    assert again.engine.ledger.releases == 5
    again.engine.close()
    with pytest.raises(PrivacyError, match="views: 3 then, 1 now"):
        run_on(tmp_path / "ledger", 0, weights=weights, resume_from=state, views=1)
