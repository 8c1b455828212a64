"""Misuse of the data: what a careless user can do with loaders and batches.

See `tests.privacy.misuse_helpers` for how every case must end. Here: other loaders, batches cut,
repeated, joined, kept, skipped, drawn ahead, moved and mixed up; micro-batches and padding.
"""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from clipless import PrivacyEngine, losses
from clipless import nn as lip
from clipless.privacy import PoissonSampling
from tests.privacy.misuse_helpers import (
    assert_close,
    counted,
    counting_skipped_steps,
    expected_gradients,
    fixed,
    full,
    gradients_of,
    refused,
    refused_unharmed,
)
from tests.privacy.runs import Run, cnn, engine_arguments, examples, mlp


def make(loader, **options):
    """Make a model private over a given `DataLoader`."""
    model = mlp()
    options.setdefault("criterion", losses.CrossEntropy())
    options.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    options.setdefault("noise_multiplier", 1.0)
    engine = options.pop("engine", None) or PrivacyEngine()
    given = engine_arguments(engine.make_private, options)
    engine.make_private(module=model, data_loader=loader, **given)
    return engine


# --- batches -------------------------------------------------------------------------------------


def test_iterating_the_original_loader():
    run = Run()
    original = DataLoader(TensorDataset(*examples(100)), batch_size=20)
    for x, y in original:
        with refused_unharmed(run, "before a batch was drawn", "loader that make_private returned"):
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


@pytest.mark.parametrize("options", [{}, {"sampling": "fixed_size"}, {"pad": True}], ids=str)
def test_all_batches_in_a_list_first(options):
    # Every batch carries its own sample: they are used once each, and so are their weights.
    run = Run(**options)
    batches = list(run.loader)
    for x, y in batches:
        expected = expected_gradients(run, x, y)
        run.backward(x, y)
        assert_close(run.gradients(), expected)
        run.optimizer.step()
    assert counted(run, len(batches))
    with refused_unharmed(run, "an old one was used again"):
        run.backward(*batches[0])


def test_batches_out_of_order():
    run = fixed()
    batches = list(run.loader)
    with counting_skipped_steps():
        run.backward(*batches[2])
    run.optimizer.step()
    assert counted(run, 3)  # the two before it count as skipped, and cannot be used any more
    with refused_unharmed(run, "an old one was used again"):
        run.backward(*batches[0])


def test_inputs_of_one_batch_and_targets_of_another():
    # Whoever is in both batches would be in two releases of which one is paid for.
    run = fixed()
    (_, old), (x, y) = run.batch(), run.batch()
    with refused_unharmed(run, "targets were drawn", "in another batch"):
        run.backward(x, old)
    with counting_skipped_steps():
        run.backward(x, y)
    run.optimizer.step()
    assert counted(run, 2)


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
    with refused("an old one was used again"):
        for _ in run.loader:
            run.backward(x, y)  # meant to be the loop's own batch
            run.optimizer.step()
    assert counted(run, 1)


def test_a_moved_batch_that_is_used_for_all_steps():
    # Moving a batch makes new tensors, without the loader's mark: they get one at first use.
    run = fixed()
    x, y = (part.clone() for part in run.batch())
    run.backward(x, y)
    run.optimizer.step()
    run.batch()
    with refused_unharmed(run, "an old one was used again"):
        run.backward(x, y)
    assert counted(run, 1)


def test_a_buffer_that_every_batch_is_copied_to():
    run = fixed()
    buffer = torch.empty(20, 6)
    for x, y in run.loader:
        expected = expected_gradients(run, x, y)
        run.backward(buffer.copy_(x), y)
        assert_close(run.gradients(), expected)
        run.optimizer.step()
    assert counted(run, run.loader.steps_per_epoch)


@pytest.mark.parametrize("options", [{}, {"sampling": "fixed_size"}, {"pad": True}], ids=str)
def test_drawing_the_next_batch_before_the_step(options):
    # Looking ahead is fine: size, weights and step are those of the batch that is used.
    run = Run(**options)
    batches = iter(run.loader)
    batch = next(batches)
    for upcoming in batches:
        expected = expected_gradients(run, *batch)
        run.backward(*batch)
        assert_close(run.gradients(), expected)
        run.optimizer.step()
        batch = upcoming
    assert counted(run, run.loader.steps_per_epoch - 1)


def test_drawing_and_moving_the_next_batch_before_the_step_with_padding():
    # Moved batches carry no mark and all have the same number of rows; the weights of the batch
    # drawn last would take padding for examples, which an example more then replaces.
    run = Run(pad=True)
    batches = iter(run.loader)
    batch = [part.clone() for part in next(batches)]
    next(batches)
    with counting_skipped_steps(), refused_unharmed(run, "which of its rows are padding"):
        run.backward(*batch)
    assert counted(run, 2)
    x, y = (part.clone() for part in next(batches))  # one at a time again
    expected = expected_gradients(run, x, y, run.loader.current)
    run.backward(x, y)
    assert_close(run.gradients(), expected)
    run.optimizer.step()
    assert counted(run, 3)


def test_drawing_and_moving_the_next_batch_before_the_step():
    # Without padding a moved batch is taken for the one drawn last: what differs is refused, and
    # what is alike is used once and counted at least once.
    run = fixed()
    batches = iter(run.loader)
    batch = [part.clone() for part in next(batches)]
    with counting_skipped_steps():
        for upcoming in batches:
            expected = expected_gradients(run, *batch)
            run.backward(*batch)
            assert_close(run.gradients(), expected)
            run.optimizer.step()
            batch = [part.clone() for part in upcoming]
    assert counted(run, run.loader.steps_per_epoch)
    with refused_unharmed(run, "no new batch was drawn"):
        run.backward(*batch)


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
    engine = PrivacyEngine(insecure_seed=0)
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
    with refused("goes back to step 0", "step 1 was handed out"):
        run.loader.load_state_dict(state)


def test_forked_workers_read_the_data():
    model, criterion, engine = mlp(), losses.CrossEntropy(), PrivacyEngine(insecure_seed=0)
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


def repeated():
    data = TensorDataset(*examples(40))
    part = Subset(data, range(10, 30))
    return {
        "an index twice": Subset(data, [*range(40), 3]),
        "a bootstrap": Subset(data, torch.randint(40, (40,)).tolist()),
        "one record a thousand times": Subset(data, [7] * 1000),
        "an index from behind": Subset(data, [0, 1, 39, -1]),
        "a subset of a subset": Subset(part, [0, 5, 0]),
        "a bootstrap below": Subset(Subset(data, [1, 2, 2, 3]), range(4)),
        "a data set twice": ConcatDataset([data, data]),
        "a data set and a part of it": ConcatDataset([data, part]),
        "parts that overlap": ConcatDataset([part, Subset(data, range(25, 40))]),
        "an array of indices": Subset(data, torch.tensor([4, 5, 4]).numpy()),
        "one row, expanded": TensorDataset(torch.randn(1, 6).expand(40, 6), torch.zeros(40).long()),
    }


@pytest.mark.parametrize("what", [*repeated()])
def test_a_record_that_is_there_several_times(what):
    with refused("every record be there once"):
        make(DataLoader(repeated()[what], batch_size=2))


def test_a_subset_of_different_records():
    data = TensorDataset(*examples(40))
    parts = [Subset(data, range(20)), Subset(Subset(data, range(20, 40)), [3, 1, 2])]
    for fine in (parts[0], parts[1], ConcatDataset(parts), ConcatDataset([data, TensorDataset(
        *examples(40))])):  # fmt: skip
        make(DataLoader(fine, batch_size=2))


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


ANOTHER_INPUT = "came to the model as another input"


def loop(prepare, steps=6, **options):
    """An ordinary loop, whose batches go through `prepare` on their way to the model."""
    run = Run(**options)
    for _ in range(steps):
        run.optimizer.zero_grad()
        last = False
        while not last:
            x, y = run.batch()
            run.backward(prepare(x), y)
            last = run.loader.current.is_last
        run.optimizer.step()


@pytest.mark.parametrize(
    "prepare",
    [
        lambda x: (x - x.mean(0)) / x.std(0),
        lambda x: x.sub_(x.mean(0)),
        lambda x: x / x.abs().max(),
        lambda x: 0.9 * x + 0.1 * x.flip(0),
    ],
    ids=["standardised", "in place", "largest value", "mixup"],
)
def test_what_the_loop_does_to_a_batch_as_a_whole_is_noticed(prepare):
    with pytest.warns(UserWarning, match="came to the model as another input"):
        loop(prepare)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "prepare",
    [
        lambda x: x,
        lambda x: x.double().sub_(0.5).div_(3).float(),
        lambda x: x.half().float(),
        lambda x: torch.where(x > 1, math.nan, x / x.norm(dim=1, keepdim=True)),
        lambda x: x @ torch.ones(6, 6),
    ],
    ids=["nothing", "constants", "rounding", "norms and gaps", "products"],
)
@pytest.mark.parametrize("options", [{}, {"pad": True}, {"micro_batch_size": 8}], ids=str)
def test_what_the_loop_does_to_each_example_by_itself_is_no_matter(prepare, options):
    loop(prepare, **options)
