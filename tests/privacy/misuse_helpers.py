"""What the misuse suite is about, and what it measures with.

A careless user may do anything, and none of it gets a release that is not paid for. Every test of
the `test_misuse_*` files is one way of misusing the engine; it ends in one of three ways: it is
refused with an error that says what to do, it is counted for what it costs, or it turns out to be
harmless and the test shows why (the gradients are those of the batch, or one example's share of
them stays within its sensitivity; the ledger holds what was released). The files:

- `test_misuse_data`: loaders, batches, micro-batches, padding
- `test_misuse_loss`: criteria, terms of the loss, outputs, labels, evaluation
- `test_misuse_gradients`: other ways into the parameters, edited gradients, optimizers, scalers
- `test_misuse_model`: weights and structure, changed in the middle of a run
- `test_misuse_engine`: copies, interruptions, budget, ledger, earlier failures

What cannot be noticed from inside the process is documented: see `UNNOTICED`.
"""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clipless import nn as lip
from clipless.errors import CliplessError, PrivacyError
from clipless.privacy import epsilon
from tests.privacy.runs import Run, examples, mlp

UNNOTICED = (
    "mixing examples between the loader and the model: mixup, batch statistics, rolled labels",
    "gradients of the model in evaluation mode, of its layers or of a copy, used by somebody else",
    "training something else on the model's outputs, or on the data, outside the engine",
    "targets of another batch, if they were moved or transformed",
    "two engines with two ledgers on the same data, or one person behind several examples",
    "decisions of the user that look at raw losses or gradients",
)


def full(**options):
    """A run in which every batch is the whole data set, so that sizes give nothing away."""
    options.setdefault("data", examples(16))
    return Run(batch_size=16, sampling="full_batch", **options)


def fixed(**options):
    """A run in which all batches have the same size, but not the same examples."""
    return Run(sampling="fixed_size", **options)


def ball():
    """Weights in the middle of their sets: small changes do not leave them."""
    model = nn.Sequential(
        lip.BoundedInput(1.0),
        lip.SpectralLinear(6, 8, constraint="ball"),
        lip.GroupSort(2),
        lip.SpectralLinear(8, 3, constraint="ball"),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model


def clipped():
    return nn.Sequential(
        lip.BoundedInput(1.0), lip.SpectralLinear(6, 3), lip.ClipGradient(0.1)
    )  # fmt: skip


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


def expected_gradients(run, x, y, sample=None, tau=1.0):
    """What plain PyTorch gives for the cross-entropy of a batch, without its padding."""
    sample = sample or getattr(x, "_clipless_sample", None)
    real = len(x) if sample is None else len(sample.indices)
    plain = copy.deepcopy(run.model).train()
    plain.zero_grad()
    loss = F.cross_entropy(tau * plain(x.detach()[:real]), y[:real], reduction="sum") / tau
    (loss / run.engine.plan.expected_batch_size).backward()
    return gradients_of(plain)


def edit_in_secret(output, how):
    """Change what the model returned in a way that autograd does not notice; rows are mixed."""
    if how == "through data":
        output.data.sub_(output.data.mean(0)).mul_(100.0)
    else:
        with torch.no_grad():
            output.sub_(output.mean(0))


def assert_close(found, expected):
    """Two dictionaries of gradients agree."""
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, check_dtype=False)


def counted(run, steps):
    """Whether the ledger holds exactly `steps` releases of the plan, and epsilon says so.

    What the ledger counts is asked for, since a seeded run of a test has no epsilon of its own.
    """
    plan, history = run.engine.plan, run.engine.ledger.history()
    cost = epsilon([(plan.mechanism, steps)], plan.delta) if steps else 0.0
    return run.engine.ledger.releases == steps and epsilon(history, plan.delta) == cost


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
