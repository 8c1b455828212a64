"""Augmented batches: which rows they have, where their randomness comes from, what is refused."""

import collections
import copy
import io
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from clipless.common import fresh_bits
from clipless.data import Compose, RandomCrop, RandomFlip
from clipless.errors import PrivacyError
from clipless.privacy import (
    BatchOptions,
    FixedSizeSampling,
    FullBatch,
    PoissonSampling,
    PrivateLoader,
)
from tests.privacy.misuse_helpers import counting_skipped_steps, refused
from tests.privacy.runs import Run, examples, privacy_options, private_loader
from tests.privacy.sampling.test_views import Mirror, jitter

SIZE = 50
X = torch.arange(SIZE, dtype=torch.float32)[:, None] + torch.tensor([0.0, 0.25, 0.5])
"""The whole part of an entry is the example's index."""


def nudge(batch, generator):
    """A random change that leaves the whole parts as they are."""
    return batch + 0.2 * torch.rand(batch.shape, generator=generator, device=batch.device)


class Squares(Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return X[index], index**2


DATA = {
    "columns": (X, torch.arange(SIZE) ** 2),
    "tensor data set": TensorDataset(X, torch.arange(SIZE) ** 2),
    "data set": Squares(),
}


def loader_of(data="columns", *, rate=0.2, seed=1, **options):
    sampling = options.pop("sampling", PoissonSampling(dataset_size=SIZE, rate=rate))
    return private_loader(DATA[data], sampling=sampling, insecure_seed=seed, **options)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(
    "options", [{}, {"micro_batch_size": 4}, {"pad": True}, {"pad": True, "micro_batch_size": 7}]
)
def test_rows_are_the_views_of_the_sample(data, options):
    """K rows for each example, one after the other, with its label; then padding. Samples and
    micro-batches are those of a loader without views, counted in examples."""
    loader = loader_of(data, augment=nudge, views=3, **options)
    plain = loader_of(data, **options)
    batches = 0
    for (x, y), _ in zip(loader, plain, strict=True):
        sample, expected = loader.current, plain.current
        assert sample.indices.equal(expected.indices)
        assert (sample.size, sample.micro_batches) == (expected.size, expected.micro_batches)
        assert sample.views == 3
        assert len(x) == len(y) == sample.rows == 3 * expected.rows
        real = 3 * len(sample.indices)
        rows = sample.indices.repeat_interleave(3)
        assert x[:real].floor().equal(rows[:, None].expand(-1, 3).float())
        assert y[:real].equal(rows**2)
        assert len(x[:real].unique(dim=0)) == real  # each view is another
        if "pad" in options:
            assert len(x) // 3 in loader.padding.sizes
            assert loader.rows == 3 * plain.rows
            assert sample.weights.equal((torch.arange(len(x)) < real).float())
            assert not y[real:].any()
        else:
            assert sample.weights is None
            assert len(x) == real
        batches += 1
    assert batches >= 5
    assert loader.sampling == plain.sampling


def test_one_view_is_plain_augmentation():
    loader = loader_of(augment=nudge)
    x, _ = next(iter(loader))
    assert loader.views == 1
    assert len(x) == loader.current.rows == len(loader.current.indices)
    assert x[:, 0].floor().equal(loader.current.indices.float())
    assert not x.equal(X[loader.current.indices])


def test_an_augmentation_can_bring_its_views():
    loader = loader_of(augment=Mirror())
    x, _ = next(iter(loader))
    chosen = X[loader.current.indices]
    assert loader.views == 2
    assert x[0::2].equal(chosen)
    assert x[1::2].equal(chosen.flip(-1))
    x, _ = next(iter(loader_of(augment=Mirror(), views=4)))
    assert x[0::4].equal(chosen)
    assert x[3::4].equal(chosen.flip(-1))


def test_tensors_without_labels_and_named_tuples():
    sampling = FullBatch(dataset_size=SIZE)
    x = next(iter(PrivateLoader(X, sampling=sampling, batches=BatchOptions(augment=Mirror()))))
    assert x.shape == (2 * SIZE, 3)
    assert x._clipless_sample.views == 2
    Pair = collections.namedtuple("Pair", "x y")
    pairs = [Pair(each, {"label": index}) for index, each in enumerate(X)]
    batch = next(
        iter(PrivateLoader(pairs, sampling=sampling, batches=BatchOptions(augment=Mirror())))
    )
    assert type(batch) is Pair
    assert batch.y["label"].equal(torch.arange(SIZE).repeat_interleave(2))


def test_integers_can_be_augmented():
    def drop(batch, generator):
        return batch * torch.randint(2, batch.shape, generator=generator, dtype=batch.dtype)

    data = torch.arange(SIZE * 3, dtype=torch.uint8).reshape(SIZE, 3)
    loader = PrivateLoader(
        data, sampling=FullBatch(dataset_size=SIZE), batches=BatchOptions(augment=drop, views=2)
    )
    assert next(iter(loader)).dtype == torch.uint8


# --- randomness ---------------------------------------------------------------------------------


def views_of(loader, batches=4):
    return [x for (x, _), _ in zip(loader, range(batches), strict=False)]


def equal(one, other):
    return all(a.equal(b) for a, b in zip(one, other, strict=True))


def test_views_follow_from_the_sampler_alone():
    fixed = {"sampling": FixedSizeSampling(dataset_size=SIZE, batch_size=5), "augment": nudge}
    first = views_of(loader_of(**fixed, views=2))
    torch.manual_seed(123)
    assert equal(first, views_of(loader_of(**fixed, views=2)))
    assert not equal(first, views_of(loader_of(**fixed, views=2, seed=2)))


def test_every_step_micro_batch_and_process_has_views_of_its_own():
    seen = []
    for rank in (0, 1):
        loader = loader_of(
            sampling=FullBatch(dataset_size=SIZE), augment=nudge, views=2, micro_batch_size=5,
            rank=rank, world_size=2, steps_per_epoch=2,
        )  # fmt: skip
        seen += [x - x.floor() for x, _ in loader]
    assert len(seen) == 20
    assert len(torch.cat(seen).unique(dim=0)) == 2 * 2 * SIZE


def test_a_saved_state_repeats_the_views_and_another_key_does_not():
    one = loader_of(augment=nudge, views=2)
    views_of(one, 2)
    state = one.state_dict()
    expected = views_of(one)
    other = loader_of(augment=nudge, views=2, seed=9)
    other.load_state_dict(state)
    assert equal(views_of(other), expected)
    third = loader_of(augment=nudge, views=2, seed=9, sampling=FullBatch(dataset_size=SIZE))
    fourth = loader_of(augment=nudge, views=2, seed=9, sampling=FullBatch(dataset_size=SIZE))
    fourth.load_state_dict({**fourth.state_dict(), "key": f"{fresh_bits(128):032x}"})
    assert not equal(views_of(third), views_of(fourth))


def test_no_global_randomness_is_used():
    before = torch.get_rng_state()
    views_of(loader_of(augment=nudge, views=2))
    assert torch.get_rng_state().equal(before)


# --- refusals -----------------------------------------------------------------------------------


def mixup(batch, generator):
    other = batch[torch.randperm(len(batch), generator=generator)]
    part = torch.rand(len(batch), 1, generator=generator)
    return part * batch + (1 - part) * other


def rare_mixup(batch, generator):
    seldom = torch.rand((), generator=generator) < 0.2
    return 0.5 * (batch + batch.roll(1, 0)) if seldom else batch


def one_number_for_all(batch, generator):
    if batch.max() > 0.9:
        return batch * torch.rand((), generator=generator)
    return batch + torch.rand((), generator=generator)


MIXING = {
    "mixup": mixup,
    "rare mixup": rare_mixup,
    "neighbours": lambda batch, generator: torch.maximum(batch, batch.roll(1, 0)),
    "mean of the batch": lambda batch, generator: batch - batch.mean(0),
    "largest of the batch": lambda batch, generator: batch / batch.max(),
    "smallest of the batch": lambda batch, generator: batch - batch.min(),
    "sorted": lambda batch, generator: batch.sort(0).values,
    "branch on the batch": one_number_for_all,
}


@pytest.mark.parametrize("name", MIXING)
def test_mixing_examples_is_refused(name):
    with refused("touch each other", "Treat every row by itself"):
        loader_of(augment=MIXING[name], views=2)
    with refused("touch each other"):
        loader_of(augment=MIXING[name])


def test_views_must_lie_next_to_each_other():
    class Stacked:
        views = 2

        def __call__(self, batch, generator):
            return torch.cat([batch, batch.flip(-1)])

    with refused("next to each other"):
        loader_of(augment=Stacked())


def test_the_place_of_an_example_may_not_matter():
    def every_other(batch, generator):
        return torch.where(torch.arange(len(batch))[:, None] % 2 == 0, batch, batch.flip(-1))

    with refused("place of an example"):
        loader_of(augment=every_other)


def test_randomness_from_elsewhere_is_refused():
    with refused("same batch and generator", "generator"):
        loader_of(augment=lambda batch, generator: batch + torch.rand(batch.shape))


WRONG_RESULTS = {
    "dtype": lambda batch, generator: batch.double(),
    "shape": lambda batch, generator: batch[:, :2],
    "rows": lambda batch, generator: batch[:-1],
    "more rows": lambda batch, generator: batch.repeat_interleave(2, 0),
}


@pytest.mark.parametrize("name", WRONG_RESULTS)
def test_other_shapes_are_refused(name):
    with refused("must keep shape, dtype and device"):
        loader_of(augment=WRONG_RESULTS[name])


def test_shapes_are_looked_at_in_every_batch():
    calls = []

    def tiring(batch, generator):
        calls.append(len(batch))
        return batch if len(calls) < 60 + 3 * 16 else batch[:-1]

    loader = loader_of(augment=tiring, rate=1.0)
    with refused("must keep shape"):
        for _ in range(200):
            next(iter(loader))


def test_results_that_are_no_tensors_are_refused():
    with refused("not a tensor"):
        loader_of(augment=lambda batch, generator: None)


@pytest.mark.parametrize("make", [Run, lambda **options: loader_of(**options)])
def test_numbers_of_views_that_mean_nothing(make):
    with refused("views=4 without an augmentation", "augment="):
        make(views=4)
    with refused("at least 1"):
        make(views=0, augment=jitter)
    with refused("2 views of every row", "multiple"):
        make(views=3, augment=Mirror())
    with refused("2 views of every row"):
        make(views=1, augment=Mirror())


def test_batches_without_inputs_in_front():
    sampling = FullBatch(dataset_size=SIZE)
    records = [{"x": each, "y": 0} for each in X]
    with refused("first part is the model's input", "dict"):
        PrivateLoader(records, sampling=sampling, batches=BatchOptions(augment=jitter))
    words = [(each, "word") for each in X]
    loader = private_loader(words, sampling=sampling, augment=jitter)
    assert len(next(iter(loader))[1]) == SIZE
    with refused("all parts of a batch must be tensors", "str"):
        next(iter(private_loader(words, sampling=sampling, augment=jitter, views=2)))


def test_a_private_loader_brings_its_own_augmentation():
    run = Run()
    loader = PrivateLoader(examples(100), sampling=PoissonSampling(dataset_size=100, rate=0.2))
    for options in ({"views": 2}, {"augment": jitter}):
        with refused("private already", "augment"):
            run.engine.make_private(
                module=run.model, optimizer=run.optimizer, data_loader=loader,
                criterion=run.criterion, noise_multiplier=1.0, options=privacy_options(**options),
            )  # fmt: skip


def test_the_usual_augmentations_pass():
    images = torch.rand(SIZE, 1, 4, 4)
    for augment in (RandomFlip(), RandomCrop(padding=1), Compose(RandomFlip(), RandomCrop(1))):
        loader = PrivateLoader(
            images,
            sampling=FullBatch(dataset_size=SIZE),
            batches=BatchOptions(augment=augment, views=8),
        )
        assert next(iter(loader)).shape == (8 * SIZE, 1, 4, 4)


# --- marks --------------------------------------------------------------------------------------


def test_who_is_in_a_batch_is_not_saved_with_it():
    run = Run(augment=jitter, views=2)
    x, y = run.batch()
    indices = run.loader.current.indices
    for part in (x, y):
        assert part._clipless_sample.indices is indices
        torch.save(part, buffer := io.BytesIO())
        buffer.seek(0)
        for revived in (torch.load(buffer), pickle.loads(pickle.dumps(part))):
            assert revived.equal(part)
            mark = getattr(revived, "_clipless_sample", None)
            assert not mark
    assert not pickle.loads(pickle.dumps(run.loader.current))


def test_a_tensor_that_was_used_is_not_saved_with_its_sample():
    run = Run()
    x, y = run.batch()
    moved = x.clone()
    run.backward(moved, y)
    assert moved._clipless_used[0] is run.loader.current
    torch.save(moved, buffer := io.BytesIO())
    buffer.seek(0)
    mark, _ = torch.load(buffer)._clipless_used
    assert not mark


def test_a_copy_in_memory_still_says_which_batch_it_is():
    run = Run()
    x, y = run.batch()
    old = copy.deepcopy((x, y))
    assert old[0]._clipless_sample is run.loader.current
    run.backward(x, y)
    run.optimizer.step()
    run.batch()
    with refused("an old"):
        run.backward(*old)
    with counting_skipped_steps():
        run.step()


def test_worker_processes_hand_over_batches_that_are_augmented_here():
    plain = loader_of("data set", augment=nudge, views=2)
    working = loader_of("data set", augment=nudge, views=2, num_workers=1)
    assert equal(views_of(plain, 5), views_of(working, 5))


def test_a_data_loader_with_a_batch_getter():
    class Together(Squares):
        def __getitems__(self, indices):
            return [self[index] for index in indices]

    loader = PrivateLoader(
        DataLoader(Together(), batch_size=10),
        insecure_seed=1,
        batches=BatchOptions(augment=nudge, views=2),
    )
    assert all(len(x) == 2 * loader.current.size for x, _ in loader)


def test_errors_leave_nothing_behind():
    """A run whose augmentation was refused can be made with another one."""
    run = Run()
    with pytest.raises(PrivacyError, match="touch each other"):
        Run(run.model, optimizer=run.optimizer, augment=MIXING["mixup"])
    run.steps(1)
