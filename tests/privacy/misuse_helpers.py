"""What the misuse suite measures with: refusals that release nothing, and neighbours."""

import contextlib

import pytest
import torch

from clipless.errors import CliplessError, PrivacyError
from clipless.privacy import epsilon
from tests.privacy.runs import Run, examples, mlp


@contextlib.contextmanager
def refused(*words, error=PrivacyError):
    """What happens inside must be refused with an error whose text contains all `words`.

    A tuple among the words stands for any of its members.
    """
    with pytest.raises(error) as caught:
        yield
    text = str(caught.value)
    choices = [(word,) if isinstance(word, str) else word for word in words]
    missing = [options for options in choices if not any(each in text for each in options)]
    assert not missing, f"the error does not say {missing}: {text}"


@contextlib.contextmanager
def refused_unharmed(run, *words, error=PrivacyError):
    """As `refused`, and the weights of the run are what they were before."""
    before = weights_of(run.model)
    with refused(*words, error=error):
        yield
    after = weights_of(run.model)
    assert all(before[name].equal(after[name]) for name in before), "weights changed"


@contextlib.contextmanager
def counting_skipped_steps():
    """What happens inside leaves batches unused, which is counted and said."""
    with pytest.warns(UserWarning, match="counted all the same"):
        yield


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
    """Run `attack` on neighbours without noise: an error, or one example stays in its bound.

    `attack(run)` takes one step. The sums that two data sets of the same size release may
    differ by twice the sensitivity. Returns whether there was an error, torch's own included.
    """
    released = []
    for each in data or neighbours(shape=shape):
        torch.manual_seed(3)
        try:
            run = Run(
                build(), each, None if criterion is None else criterion(), batch_size=16,
                sampling="full_batch", noise_multiplier=0.0,
            )  # fmt: skip
            attack(run)
        except (CliplessError, RuntimeError):
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
