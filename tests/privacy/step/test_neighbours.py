"""Two neighbouring data sets, through the engine: the sums they release never differ by more than
the sensitivity that the noise was made for, at any step of a run.

Both runs see the same samples of the common examples; one also has an adversarial example. Weights
follow the run with it, so that both gradients are taken at the same point.
"""

import copy
import math

import pytest
import torch

from clipless import losses
from clipless.privacy.sampling._batches import StepSample
from tests.privacy.runs import SHAPES, Run, cnn, examples, mlp, residual

ADVERSARIES = {
    "huge": lambda shape: torch.full(shape, 1e30),
    "tiny": lambda shape: torch.full(shape, 1e-30),
    "nan": lambda shape: torch.full(shape, math.nan),
    "infinite": lambda shape: torch.full(shape, math.inf),
    "one nan": lambda shape: torch.ones(shape).index_fill(-1, torch.tensor(0), math.nan),
    "constant": lambda shape: torch.full(shape, 5.0),
    "spike": lambda shape: torch.zeros(shape).index_fill(-1, torch.tensor(0), 100.0),
    "zero": lambda shape: torch.zeros(shape),
}


def gradients_of(run, x, y, sample):
    """Pre-noise gradients of one step on the given batch, through model, criterion and guards."""
    run.loader.current = sample
    noise, run.engine.session.noise = run.engine.session.noise, Silence()
    before = copy.deepcopy(run.model.state_dict())
    run.backward(x, y)
    released = {}

    def look(optimizer, args, kwargs):
        released.update({n: p.grad.clone() for n, p in run.model.named_parameters()})

    handle = run.optimizer.register_step_post_hook(look)
    run.optimizer.step()
    handle.remove()
    run.engine.session.noise = noise
    with torch.no_grad():
        for name, value in run.model.state_dict().items():
            value.copy_(before[name])
    return released


class Silence:
    """Stands in for the noise, so that what it hides can be measured."""

    seeded = True

    def add_(self, gradients, deviations):
        pass


def sample_of(step, rows):
    return StepSample(
        step=step, indices=torch.arange(rows), rows=rows, weights=None, micro_batch=0,
        micro_batches=1, size=rows,
    )  # fmt: skip


def differences(run, data, extra, steps, labels):
    """Largest difference over sensitivity, by parameter, over a whole training run."""
    x, y = data
    worst = {}
    sensitivities = run.engine.plan.sensitivities
    number = 0
    for step in range(steps):
        chosen = torch.randperm(len(x))[: 5 + step % 7]
        with_extra = (
            torch.cat([x[chosen], extra[None]]),
            torch.cat([y[chosen], labels[step % len(labels)][None]]),
        )
        without = (x[chosen], y[chosen])
        found = []
        for batch in (with_extra, without):
            found.append(gradients_of(run, *batch, sample_of(number, len(batch[0]))))
            number += 1
        total = 0.0
        for name, sensitivity in sensitivities.items():
            difference = (found[0][name] - found[1][name]).double().norm().item()
            assert math.isfinite(difference)
            worst[name] = max(worst.get(name, 0.0), difference / sensitivity)
            total += (difference / sensitivity) ** 2
        # Move on, as a training would: a real, noisy step with the adversary in it.
        run.loader.current = sample_of(number, len(with_extra[0]))
        number += 1
        run.backward(*with_extra)
        run.optimizer.step()
    return worst


@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize("build", [mlp, cnn, residual], ids=lambda f: f.__name__)
def test_one_example_never_moves_a_sum_by_more_than_its_sensitivity(build, adversary):
    shape = SHAPES[build]
    data = examples(60, shape)
    run = Run(build(), data, losses.CrossEntropy(tau=8.0), noise_multiplier=0.3, lr=1.0)
    extra = ADVERSARIES[adversary](shape)
    worst = differences(run, data, extra, 12, torch.tensor([0, 1, 2]))
    assert max(worst.values()) <= 1.0
    if adversary in ("huge", "constant"):
        assert max(worst.values()) > 0.2  # the adversary does what it can


LOSSES = {
    "cross entropy": (losses.CrossEntropy(), [0, 1, 2]),
    "binary cross entropy": (losses.BinaryCrossEntropy(tau=5.0), None),
    "cosine": (losses.CosineSimilarity(0.2), [0, 1, 2]),
    "hinge": (losses.MulticlassHinge(3.0), [0, 1, 2]),
    "hinge sum": (losses.MulticlassHinge(3.0, class_reduction="sum"), [0, 1, 2]),
    "kr": (losses.KantorovichRubinstein(), [0, 1, 2]),
    "hinge kr": (losses.HingeKR(2.0), [0, 1, 2]),
    "absolute": (losses.AbsoluteError(), None),
    "huber": (losses.Huber(0.5), None),
    "squared": (losses.SquaredError(1.0, 2.0), None),
    "liar": (losses.PerExample(lambda o, t: 1000 * o.sum() * t.sum(), lipschitz=0.5), None),
}


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss(name):
    """The last one claims a constant 5,000 times too small: the output guard enforces it."""
    criterion, labels = LOSSES[name]
    x, y = examples(60)
    if labels is None:
        y = torch.nn.functional.one_hot(y, 3).float()
    choices = torch.tensor(labels) if labels else torch.eye(3)
    run = Run(mlp(), (x, y), criterion, noise_multiplier=0.3)
    for adversary in ("huge", "nan", "constant"):
        extra = ADVERSARIES[adversary]((6,))
        worst = differences(run, (x, y), extra, 4, choices)
        assert max(worst.values()) <= 1.0
        run = Run(mlp(), (x, y), criterion, noise_multiplier=0.3)


def test_regression_with_a_target_that_is_not_a_number():
    x, y = torch.randn(40, 6), torch.randn(40, 3)
    for target in (math.nan, math.inf, 1e30):
        run = Run(mlp(), (x, y), losses.AbsoluteError(), noise_multiplier=0.3)
        worst = differences(run, (x, y), torch.ones(6), 3, torch.full((1, 3), target))
        assert max(worst.values()) <= 1.0


def test_micro_batches_and_padding_release_the_same_sum():
    """One step's gradients are the same whether it comes whole, in parts, or padded."""
    data = examples(100)

    def first_step(**options):
        torch.manual_seed(0)
        run = Run(mlp(), data, noise_multiplier=0.0, **options)
        run.engine.session.noise = Silence()
        released = {}
        run.optimizer.register_step_post_hook(
            lambda *_: released.update({n: p.grad.clone() for n, p in run.model.named_parameters()})
        )
        for _ in range(3):
            run.step()
        return released

    whole = first_step()
    for options in ({"micro_batch_size": 3}, {"pad": True}, {"pad": True, "micro_batch_size": 5}):
        parts = first_step(**options)
        for name, value in whole.items():
            torch.testing.assert_close(parts[name], value, rtol=1e-4, atol=1e-6)


def test_padding_contributes_nothing_even_if_it_is_wild():
    """What stands in the padded rows does not matter, not even NaN."""
    found = []
    for filler in (0.0, math.nan, 1e30):
        torch.manual_seed(0)
        run = Run(mlp(), examples(100), noise_multiplier=0.0, pad=True)
        x, y = run.batch()
        size = run.loader.current.size
        assert size < len(x)
        x[size:] = filler
        run.backward(x, y)
        found.append(list(run.gradients().values()))
    for gradients in found[1:]:
        for one, other in zip(gradients, found[0], strict=True):
            assert one.equal(other)


def test_the_rare_label_does_not_weigh_more():
    """A label that occurs once: its example still contributes at most its sensitivity."""
    x, y = examples(200)
    y[:] = 0
    for criterion in (losses.KantorovichRubinstein(), losses.HingeKR(10.0)):
        run = Run(mlp(), (x, y), criterion, noise_multiplier=0.3)
        worst = differences(run, (x, y), torch.ones(6), 5, torch.tensor([2]))
        assert max(worst.values()) <= 1.0


def test_released_sum_is_divided_by_the_public_constant():
    """The same example alone or among others contributes the same: no mean over the batch."""
    data = examples(60)
    run = Run(mlp(), data, noise_multiplier=0.0)
    x, y = data
    alone = gradients_of(run, x[:1], y[:1], sample_of(0, 1))
    others = gradients_of(run, x[1:30], y[1:30], sample_of(1, 29))
    together = gradients_of(run, x[:30], y[:30], sample_of(2, 30))
    for name, value in together.items():
        torch.testing.assert_close(value, alone[name] + others[name], rtol=1e-4, atol=1e-7)
