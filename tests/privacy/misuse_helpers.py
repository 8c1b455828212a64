"""What the misuse suite measures with: refusals that release nothing, and neighbouring data sets."""

import contextlib

import pytest
import torch

from clipless.errors import CliplessError, PrivacyError
from clipless.privacy import epsilon
from tests.privacy.runs import Run, examples, mlp


@contextlib.contextmanager
def refused(*words, error=PrivacyError):
    """What happens inside must be refused with an error whose text contains all `words`."""
    with pytest.raises(error) as caught:
        yield
    text = str(caught.value)
    missing = [word for word in words if word not in text]
    assert not missing, f"the error does not say {missing}: {text}"


@contextlib.contextmanager
def refused_unharmed(run, *words, error=PrivacyError):
    """As `refused`, and the weights of the run are what they were before."""
    before = weights_of(run.model)
    with refused(*words, error=error):
        yield
    after = weights_of(run.model)
    assert all(before[name].equal(after[name]) for name in before), "weights changed"


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def gradients_of(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def counted(run, steps):
    """Whether the ledger holds exactly `steps` releases of the plan, and epsilon says so."""
    plan = run.engine.plan
    cost = epsilon([(plan.mechanism, steps)], plan.delta) if steps else 0.0
    return run.engine.ledger.releases == steps and run.engine.get_epsilon() == cost


def neighbours(count=16, shape=(6,), replaced=50.0):
    """Two data sets of which the first example differs: it is far away, with another label."""
    x, y = examples(count, shape)
    wild = x.clone()
    wild[0] = replaced
    return (x, y), (wild, y.index_fill(0, torch.tensor([0]), (int(y[0]) + 1) % 3))


def bounded_or_refused(attack, *, build=mlp, shape=(6,), criterion=None, data=None):
    """Run `attack` on neighbours without noise: refused, or one example stays within its bound.

    `attack(run)` takes one step. The sums that two data sets of the same size release may
    differ by twice the sensitivity. Returns whether it was refused.
    """
    released = []
    for each in data or neighbours(shape=shape):
        torch.manual_seed(3)
        run = Run(
            build(), each, None if criterion is None else criterion(), batch_size=16,
            sampling="full_batch", noise_multiplier=0.0,
        )  # fmt: skip
        try:
            attack(run)
        except CliplessError:
            return True
        assert run.engine.ledger.releases >= 1, "a release that is not in the ledger"
        released.append(gradients_of(run.model))
    for name, sensitivity in run.engine.plan.sensitivities.items():
        difference = (released[0][name] - released[1][name]).double().norm().item()
        assert difference <= 2 * sensitivity, (
            f"{name}: one example moved the sum by {difference:.3g}, twice the sensitivity is "
            f"{2 * sensitivity:.3g}"
        )
    return False
