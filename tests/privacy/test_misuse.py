"""What a careless user can do, and that none of it gets a release that is not paid for.

Every test is one way of misusing the engine. It ends in one of three ways: it is refused with an
error that says what to do, it is counted for what it costs, or it turns out to be harmless and the
test shows why. The sections:

- batches: other loaders, batches cut, repeated, joined, kept, skipped, drawn ahead
- micro-batches and padding
- the loss: other criteria, other terms, scaled losses, changed outputs, wrong labels
- gradients: other paths into the parameters, and gradients edited before the noise
- optimizers: steps without, twice, by others, closures, foreign parameters, scalers
- the model: edited, loaded, converted, frozen, extended, hooked, copied, compiled
- budget, ledger and engine
- the failures of an earlier implementation, one by one

What cannot be noticed from inside the process is documented: see `UNNOTICED`.
"""

import copy
import gc
import io
import itertools
import math
import os
import pickle
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import clipless
from clipless import PrivacyEngine, losses
from clipless import nn as lip
from clipless.errors import (
    BudgetExhaustedError,
    CliplessError,
    ConstraintError,
    LabelError,
    LedgerError,
    PrivacyError,
    UnboundedSensitivityError,
    UnsupportedOperationError,
)
from clipless.privacy import FixedSizeSampling, Ledger, PoissonSampling
from clipless.privacy import epsilon as account
from tests.nn.operators import norm_of, singular_values
from tests.privacy.misuse_helpers import (
    bounded_or_refused,
    counted,
    counting_skipped_steps,
    gradients_of,
    refused,
    refused_unharmed,
    weights_of,
)
from tests.privacy.runs import Run, cnn, examples, mlp, residual

UNNOTICED = (
    "reading p.grad between backward and step, or copying a model that holds gradients",
    "mixing examples between the loader and the model: mixup, batch statistics, rolled labels",
    "training something else on the model's outputs, or on the data, outside the engine",
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


def make(loader, **options):
    """Make a model private over a given `DataLoader`."""
    model = mlp()
    options.setdefault("criterion", losses.CrossEntropy())
    options.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    options.setdefault("noise_multiplier", 1.0)
    engine = options.pop("engine", None) or PrivacyEngine()
    engine.make_private(module=model, data_loader=loader, **options)
    return engine


# --- batches -------------------------------------------------------------------------------------


def test_iterating_the_original_loader():
    run = Run()
    original = DataLoader(TensorDataset(*examples(100)), batch_size=20)
    for x, y in original:
        with refused_unharmed(run, "no new batch was drawn", "loader that make_private returned"):
            run.backward(x, y)
    assert counted(run, 0)


def test_iterating_the_original_loader_next_to_the_private_one():
    run = Run()
    original = DataLoader(TensorDataset(*examples(100)), batch_size=21)
    with refused_unharmed(run, "rows", "private loader"):
        for (x, y), _ in zip(original, run.loader, strict=False):
            run.backward(x, y)
            run.optimizer.step()


def test_one_batch_for_two_steps():
    run = Run()
    x, y = run.batch()
    run.backward(x, y)
    run.optimizer.step()
    with refused_unharmed(run, "no new batch was drawn"):
        run.backward(x, y)
    with refused_unharmed(run, "without a batch", "draw one from the private loader"):
        run.optimizer.step()
    assert counted(run, 1)


def test_overfitting_one_batch():
    run = Run()
    x, y = next(iter(run.loader))
    with refused("no new batch was drawn"):
        for _ in range(5):
            run.optimizer.zero_grad()
            run.backward(x, y)
            run.optimizer.step()
    assert counted(run, 1)


def test_cycling_over_saved_batches():
    run = Run()
    batches = itertools.cycle(run.loader)
    for _ in range(run.loader.steps_per_epoch):
        run.backward(*next(batches))
        run.optimizer.step()
    with refused_unharmed(run, "no new batch was drawn"):
        run.backward(*next(batches))
    assert counted(run, run.loader.steps_per_epoch)


def test_all_batches_in_a_list_first():
    run = fixed()
    batches = list(run.loader)
    with (
        counting_skipped_steps(),
        refused("no new batch was drawn"),
    ):
        for x, y in batches:
            run.backward(x, y)
            run.optimizer.step()
    assert counted(run, len(batches))


@pytest.mark.parametrize(
    "change",
    {
        "a part of the batch": lambda x, y: (x[:5], y[:5]),
        "only one class": lambda x, y: (x[y == 0], y[y == 0]),
        "the batch twice": lambda x, y: (torch.cat([x, x]), torch.cat([y, y])),
        "one example more": lambda x, y: (torch.cat([x, x[:1]]), torch.cat([y, y[:1]])),
        "rows repeated": lambda x, y: (x.repeat_interleave(2, 0), y.repeat_interleave(2, 0)),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_batch_that_is_not_whole(change):
    run = Run()
    x, y = run.batch()
    with refused_unharmed(run, f"has {len(x)} rows", "Feed it whole and once"):
        run.backward(*change[1](x, y))


def test_two_batches_joined():
    run = Run()
    (x1, y1), (x2, y2) = run.batch(), run.batch()
    with (
        counting_skipped_steps(),
        refused_unharmed(run, "Feed it whole and once"),
    ):
        run.backward(torch.cat([x1, x2]), torch.cat([y1, y2]))
    assert counted(run, 1)


def test_skipping_a_step_when_the_loss_is_not_finite():
    run = Run()
    with counting_skipped_steps():
        for number, (x, y) in enumerate(run.loader):
            loss = run.criterion(run.model(x), y)
            if number == 1:
                loss = loss * float("nan")
            if torch.isnan(loss):
                continue
            run.optimizer.zero_grad()
            loss.backward()
            run.optimizer.step()
    assert run.engine.session.steps_taken == run.loader.steps_per_epoch - 1
    assert counted(run, run.loader.steps_per_epoch)


def test_leaving_an_epoch_and_starting_it_again():
    run = Run()
    for _ in range(3):
        for number, (x, y) in enumerate(run.loader):
            run.backward(x, y)
            if number == 2:
                break
            run.optimizer.step()
    with counting_skipped_steps():
        run.step()
    assert run.engine.session.steps_taken == 3 * 2 + 1
    assert counted(run, 3 * 3 + 1)


def test_accumulating_gradients_over_several_batches():
    run, once = full(noise_multiplier=0.0, lr=0.0), full(noise_multiplier=0.0, lr=0.0)
    once.model.load_state_dict(run.model.state_dict())
    once.step()
    run.backward(*run.batch())
    with counting_skipped_steps():
        for _ in range(2):
            run.backward(*run.batch())
    run.optimizer.step()
    assert run.engine.ledger.releases == 3
    for name, gradient in gradients_of(run.model).items():  # of one batch, not of three
        torch.testing.assert_close(gradient, once.model.get_parameter(name).grad)


def test_evaluating_on_the_private_loader():
    run = Run()
    run.step()
    with torch.no_grad():
        for x, _ in run.loader:
            run.model(x)
    with counting_skipped_steps():
        run._batches = iter(())
        run.step()
    assert counted(run, 2 + run.loader.steps_per_epoch)


def test_an_iteration_inside_an_iteration():
    run = Run()
    with refused("superseded", "one iteration at a time"):
        for x, y in run.loader:
            run.backward(x, y)
            run.optimizer.step()
            next(iter(run.loader))


def test_a_spare_output_kept_for_the_next_step():
    # With a fixed batch size nothing but its history tells that this output belongs to a
    # sample that has been used.
    run = fixed(model=nn.Sequential(lip.BoundedInput(1.0), lip.SpectralLinear(6, 3)))
    x, y = run.batch()
    spare = run.model(x)
    run.backward(x, y)
    run.optimizer.step()
    run.batch()
    with refused_unharmed(run, "batch"):
        run.criterion(spare, y).backward()
        run.optimizer.step()


@pytest.mark.parametrize("options", [{"sampling": "fixed_size"}, {"pad": True}], ids=str)
def test_a_variable_that_still_holds_an_old_batch(options):
    run = Run(**options)
    x, y = run.batch()
    with refused("batch"):
        for _ in run.loader:
            run.backward(x, y)  # meant to be the loop's own batch
            run.optimizer.step()


def test_drawing_the_next_batch_before_the_step():
    run = Run()
    batches = iter(run.loader)
    batch = next(batches)
    with counting_skipped_steps(), refused_unharmed(run, "rows"):
        for upcoming in batches:
            run.backward(*batch)
            run.optimizer.step()
            batch = upcoming


def test_drawing_the_next_batch_before_the_step_with_padding():
    # The rows always agree; the weights that leave out the padding are those of another batch.
    run = Run(pad=True, noise_multiplier=0.0)
    batches = iter(run.loader)
    batch, real = next(batches), len(run.loader.current.indices)
    for _ in range(3):
        upcoming, next_real = next(batches), len(run.loader.current.indices)
        plain = copy.deepcopy(run.model)
        F.cross_entropy(plain(batch[0][:real]), batch[1][:real], reduction="sum").backward()
        run.optimizer.zero_grad()
        try:
            run.backward(*batch)
        except PrivacyError as error:
            assert "batch" in str(error)  # noqa: PT017
            return
        run.optimizer.step()
        for name, expected in gradients_of(plain).items():
            torch.testing.assert_close(20 * run.model.get_parameter(name).grad, expected)
        batch, real = upcoming, next_real


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*examples(100), strict=True))


class Bootstrapping(DataLoader):
    def __iter__(self):
        yield from super().__iter__()


_DATA = TensorDataset(*examples(100))
_OTHER_LOADERS = {
    "weighted sampler": (
        lambda: DataLoader(_DATA, 10, sampler=WeightedRandomSampler(torch.ones(100), 100)),
        ("WeightedRandomSampler", "shuffle=True or the default"),
    ),
    "sampling with replacement": (
        lambda: DataLoader(_DATA, 10, sampler=RandomSampler(_DATA, replacement=True)),
        ("not one that is accounted for",),
    ),
    "a subset by a sampler": (
        lambda: DataLoader(_DATA, 10, sampler=SubsetRandomSampler(range(50))),
        ("SubsetRandomSampler", "Drop it"),
    ),
    "own batch sampler": (
        lambda: DataLoader(
            _DATA, batch_sampler=type("Own", (BatchSampler,), {})(SequentialSampler(_DATA), 5, True)
        ),
        ("its own Own", "Drop it"),
    ),
    "a stream": (lambda: DataLoader(Stream(), 10), ("is a stream", "map-style")),
    "batches made by the data set": (
        lambda: DataLoader(_DATA, batch_size=None),
        ("batch_size=None", "give a batch_size"),
    ),
    "a loader with its own __iter__": (
        lambda: Bootstrapping(_DATA, 10),
        ("Bootstrapping", "PrivateLoader"),
    ),
    "a list of batches": (lambda: [examples(10)], ("expected a torch DataLoader", "list")),
}


@pytest.mark.parametrize("name", _OTHER_LOADERS)
def test_loaders_with_another_distribution(name):
    build, words = _OTHER_LOADERS[name]
    with refused(*words):
        make(build())


def test_a_sampling_that_describes_another_data_set():
    with refused("100 examples", "describes 5000"):
        Run(sampling=PoissonSampling(dataset_size=5000, rate=0.01))


class Growing(Dataset):
    def __init__(self):
        self.x, self.y = examples(100)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def test_a_data_set_that_changes_its_size():
    data, model, criterion = Growing(), mlp(), losses.CrossEntropy()
    optimizer, engine = torch.optim.SGD(model.parameters(), lr=0.1), PrivacyEngine()
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, criterion=criterion, noise_multiplier=1.0,
        data_loader=DataLoader(data, batch_size=10),
    )  # fmt: skip
    with refused("101 examples", "describes 100", "anew"):
        for x, y in loader:
            criterion(model(x), y).backward()
            optimizer.step()
            data.x, data.y = torch.randn(101, 6), torch.zeros(101).long()
    assert engine.ledger.releases == 1


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_batch_size_that_does_not_divide_the_data_set(drop_last):
    # A mean over what is left in the last batch would weigh its examples 20 times.
    data = examples(101)
    model, criterion = mlp(), losses.CrossEntropy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = PrivacyEngine(seed=0)
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, criterion=criterion, noise_multiplier=0.0,
        data_loader=DataLoader(TensorDataset(*data), batch_size=20, drop_last=drop_last),
    )  # fmt: skip
    assert engine.plan.expected_batch_size == pytest.approx(20)
    sizes = set()
    for x, y in itertools.islice(itertools.chain(loader, loader, loader), 12):
        plain = copy.deepcopy(model)
        F.cross_entropy(plain(x), y, reduction="sum").div(20).backward()
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        sizes.add(len(x))
        for name, expected in gradients_of(plain).items():
            torch.testing.assert_close(model.get_parameter(name).grad, expected)
    assert len(sizes) > 5


@pytest.mark.parametrize("build", [mlp, cnn], ids=lambda f: f.__name__)
def test_empty_batches_are_counted_and_get_noise(build):
    data = examples(40, (6,) if build is mlp else (1, 4, 4))
    run = Run(build(), data, batch_size=1)
    empty = 0
    for x, y in run.loader:
        run.optimizer.zero_grad()
        run.backward(x, y)
        run.optimizer.step()
        if len(x) == 0:
            empty += 1
            assert all(g.abs().max() > 0 for g in gradients_of(run.model).values())
    assert empty > 5
    assert counted(run, 40)


def test_going_back_to_an_earlier_state_of_the_loader():
    run = Run()
    state = run.loader.state_dict()
    run.steps(2)
    with refused("goes back to step 0", "renew()"):
        run.loader.load_state_dict(state)


def test_forked_workers_read_the_data():
    model, criterion, engine = mlp(), losses.CrossEntropy(), PrivacyEngine(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, criterion=criterion, noise_multiplier=1.0,
        data_loader=DataLoader(Growing(), batch_size=25, num_workers=1),
    )  # fmt: skip
    for x, y in loader:
        assert len(x) == len(loader.current.indices)
        assert x.equal(Growing().x[loader.current.indices])
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    assert engine.ledger.releases == 4


def test_inputs_that_are_not_finite_destroy_nothing():
    x, y = examples(40)
    x[:5], x[5:10], x[10, 0] = math.nan, math.inf, -math.inf
    run = Run(data=(x, y), batch_size=10).steps(8)
    assert all(torch.isfinite(p).all() for p in run.model.parameters())
    assert counted(run, 8)


# --- micro-batches and padding -------------------------------------------------------------------


def test_a_micro_batch_forgotten():
    run = full(micro_batch_size=4)
    with refused_unharmed(run, "1 of the 4 micro-batches", "loader.current.is_last"):
        for x, y in run.loader:
            if run.loader.current.micro_batch == 1:
                continue
            run.backward(x, y)
            if run.loader.current.is_last:
                run.optimizer.step()


def test_a_step_before_the_last_micro_batch():
    run = full(micro_batch_size=4)
    with refused_unharmed(run, "3 of the 4 micro-batches", "Step once for every sample"):
        for x, y in run.loader:
            run.backward(x, y)
            run.optimizer.step()


def test_a_micro_batch_twice():
    run = full(micro_batch_size=4)
    x, y = run.batch()
    run.backward(x, y)
    with refused_unharmed(run, "went through the criterion before", "draw the next batch"):
        run.backward(x, y)


def test_one_backward_for_all_micro_batches_is_one_step():
    run = full(micro_batch_size=4, noise_multiplier=0.0, lr=0.0)
    whole = full(noise_multiplier=0.0, lr=0.0)
    whole.model.load_state_dict(run.model.state_dict())
    whole.step()
    sum(run.criterion(run.model(x), y) for x, y in run.loader).backward()
    run.optimizer.step()
    assert run.engine.ledger.releases == 1
    for name, gradient in gradients_of(run.model).items():
        torch.testing.assert_close(gradient, whole.model.get_parameter(name).grad)


def test_a_micro_batch_without_backward():
    run = full(micro_batch_size=8)
    run.criterion(run.model(run.batch()[0]), run.loader.dataset.tensors[1][:8])
    run.backward(*run.batch())
    with refused_unharmed(run, "backward was called for 1 of the 2", "every private loss"):
        run.optimizer.step()


def test_zeroing_gradients_between_micro_batches_costs_no_more():
    run = full(micro_batch_size=4, noise_multiplier=0.0)
    for x, y in run.loader:
        run.optimizer.zero_grad()  # may lose what came before
        run.backward(x, y)
    run.optimizer.step()
    assert run.engine.ledger.releases == 1
    for name, sensitivity in run.engine.plan.sensitivities.items():
        assert gradients_of(run.model)[name].norm() <= 16 * sensitivity


def test_padding_weighs_nothing_whatever_is_written_there():
    run = Run(pad=True, noise_multiplier=0.0, lr=0.0)
    x, y = run.batch()
    real = len(run.loader.current.indices)
    assert real < len(x)
    x[real:], y[real:] = 1e30, 2
    plain = copy.deepcopy(run.model)
    F.cross_entropy(plain(x[:real]), y[:real], reduction="sum").div(20).backward()
    run.backward(x, y)
    run.optimizer.step()
    for name, expected in gradients_of(plain).items():
        torch.testing.assert_close(run.model.get_parameter(name).grad, expected)


# --- the loss ------------------------------------------------------------------------------------


def _through_model(term):
    """A term of the loss that looks at the model's output and targets."""
    return lambda run, x, y: term(run, run.model(x), y)


_OTHER_LOSSES = {
    "torch's cross-entropy": _through_model(lambda run, out, y: F.cross_entropy(out, y)),
    "the mean output": _through_model(lambda run, out, y: out.mean()),
    "the criterion's forward": _through_model(
        lambda run, out, y: run.criterion.forward(out, y).mean()
    ),
    "per_example": _through_model(lambda run, out, y: run.criterion.per_example(out, y).mean()),
    "a model in evaluation mode": lambda run, x, y: run.criterion(run.model.eval()(x), y),
    "a loss made and another used": _through_model(
        lambda run, out, y: (run.criterion(out, y), F.cross_entropy(out, y))[1]
    ),
    "an input gradient": lambda run, x, y: torch.autograd.grad(
        run.model(x.requires_grad_()).sum(), x, create_graph=True
    )[0].norm(),
}  # fmt: skip


@pytest.mark.parametrize("name", _OTHER_LOSSES)
def test_backward_without_the_criterion(name):
    run = Run()
    x, y = run.batch()
    with refused_unharmed(run, "without going through the criterion", "training mode"):
        _OTHER_LOSSES[name](run, x, y).backward()
    run.model.train()
    with pytest.raises(PrivacyError):
        run.optimizer.step()
    assert counted(run, 0)


@pytest.mark.parametrize(
    "term",
    {
        "confidence penalty": lambda out, y: 0.1 * out.logsumexp(1).mean(),
        "batch variance": lambda out, y: out.var(0).sum(),
        "contrast between examples": lambda out, y: (out @ out.T).sum(),
        "a second loss": lambda out, y: F.cross_entropy(out, y),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_term_next_to_the_criterion(term):
    run = Run()
    x, y = run.batch()
    out = run.model(x)
    with refused_unharmed(run, "besides the criterion", "PerExample"):
        (run.criterion(out, y) + term[1](out, y)).backward()


@pytest.mark.parametrize(
    "change",
    {
        "times a constant": lambda loss: 10 * loss,
        "divided by accumulation steps": lambda loss: loss / 4,
        "times the batch": lambda loss: loss * 20,
        "exponential": lambda loss: loss.exp(),
        "zero": lambda loss: 0 * loss,
        "a hook on the loss": lambda loss: (loss.register_hook(lambda g: 3 * g), loss)[1],
    }.items(),
    ids=lambda item: item[0],
)
def test_a_scaled_loss(change):
    run = Run()
    x, y = run.batch()
    with refused_unharmed(run, "multiplied by", "learning rate", "micro_batch_size"):
        change[1](run.criterion(run.model(x), y)).backward()


def test_a_scaled_loss_by_the_argument_of_backward():
    run = Run()
    with refused_unharmed(run, "multiplied by 7"):
        run.criterion(run.model((batch := run.batch())[0]), batch[1]).backward(torch.tensor(7.0))


def test_the_criterion_twice_on_one_output():
    run = Run()
    x, y = run.batch()
    out = run.model(x)
    with refused_unharmed(run, "went through the criterion before"):
        (run.criterion(out, y) + run.criterion(out, y)).backward()


@pytest.mark.parametrize(
    "change",
    {
        "reshaped": lambda out: out.view(-1, 3),
        "centred over the batch": lambda out: out - out.mean(0),
        "transposed twice": lambda out: out.T.T,
        "a row": lambda out: out[:1],
        "cloned": lambda out: out.clone(),
        "double precision": lambda out: out.double(),
        "normalised": lambda out: F.normalize(out),
        "detached": lambda out: out.detach(),
        "permuted": lambda out: out[torch.randperm(len(out))],
    }.items(),
    ids=lambda item: item[0],
)
def test_the_criterion_on_a_changed_output(change):
    run = Run()
    x, y = run.batch()
    with refused_unharmed(run, "model's output itself, unchanged", "torch.no_grad()"):
        run.criterion(change[1](run.model(x)), y)


@pytest.mark.parametrize("silently", [False, True])
def test_an_output_edited_in_place(silently):
    run = Run()
    x, y = run.batch()
    out = run.model(x)
    with refused_unharmed(run, "modified inplace", error=RuntimeError):
        with torch.set_grad_enabled(not silently):
            out.sub_(out.mean(0))
        run.criterion(out, y).backward()


def test_an_output_edited_through_data():
    def attack(run):
        out = run.model(run.batch()[0])
        # An example with a small loss makes everybody's loss flat, or not.
        out.data.mul_(100.0 if out.detach()[0, 0] > 0 else 0.0)
        run.criterion(out, run.loader.dataset.tensors[1]).backward()
        run.optimizer.step()

    bounded_or_refused(attack)


def test_the_criterion_with_keywords():
    run = Run()
    x, y = run.batch()
    with refused_unharmed(run, "criterion(output, target)"):
        run.criterion(output=run.model(x), target=y)
    with torch.no_grad():
        assert run.criterion(output=run.model(x), target=y).ndim == 0


def test_two_backward_passes():
    run = Run(noise_multiplier=0.0)
    before = copy.deepcopy(run.model.state_dict())
    x, y = run.batch()
    loss = run.criterion(run.model(x), y)
    loss.backward(retain_graph=True)
    with refused_unharmed(run, "a second time", "retain_graph=True"):
        loss.backward()
    run.optimizer.step()  # on the gradients of the first
    assert run.engine.ledger.releases == 1
    plain = copy.deepcopy(run.model)
    plain.load_state_dict(before)
    F.cross_entropy(plain(x), y, reduction="sum").div(20).backward()
    for name, expected in gradients_of(plain).items():
        torch.testing.assert_close(run.model.get_parameter(name).grad, expected)


def test_backward_after_the_step():
    run = Run()
    x, y = run.batch()
    spare = run.model(x)
    run.backward(x, y)
    run.optimizer.step()
    with refused_unharmed(run, "no new batch was drawn"):
        run.criterion(spare, y).backward()


def test_a_gradient_penalty():
    run = Run()
    x, y = run.batch()
    x.requires_grad_()
    loss = run.criterion(run.model(x), y)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with refused_unharmed(run, "backward was called a second time"):
        (loss + gradient.flatten(1).norm(dim=1).mean()).backward()


def test_a_gradient_penalty_alone():
    def attack(run):
        x, y = run.batch()
        loss = run.criterion(run.model(x.requires_grad_()), y)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (1e4 * gradient.square().sum()).backward()
        run.optimizer.step()

    bounded_or_refused(attack)


def test_consistency_between_two_passes():
    # The target is a second output of the model: its gradient has no criterion of its own.
    criterion = losses.PerExample(lambda a, b: (a - b).abs().mean(), lipschitz=1.0)
    run = Run(criterion=criterion)
    x, _ = run.batch()
    with refused_unharmed(run, "without going through the criterion"):
        criterion(run.model(x), run.model(x + 0.1)).backward()


def test_the_second_of_two_outputs_counts_once():
    run = full(noise_multiplier=0.0)
    x, y = run.batch()
    run.model(x)
    run.backward(x, y)
    run.optimizer.step()
    assert run.engine.ledger.releases == 1
    for name, sensitivity in run.engine.plan.sensitivities.items():
        assert gradients_of(run.model)[name].norm() <= 16 * sensitivity


@pytest.mark.parametrize(
    "labels",
    {
        "out of range": (lambda y: y + 3, "class indices run from 0 to 2"),
        "unlabelled": (lambda y: y - 100, "Remove unlabelled examples"),
        "one-hot": (lambda y: F.one_hot(y, 3), "target.argmax(dim=1)"),
        "smoothed": (lambda y: F.one_hot(y, 3).float() * 0.9, "another Lipschitz constant"),
        "floats": (lambda y: y.float(), "target.long()"),
        "of another batch": (lambda y: torch.cat([y, y]), "one class index per example"),
        "a column": (lambda y: y[:, None], "target.squeeze(1)"),
    }.items(),
    ids=lambda item: item[0],
)
def test_wrong_labels(labels):
    change, words = labels[1]
    run = Run()
    x, y = run.batch()
    with refused_unharmed(run, words, error=LabelError):
        run.backward(x, change(y))
    # The run goes on; what was drawn is counted.
    with counting_skipped_steps():
        run.step()
    assert counted(run, 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_regression_targets_that_are_not_finite(bad):
    x, _ = examples(16)
    target = torch.zeros(16, 3)
    target[0] = bad
    run = full(data=(x, target), criterion=losses.AbsoluteError(), noise_multiplier=0.0)
    run.step()
    assert all(torch.isfinite(p).all() for p in run.model.parameters())
    for name, sensitivity in run.engine.plan.sensitivities.items():
        assert gradients_of(run.model)[name].norm() <= 16 * sensitivity


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), F.cross_entropy, losses.CrossEntropy])
def test_a_criterion_that_is_not_a_private_loss(criterion):
    with refused("not a per-example loss", "clipless.losses", "PerExample"):
        make(DataLoader(_DATA, 10), criterion=criterion)


def test_a_claimed_constant_that_is_too_small_clips():
    # The loss is 1000 times steeper than its author says.
    assert not bounded_or_refused(
        lambda run: run.step(),
        criterion=lambda: losses.PerExample(
            lambda out, y: 1000 * (out * F.one_hot(y, 3)).sum(), lipschitz=1.0
        ),
    )


def test_a_constant_of_the_loss_changed_in_training():
    def attack(run):
        run.criterion.floor = 1e-4
        run.step()

    bounded_or_refused(attack, criterion=lambda: losses.CosineSimilarity(1.0))


class RelativeLoss(losses.CrossEntropy):
    """Weighs every example by the largest loss of the batch."""

    def per_example(self, output, target):
        each = super().per_example(output, target)
        return each / each.detach().max().square()


def test_a_loss_of_ones_own_that_looks_at_the_batch():
    x, y = torch.eye(6)[:1].repeat(64, 1), torch.zeros(64).long()
    wild = x.clone()
    wild[0] = -wild[0]
    bounded_or_refused(
        lambda run: run.step(),
        criterion=lambda: RelativeLoss(tau=4.0),
        data=((x, y), (wild, y.index_fill(0, torch.tensor([0]), 1))),
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_reduction_set_back_by_hand(reduction):
    run = Run()
    run.criterion.reduction = reduction
    with refused_unharmed(run, "reduction"):
        run.step()


def test_the_loss_function_replaced_in_training():
    run = Run()
    original = run.criterion.per_example
    run.criterion.per_example = lambda out, y: original(out, y) * original(out, y).detach().sum()
    with refused_unharmed(run, "criterion"):
        run.step()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_on_the_criterion(when):
    criterion = losses.CrossEntropy()

    def relative(module, arguments, each):
        return each * each.detach().sum() if each.ndim else each

    if when == "before":
        criterion.register_forward_hook(relative)
        with refused("hook"):
            Run(criterion=criterion).step()
    else:
        run = Run(criterion=criterion)
        criterion.register_forward_hook(relative, prepend=True)
        with refused_unharmed(run, "hook"):
            run.step()


def test_evaluation_costs_nothing_and_is_ordinary():
    run = Run().steps(2)
    spent = run.engine.get_epsilon()
    x, y = examples(30, seed=5)
    expected = F.cross_entropy(run.model.eval()(x).detach(), y)
    torch.testing.assert_close(run.criterion(run.model(x), y).detach(), expected)
    with torch.no_grad():
        torch.testing.assert_close(run.criterion(run.model(x), y), expected)
        torch.testing.assert_close(run.criterion(run.model.train()(x), y), expected)
        torch.testing.assert_close(run.criterion(run.model(x).clone(), y), expected)
    with torch.inference_mode():
        torch.testing.assert_close(run.criterion(run.model(x), y), expected)
    assert run.engine.get_epsilon() == spent
    run.step()
    assert counted(run, 3)


def test_evaluation_between_forward_and_step():
    run = full(noise_multiplier=0.0)
    x, y = run.batch()
    loss = run.criterion(run.model(x), y)
    run.model.eval()
    with torch.no_grad():
        run.criterion(run.model(x), y)
    run.model.train()
    loss.backward()
    run.criterion(run.model.eval()(x), y)
    run.model.train()
    run.optimizer.step()
    assert run.engine.ledger.releases == 1


def test_forgetting_train_after_evaluation():
    run = Run().steps(1)
    run.model.eval()
    before = weights_of(run.model)
    with refused("training mode"):
        run.step()
    assert all(before[n].equal(w) for n, w in weights_of(run.model).items())
    run.model.train()
    with counting_skipped_steps():
        run.step()
    assert counted(run, 3)


def test_input_gradients_in_evaluation_mode_are_refused_in_words():
    # For attacks on the model take a copy, which is ordinary.
    run = Run()
    x, y = examples(4)
    x.requires_grad_()
    copied = copy.deepcopy(run.model).eval()
    F.cross_entropy(copied(x), y).backward()
    assert x.grad.norm() > 0
    with refused("without going through the criterion"):
        F.cross_entropy(run.model.eval()(x), y).backward()
    assert not gradients_of(run.model)


# --- gradients: other paths into the parameters --------------------------------------------------


def test_a_layer_called_on_its_own():
    run = Run()
    x, _ = run.batch()
    with refused_unharmed(run, "called outside the model", "torch.no_grad()"):
        run.model[1](x)
    with torch.no_grad():
        run.model[1](x)


def test_a_part_of_the_model_called_on_its_own():
    run = Run()
    x, _ = run.batch()
    with refused_unharmed(run, "called outside the model"):
        run.model[:2](x)


def test_forward_called_directly():
    run = Run()
    x, _ = run.batch()
    with refused_unharmed(run, "called outside the model"):
        run.model.forward(x)


def _two_losses(extra):
    """One backward for the private loss and a term that reaches parameters another way."""

    def attack(run):
        x, y = run.batch()
        loss = run.criterion(run.model(x), y)
        (loss + extra(run, x)).backward()
        run.optimizer.step()

    return attack


def test_a_term_that_uses_a_weight_directly():
    # "Encourage sparse features": the input of this product was never bounded.
    bounded_or_refused(_two_losses(lambda run, x: F.linear(x, run.model[1].weight).abs().mean()))


def test_a_term_through_a_layer_in_evaluation_mode():
    def features(run, x):
        run.model.eval()
        features = run.model[1](x)
        run.model.train()
        return features.var()

    bounded_or_refused(_two_losses(features))


def test_a_term_through_a_layer_without_constraints():
    def build():
        return nn.Sequential(
            lip.BoundedInput(1.0),
            lip.SpectralLinear(6, 8),
            lip.Householder(8),
            lip.SpectralLinear(8, 3),
        )

    weights = torch.arange(8.0)
    bounded_or_refused(
        _two_losses(lambda run, x: (run.model[2](x[:, [0, 1, 2, 3, 4, 5, 0, 1]]) * weights).sum()),
        build=build,
    )


class Remembering(nn.Module):
    """Keeps its features for a regulariser, as many tutorials do."""

    def __init__(self, place):
        super().__init__()
        self.guard = lip.BoundedInput(1.0)
        self.body = lip.SpectralLinear(6, 8)
        self.head = lip.SpectralLinear(8, 3)
        self.place = place

    def forward(self, x):
        features = self.body(self.guard(x))
        if self.place is None:
            self.features = features
        else:
            self.place.features = features
        return self.head(features)


@pytest.mark.parametrize("place", [lambda: None, types.SimpleNamespace], ids=["self", "elsewhere"])
def test_a_term_on_remembered_features(place):
    def term(run, x):
        kept = run.model if run.model.place is None else run.model.place
        return 1000 * kept.features.square().mean()

    def attack(run):
        with torch.no_grad():
            run.model(run.loader.dataset.tensors[0])  # an evaluation before the training
        _two_losses(term)(run)

    bounded_or_refused(attack, build=lambda: Remembering(place()))


def test_a_term_on_activations_seen_by_a_global_hook():
    def attack(run):
        seen = []
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, inputs, out: seen.append(out) if module is run.model[1] else None
        )
        try:
            _two_losses(lambda run, x: 1000 * seen[0].square().mean())(run)
        finally:
            handle.remove()

    bounded_or_refused(attack)


class WithASpareLayer(nn.Module):
    """Has a layer that its forward does not use, so that its bound is zero and so is its noise."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.spare = lip.SpectralLinear(6, 3)

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize("together", [True, False])
def test_a_term_that_trains_a_layer_the_model_does_not_use(together):
    def attack(run):
        x, y = run.batch()
        loss = run.criterion(run.model(x), y)
        other = F.cross_entropy(F.linear(x, run.model.spare.weight), y)
        if together:
            (loss + other).backward()
        else:
            loss.backward()
            other.backward()
        run.optimizer.step()

    bounded_or_refused(attack, build=WithASpareLayer)


def test_another_head_on_top_of_the_model():
    run = Run()
    x, y = run.batch()
    head = nn.Linear(3, 3)
    with refused_unharmed(run, "output itself, unchanged"):
        run.criterion(head(run.model(x)), y)
    with refused_unharmed(run, "without going through the criterion"):
        F.cross_entropy(head(run.model(x)), y).backward()


def test_a_penalty_on_the_weights_is_harmless_or_refused():
    # It reads no data, so it changes no sensitivity.
    bounded_or_refused(
        _two_losses(lambda run, x: 1e-2 * sum(p.square().sum() for p in run.model.parameters()))
    )


def test_a_second_loss_before_the_criterion():
    run = Run()
    x, y = run.batch()
    run.model[1].weight.square().sum().backward()
    with refused_unharmed(run, "did not come through the criterion"):
        run.backward(x, y)
    run.optimizer.zero_grad()
    # Refused once, with the stray gradients thrown away: the run can go on.
    with counting_skipped_steps():
        run.step()
    assert counted(run, 2)


def test_a_second_loss_after_the_criterion():
    run = Run()
    run.backward(*run.batch())
    run.model[1].weight.square().sum().backward()
    with refused_unharmed(run, "more gradients than there were private losses"):
        run.optimizer.step()


# --- gradients: edited before the noise ----------------------------------------------------------


def _scale(parameters):
    for parameter in parameters:
        parameter.grad.mul_(1000)


def _replace(parameters):
    for parameter in parameters:
        parameter.grad = parameter.grad * 1000


def _add(parameters):
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1000.0)


def _normalise(parameters):
    for parameter in parameters:
        parameter.grad.div_(parameter.grad.norm())


@pytest.mark.parametrize("edit", [_scale, _replace, _add, _normalise], ids=lambda f: f.__name__)
def test_gradients_edited_between_backward_and_step(edit):
    run = full()
    run.backward(*run.batch())
    words = ("gradient", "NoneType", "has no attribute")
    with refused_unharmed(run, words, error=(PrivacyError, AttributeError, TypeError)):
        edit(run.model.parameters())
        run.optimizer.step()


def test_clipping_the_norm_of_all_gradients_before_the_noise():
    # The clipped gradient of the bias depends on that of the weight, which an example can change
    # 100 times as much; the noise of the bias does not hide it. Clip after the noise of the step,
    # or per example with clipless.nn.ClipGradient.
    def attack(run):
        run.backward(*run.batch())
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        run.optimizer.step()

    x, y = torch.zeros(64, 6), torch.zeros(64).long()
    bounded_or_refused(
        attack,
        build=lambda: nn.Sequential(lip.BoundedInput(100.0), lip.SpectralLinear(6, 3, bias=True)),
        data=((x, y), (x.index_fill(0, torch.tensor([0]), 100.0), y)),
    )


def test_gradients_assigned_from_autograd_grad():
    run = full()
    x, y = run.batch()
    parameters = list(run.model.parameters())
    gradients = torch.autograd.grad(run.criterion(run.model(x), y), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = 1000 * gradient
    with refused_unharmed(run, "gradient"):
        run.optimizer.step()


def test_a_hook_on_a_parameter():
    run = Run()
    run.model[1].weight.register_hook(lambda gradient: 1000 * gradient)
    with refused_unharmed(run, "gradient hook"):
        run.step()


def test_a_hook_after_accumulation():
    run = Run()

    def scale(parameter):
        parameter.grad.mul_(1000)

    run.model[1].weight.register_post_accumulate_grad_hook(scale)
    with refused_unharmed(run, "gradient"):
        run.step()


def test_a_step_hook_that_runs_before_the_noise():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def scale(optimizer, args, kwargs):
        for parameter in model.parameters():
            parameter.grad.mul_(1000)

    optimizer.register_step_pre_hook(scale)
    with refused("gradient"):
        full(model=model, optimizer=optimizer).step()


def test_a_step_hook_after_the_noise_is_post_processing():
    run = Run(noise_multiplier=1e3)
    run.optimizer.register_step_pre_hook(
        lambda *_: nn.utils.clip_grad_norm_(run.model.parameters(), 1.0) and None
    )
    run.steps(2)
    assert counted(run, 2)


def test_zeroing_gradients_before_the_step_costs_no_less():
    run = full(noise_multiplier=0.0)
    run.backward(*run.batch())
    run.optimizer.zero_grad()
    run.optimizer.step()
    assert run.engine.ledger.releases == 1
    for name, sensitivity in run.engine.plan.sensitivities.items():
        assert gradients_of(run.model)[name].norm() <= 16 * sensitivity


# --- optimizers ----------------------------------------------------------------------------------


def test_a_step_without_a_batch():
    run = Run()
    with refused_unharmed(run, "without a batch", "draw one from the private loader"):
        run.optimizer.step()


def test_a_step_without_backward():
    run = Run()
    x, y = run.batch()
    run.criterion(run.model(x), y)
    with refused_unharmed(run, "backward was called for 0 of the 1"):
        run.optimizer.step()


def test_two_steps_in_a_row():
    run = Run().steps(1)
    with refused_unharmed(run, "without a batch"):
        run.optimizer.step()
    assert counted(run, 1)


@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_a_closure(how):
    run = Run()
    x, y = run.batch()

    def closure():
        run.optimizer.zero_grad()
        return run.backward(x, y)

    with refused_unharmed(run, "closure", "steps on the gradients it finds"):
        run.optimizer.step(closure) if how == "positional" else run.optimizer.step(closure=closure)


def test_lbfgs():
    model = mlp()
    run = Run(model, optimizer=torch.optim.LBFGS(model.parameters()))
    x, y = run.batch()
    with refused_unharmed(run, "closure"):
        run.optimizer.step(lambda: run.backward(x, y))


def test_an_optimizer_that_lacks_parameters():
    model = mlp()
    with refused("lacks trainable parameters", "1.weight, 1.bias", "requires_grad_(False)"):
        Run(model, optimizer=torch.optim.SGD(model[3].parameters(), lr=0.1)).step()


def test_an_optimizer_with_foreign_parameters():
    model, other = mlp(), nn.Linear(2, 2)
    parameters = [*model.parameters(), *other.parameters()]
    with refused("not the model's", "optimizer of their own"):
        Run(model, optimizer=torch.optim.SGD(parameters, lr=0.1)).step()


def test_a_parameter_group_added_later():
    run = Run().steps(1)
    run.optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    with refused_unharmed(run, "not the model's"):
        run.step()


def test_an_optimizer_of_another_model():
    with refused("not the model's"):
        Run(mlp(), optimizer=torch.optim.SGD(mlp().parameters(), lr=0.1)).step()


def _ball():
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


def test_a_second_optimizer_on_the_same_parameters():
    run = full(model=_ball())
    second = torch.optim.SGD(run.model.parameters(), lr=1e-3)
    with refused(("weights", "optimizer")):
        for _ in range(2):
            run.backward(*run.batch())
            second.step()  # on gradients that have no noise yet
            run.optimizer.step()


def test_only_a_second_optimizer():
    run = full(model=_ball())
    second = torch.optim.Adam(run.model.parameters(), lr=1e-3)
    with refused(("weights", "optimizer")):
        for _ in range(2):
            second.zero_grad()
            run.backward(*run.batch())
            second.step()


def test_a_second_optimizer_after_the_step_is_post_processing():
    run = full(model=_ball(), noise_multiplier=1e3, lr=0.0)
    second = torch.optim.SGD(run.model.parameters(), lr=1e-6)
    for _ in range(2):
        run.step()
        second.step()  # the gradients it finds are noisy
    assert run.engine.ledger.releases == 2


def test_updating_weights_by_hand():
    run = full(model=_ball())
    with refused(("weights", "optimizer", "NoneType"), error=(PrivacyError, TypeError)):
        for _ in range(2):
            run.backward(*run.batch())
            with torch.no_grad():
                for parameter in run.model.parameters():
                    parameter -= 1e-3 * parameter.grad
            run.optimizer.zero_grad()


def test_sharpness_aware_ascent():
    run = full(model=_ball())
    x, y = run.batch()
    run.backward(x, y)
    with refused(("weights", "criterion", "NoneType"), error=(PrivacyError, TypeError)):
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter += 1e-3 * parameter.grad
        run.backward(x, y)


def test_a_copied_optimizer():
    run = Run().steps(1)
    model, optimizer = copy.deepcopy((run.model, run.optimizer))
    F.cross_entropy(model(torch.randn(4, 6)), torch.zeros(4).long()).backward()
    optimizer.step()  # of the copy: an ordinary one, on other data
    run.step()
    assert counted(run, 2)


def test_a_restored_optimizer_keeps_the_noise():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = Run(model, optimizer=optimizer, noise_multiplier=1e3).steps(2)
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    run.step()
    assert gradients_of(run.model)["1.weight"].norm() > 10
    assert counted(run, 3)


_OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_ordinary_optimizers_and_schedulers(name):
    model = mlp()
    optimizer = _OPTIMIZERS[name](
        [{"params": model[1].parameters(), "lr": 0.01}, {"params": model[3].parameters()}]
    )
    before = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    run = Run(model, optimizer=optimizer, noise_multiplier=1e3)
    after = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 10)
    for _ in range(3):
        run.step()
        assert gradients_of(run.model)["3.weight"].norm() > 10  # noisy
        before.step()
        after.step()
    assert counted(run, 3)
    assert clipless.certify(run.model)


def test_a_disabled_gradient_scaler():
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    run = Run()
    for _ in range(2):
        x, y = run.batch()
        run.optimizer.zero_grad()
        scaler.scale(run.criterion(run.model(x), y)).backward()
        scaler.step(run.optimizer)
        scaler.update()
    assert counted(run, 2)


def test_a_gradient_scaler_nobody_was_told_of():
    scaler = torch.amp.GradScaler("cpu")
    run = Run()
    x, y = run.batch()
    with refused_unharmed(run, "multiplied by 65536", "grad_scaler"):
        scaler.scale(run.criterion(run.model(x), y)).backward()


@pytest.mark.parametrize("fused", [False, True])
def test_the_noise_under_a_gradient_scaler(fused):
    # Fused optimizers divide by the scale inside their step, after the noise was added.
    scaler = torch.amp.GradScaler("cpu")
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    run = full(model=model, optimizer=optimizer, noise_multiplier=1e3, grad_scaler=scaler)
    moved = {}

    def watch(optimizer, args, kwargs):
        moved["start"] = weights_of(model)

    def measure(optimizer, args, kwargs):
        moved["step"] = {n: w - moved["start"][n] for n, w in weights_of(model).items()}

    optimizer.register_step_pre_hook(watch)
    # The first hook runs first: what the optimizer did is seen before the projection.
    handle = optimizer.register_step_post_hook(measure)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)
    x, y = run.batch()
    try:
        scaler.scale(run.criterion(run.model(x), y)).backward()
        scaler.step(run.optimizer)
    except PrivacyError as error:
        assert "fused" in str(error) or "scaler" in str(error)  # noqa: PT017
        return
    for name, deviation in run.engine.plan.noise_deviations.items():
        measured = moved["step"][name].std().item()
        assert 0.5 * deviation < measured < 1.5 * deviation


def test_a_scaled_loss_and_an_ordinary_step():
    # scaler.step(optimizer) was forgotten: nobody divides by the scale.
    scaler = torch.amp.GradScaler("cpu")

    def attack(run):
        x, y = run.batch()
        scaler.scale(run.criterion(run.model(x), y)).backward()
        run.optimizer.step()

    run = full(noise_multiplier=0.0, grad_scaler=scaler)
    try:
        attack(run)
    except PrivacyError:
        return
    for name, sensitivity in run.engine.plan.sensitivities.items():
        assert gradients_of(run.model)[name].norm() <= 16 * sensitivity


def test_a_gradient_scaler_that_is_not_used():
    run = full(noise_multiplier=0.0, grad_scaler=torch.amp.GradScaler("cpu"))
    try:
        run.step()
    except PrivacyError:
        return
    for name, sensitivity in run.engine.plan.sensitivities.items():
        assert gradients_of(run.model)[name].norm() <= 16 * sensitivity


# --- the model: weights --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "edit",
    {
        "in place": lambda w: w.mul_(3),
        "through data": lambda w: w.data.mul_(3),
        "copied": lambda w: w.copy_(3 * w),
        "initialised": lambda w: nn.init.normal_(w),
        "poisoned": lambda w: w.fill_(math.nan),
    }.items(),
    ids=lambda item: item[0],
)
def test_weights_edited_out_of_their_sets(edit):
    run = Run().steps(1)
    with torch.no_grad():
        edit[1](run.model[1].weight)
    with refused("1.weight", "clipless.nn.project(model)", error=ConstraintError):
        run.step()
    # The way out that the message names.
    with torch.no_grad():
        run.model[1].weight.nan_to_num_(0.0)
    clipless.project(run.model)
    with counting_skipped_steps():
        run.step()
    assert counted(run, 3)


def test_weights_edited_inside_their_sets():
    run = Run().steps(1)
    with torch.no_grad():
        run.model[1].weight.mul_(0.5)
    run.step()
    assert counted(run, 2)


def test_loading_weights_that_break_the_constraints():
    run = Run().steps(1)
    run.model.load_state_dict({name: 2 * w for name, w in run.model.state_dict().items()})
    with refused("1.weight", "after loading or editing weights", error=ConstraintError):
        run.step()


def test_loading_weights_as_new_parameters():
    run = Run().steps(1)
    state = {name: w.clone() for name, w in run.model.state_dict().items()}
    run.model.load_state_dict(state, assign=True)
    with refused("parameters", "make_private again"):
        run.step()


def test_a_parameter_replaced():
    run = Run().steps(1)
    run.model[1].weight = nn.Parameter(run.model[1].weight.detach().clone())
    with refused("parameters", "make_private again"):
        run.step()


def test_weights_edited_in_a_way_that_keeps_their_norm():
    run = Run().steps(1)
    weight = run.model[3].weight
    with torch.no_grad():
        norm = torch.linalg.vector_norm(weight)
        weight.zero_()
        weight[0, 0] = norm  # now the spectral norm, which was 1 before
    assert torch.linalg.vector_norm(weight) == norm > 1.5
    with refused("3.weight", error=ConstraintError):
        run.step()


def test_weights_edited_between_forward_and_backward():
    def attack(run):
        loss = run.criterion(run.model((batch := run.batch())[0]), batch[1])
        for parameter in run.model.parameters():
            parameter.data.mul_(100)
        loss.backward()
        run.optimizer.step()

    bounded_or_refused(attack)


def test_half_precision():
    run = Run()
    run.model.half()
    x, y = run.batch()
    with refused("1.weight", "converting their dtype", error=ConstraintError):
        run.backward(x.half(), y)


def test_half_precision_and_projected():
    run = Run()
    run.model.to(torch.bfloat16)
    clipless.project(run.model)
    x, y = run.batch()
    with pytest.raises((CliplessError, ValueError), match=r"float32|bfloat16|dtype"):
        run.backward(x.bfloat16(), y)


def test_half_precision_from_the_start():
    model = mlp().to(torch.bfloat16)
    clipless.project(model)
    with refused("bfloat16", "Keep parameters in float32", error=ValueError):
        Run(model)


def test_double_precision_in_the_middle_of_a_run():
    run = full(noise_multiplier=0.0)
    run.step()
    run.model.double()
    x, y = run.batch()
    run.optimizer.zero_grad()
    run.backward(x.double(), y)
    run.optimizer.step()
    assert run.engine.ledger.releases == 2
    for name, sensitivity in run.engine.plan.sensitivities.items():
        assert gradients_of(run.model)[name].norm() <= 16 * sensitivity


def test_autocast():
    # bfloat16 keeps 8 bits: this example's gradient is rounded up by more than the slack of the
    # plan, which is for float32.
    x = torch.full((1, 256), 0.06276)
    model = nn.Sequential(
        lip.BoundedInput(x.norm().item()), lip.SpectralLinear(256, 2, norm=500.0, constraint="ball")
    )
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, 256))
    run = Run(
        model, (x, torch.tensor([1])), batch_size=1, sampling="full_batch", noise_multiplier=0.0
    )
    x, y = run.batch()
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run.criterion(run.model(x), y)
        loss.backward()
        run.optimizer.step()
    except CliplessError:
        return
    sensitivity = run.engine.plan.sensitivities["1.weight"]
    assert run.model[1].weight.grad.norm() <= sensitivity


# --- the model: structure ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    {
        "a layer added": (lambda m: m.append(lip.SpectralLinear(3, 3)), "added, removed, frozen"),
        "a layer removed": (lambda m: m.pop(1), "shape"),
        "a layer frozen": (lambda m: m[1].requires_grad_(False), "make_private again"),
        "the guard removed": (lambda m: m.__setitem__(0, nn.Identity()), "BoundedInput"),
        "a layer replaced": (lambda m: m.__setitem__(1, nn.Linear(6, 8)), "SpectralLinear"),
        "BatchNorm": (lambda m: m.insert(2, nn.BatchNorm1d(8)), "mixes examples"),
        "a forward hook": (lambda m: m[1].register_forward_hook(lambda *_: None), "hook"),
        "a pre-hook": (lambda m: m[1].register_forward_pre_hook(lambda *_: None), "hook"),
        "a hook on the model": (lambda m: m.register_forward_hook(lambda *_: None), "hook"),
        "a backward hook": (lambda m: m[2].register_full_backward_hook(lambda *_: None), "hook"),
        "a forward of its own": (
            lambda m: setattr(m[2], "forward", lambda x: 100 * x), "forward was replaced"
        ),
        "a smaller norm": (lambda m: setattr(m[1], "norm", 0.5), "project(model)"),
    }.items(),
    ids=lambda item: item[0],
)  # fmt: skip
def test_a_model_changed_between_steps(change):
    run = Run().steps(1)
    change[1][0](run.model)
    with refused(change[1][1], error=CliplessError):
        run.step()
    assert counted(run, 1)


def test_a_layer_unfrozen():
    model = mlp()
    model[1].requires_grad_(False)
    run = Run(model).steps(1)
    model[1].requires_grad_(True)
    with refused_unharmed(run, "unfrozen", "make_private again"):
        run.step()


def test_a_model_changed_between_forward_and_step():
    run = Run()
    run.backward(*run.batch())
    run.model[1].norm = 2.0
    with refused_unharmed(run, "changed between its forward pass", "between steps"):
        run.optimizer.step()


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_a_larger_norm_gets_more_noise(layer):
    run = full(noise_multiplier=0.0)
    run.step()
    before = run.engine.plan.sensitivities
    run.model[layer].norm = 3.0
    run.step()
    after = run.engine.plan.sensitivities
    grown = {0: "1.weight", 1: "3.weight", 3: "1.weight"}[layer]
    assert after[grown] > 1.9 * before[grown]
    for name, gradient in gradients_of(run.model).items():
        assert gradient.norm() <= 16 * after[name]


def _clipped():
    return nn.Sequential(
        lip.BoundedInput(1.0), lip.SpectralLinear(6, 3), lip.ClipGradient(0.1)
    )  # fmt: skip


def test_a_clipping_norm_that_moves_takes_the_noise_along():
    run = full(model=_clipped())
    run.step()
    small = run.engine.plan.noise_deviations["1.weight"]
    run.model[2].norm = 0.3
    run.step()
    assert run.engine.plan.noise_deviations["1.weight"] == pytest.approx(3 * small)
    assert run.engine.session._deviations[0] == pytest.approx(3 * small)
    assert counted(run, 2)


def test_the_loss_scale_of_a_clipping_layer():
    run = full(model=_clipped())
    run.model[2].loss_scale = 1.0
    with refused_unharmed(run, "loss_scale", "change `norm` instead"):
        run.step()


class Scaled(nn.Module):
    """Multiplies by something that is kept outside the parameters."""

    def __init__(self, factor):
        super().__init__()
        self.guard = lip.BoundedInput(1.0)
        self.body = lip.SpectralLinear(6, 8)
        self.head = lip.SpectralLinear(8, 3)
        if isinstance(factor, torch.Tensor):
            self.register_buffer("factor", factor)
        else:
            self.factor = factor

    def forward(self, x):
        factor = getattr(self.factor, "value", self.factor)
        return self.head(self.body(self.guard(x)) * factor)


@pytest.mark.parametrize("kind", ["buffer", "number", "settings", "tensor"])
def test_a_factor_of_the_model_that_grows(kind):
    """Whatever holds it, the bound follows or the run is refused."""

    def build():
        if kind == "settings":
            return Scaled(types.SimpleNamespace(value=1.0))
        if kind == "tensor":
            model = Scaled(1.0)
            model.factor = torch.ones(())
            return model
        return Scaled(torch.ones(()) if kind == "buffer" else 1.0)

    def attack(run):
        run.step()
        if kind == "number":
            run.model.factor = 1000.0
        elif kind == "settings":
            run.model.factor.value = 1000.0
        else:
            run.model.factor.fill_(1000.0)
        run.step()

    bounded_or_refused(attack, build=build)


def test_examples_of_another_shape():
    """Bounds are proved for the shape of the data set; more positions mean larger gradients."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.guard = lip.BoundedInput(1.0)
            self.body = lip.SpectralLinear(2, 3, bias=True)

        def forward(self, x):  # (batch, positions, 2)
            return self.body(self.guard(x)).sum(1)

    run = Run(Positions(), examples(16, (3, 2)), batch_size=16, sampling="full_batch",
              noise_multiplier=0.0)  # fmt: skip
    x, y = run.batch()
    with refused("shape", error=CliplessError):
        run.backward(x.repeat(1, 50, 1), y)
        run.optimizer.step()
        for name, gradient in gradients_of(run.model).items():
            assert gradient.norm() <= 16 * run.engine.plan.sensitivities[name]


class FakeNorm(nn.BatchNorm1d):
    """Passes validators that look for the exact type."""


_MODELS = {
    "BatchNorm": (lambda: nn.BatchNorm1d(6), "mixes examples", "LayerCentering"),
    "a subclass of BatchNorm": (lambda: FakeNorm(6), "mixes examples", "FakeNorm"),
    "nn.Linear": (lambda: nn.Linear(6, 6), "not constrained", "SpectralLinear"),
    "a subclass of a layer": (
        lambda: type("Mine", (lip.SpectralLinear,), {})(6, 6), "subclass", "exact type"
    ),
    "LayerNorm": (lambda: nn.LayerNorm(6), "no Lipschitz constant", "LayerCentering"),
    "in-place ReLU": (lambda: nn.ReLU(inplace=True), "place", ""),
    "weight_norm": (
        lambda: nn.utils.parametrizations.weight_norm(lip.SpectralLinear(6, 6)), "", "rule"
    ),
    "softmax over the batch": (lambda: nn.Softmax(dim=0), "rule", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", _MODELS)
def test_models_without_a_bound(name):
    build, *words = _MODELS[name]
    model = nn.Sequential(lip.BoundedInput(1.0), build(), lip.SpectralLinear(6, 3))
    with refused(*words, error=UnsupportedOperationError):
        Run(model)
    assert PrivacyEngine.validate(model, input_shape=(6,))


def test_a_model_with_nothing_to_train():
    with refused("no trainable parameters"):
        Run(mlp().requires_grad_(False), optimizer=torch.optim.SGD([torch.zeros(1)], lr=0.1))


def test_a_model_without_an_input_guard():
    model = nn.Sequential(lip.SpectralLinear(6, 3))
    with refused("0.weight", "BoundedInput", error=UnboundedSensitivityError):
        Run(model)


class MixesExamples(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.body = mlp()
        self.mix = mix

    def forward(self, x):
        return self.mix(self.body(x))


@pytest.mark.parametrize(
    "mix",
    [
        lambda h: h - h.mean(0),
        lambda h: h - h.mean(0, keepdim=True),
        lambda h: h + h.roll(1, 0),
        lambda h: h.flip(0),
        lambda h: h[torch.arange(len(h))],
        lambda h: h * h.shape[0],
        lambda h: h / len(h),
        lambda h: h.detach(),
    ],
    ids=["centred", "centred kept", "rolled", "flipped", "indexed", "times size", "over len",
         "detached"],
)  # fmt: skip
def test_a_forward_that_mixes_examples(mix):
    with refused("forward", error=UnsupportedOperationError):
        Run(MixesExamples(mix))


@pytest.mark.parametrize("factor", [1.0, 0.5], ids=["as it began", "pretrained"])
def test_frozen_parameters_are_unchanged_and_cost_nothing(factor):
    model = mlp()
    with torch.no_grad():
        model[1].weight.mul_(factor)  # inside its set, which is all that is asked of it
    model[1].requires_grad_(False)
    before = weights_of(model[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    run = Run(model, optimizer=optimizer).steps(3)
    assert set(run.engine.plan.sensitivities) == {"3.weight"}
    assert counted(run, 3)
    assert all(before[n].equal(w) for n, w in weights_of(model[1]).items())


def test_a_frozen_parameter_with_an_old_gradient():
    model = mlp()
    F.cross_entropy(model(torch.randn(4, 6)), torch.zeros(4).long()).backward()
    model[1].requires_grad_(False)
    before = weights_of(model[1])
    run = Run(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    run.backward(*run.batch())
    run.optimizer.step()
    for name, weight in weights_of(model[1]).items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=1e-6)


def test_gradients_from_before_are_not_released():
    model = mlp()
    F.cross_entropy(100 * model(torch.randn(4, 6)), torch.zeros(4).long()).backward()
    run = full(model=model, noise_multiplier=0.0)
    run.backward(*run.batch())
    run.optimizer.step()
    for name, sensitivity in run.engine.plan.sensitivities.items():
        assert gradients_of(run.model)[name].norm() <= 16 * sensitivity


def test_a_module_used_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.guard = lip.BoundedInput(1.0)
            self.body = lip.SpectralLinear(6, 6)
            self.head = lip.SpectralLinear(6, 3)

        def forward(self, x):
            return self.head(self.body(self.body(self.guard(x))))

    run = Run(Twice())
    bounds = {p.name: p.gradient_bound for p in run.engine.plan.parameters}
    assert bounds["body.weight"] == pytest.approx(2 * math.sqrt(2))
    assert not bounded_or_refused(lambda run: run.step(), build=Twice)


def test_layers_with_the_same_name():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = lip.SpectralLinear(6, 6)

        def forward(self, x):
            return self.layer(x)

    model = nn.Sequential(lip.BoundedInput(1.0), Block(), Block(), lip.SpectralLinear(6, 3))
    run = Run(model, noise_multiplier=100.0).steps(1)
    assert list(run.engine.plan.sensitivities) == ["1.layer.weight", "2.layer.weight", "3.weight"]
    assert all(g.norm() > 1 for g in gradients_of(model).values())


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
        patched.setattr(F, "linear", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.model(x)
    with refused_unharmed(run, "called outside the model"):
        run.model[1](x)
    run.backward(x, y)
    run.optimizer.step()
    assert counted(run, 1)


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
    run.optimizer.step()  # the same gradients again, with more noise: counted again
    assert counted(run, 2)
    run.step()
    assert counted(run, 3)


# --- budget, ledger and engine -------------------------------------------------------------------


def test_no_noise_is_no_privacy():
    run = Run(noise_multiplier=0.0)
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
    run = Run()
    run.backward(*run.batch())
    with refused("a step is under way", "between steps"):
        run.engine.set_noise_multiplier(0.1)
    run.optimizer.step()
    run.engine.set_noise_multiplier(2.0)
    run.step()
    assert [m.noise_multiplier for m, _ in run.engine.ledger.history()] == [1.0, 2.0]


def test_noise_without_projection():
    with refused("projection=False needs noise_multiplier=0"):
        Run(projection=False)
    run = Run(projection=False, noise_multiplier=0.0)
    with refused("without projection"):
        run.engine.set_noise_multiplier(1.0)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan])
def test_deltas_without_a_meaning(delta):
    with refused("delta must lie strictly between 0 and 1", error=ValueError):
        Run(target_delta=delta)
    run = Run().steps(1)
    with refused("delta must lie strictly between 0 and 1", error=ValueError):
        run.engine.get_epsilon(delta)


def test_a_delta_that_permits_to_publish_an_example():
    assert clipless.privacy.default_delta(100) < 1 / 100
    assert "1/N" in clipless.privacy.default_delta.__doc__
    report = Run(target_delta=0.05).steps(1).engine.report()
    assert any("delta" in caveat for caveat in report.caveats)


def test_an_unknown_accountant():
    with refused("'pld' or 'rdp'", error=ValueError):
        Run(engine=PrivacyEngine(accountant="gdp"))


def test_a_step_beyond_the_budget():
    run = Run(target_epsilon=1.0, steps=3).steps(3)
    before = weights_of(run.model)
    for _ in range(2):
        with refused("would exceed epsilon=1", "Stop here", error=BudgetExhaustedError):
            run.step()
        with pytest.raises(PrivacyError):
            run.optimizer.step()
    assert all(before[n].equal(w) for n, w in weights_of(run.model).items())
    assert run.engine.get_epsilon() <= 1.0


def test_less_noise_than_agreed_does_not_exceed_the_budget():
    run = Run(target_epsilon=2.0, steps=50).steps(5)
    run.engine.set_noise_multiplier(run.engine.plan.noise_multiplier / 1.5)
    with refused("would exceed epsilon=2", error=BudgetExhaustedError):
        run.steps(50)
    assert 1.5 < run.engine.get_epsilon() <= 2.0


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
    run = Run()
    other = Run(model=run.model, optimizer=run.optimizer, criterion=run.criterion)
    with refused_unharmed(run, "private"):
        other.step()


@pytest.mark.parametrize("again", ["same engine", "same ledger"])
def test_a_seed_does_not_repeat_its_noise(again, tmp_path):
    """Equal noise in two releases cancels in their difference."""
    path = tmp_path / "ledger"
    data = (torch.zeros(16, 6), torch.zeros(16).long())
    engine = PrivacyEngine(seed=0, ledger=path)
    first = full(engine=engine, data=data, noise_multiplier=10.0)
    first.step()
    if again == "same ledger":
        engine.ledger.close()
        engine = PrivacyEngine(seed=0, ledger=path)
    second = full(engine=engine, data=data, noise_multiplier=10.0)
    second.step()
    name = "1.weight"  # of which all true gradients are zero here
    assert not gradients_of(first.model)[name].equal(gradients_of(second.model)[name])


def test_a_ledger_in_use(tmp_path):
    path = tmp_path / "ledger"
    run = Run(engine=PrivacyEngine(ledger=path)).steps(1)
    with refused("in use by", "(this one)", "one writer", error=LedgerError):
        Run(engine=PrivacyEngine(ledger=path))
    assert _in_child(lambda: Ledger(path)) == "LedgerError"
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


def test_add_remove_for_batches_of_fixed_size():
    with refused("REPLACE_ONE", "PoissonSampling"):
        fixed(relation="add_remove")


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
    for word in ("gradients", "mix", "losses", "choosing"):
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
    engine = PrivacyEngine(seed=0)
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
