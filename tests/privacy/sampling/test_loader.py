"""What the loader hands out is the sample, all of it, once, and `current` says which."""

import copy
import itertools
import warnings
from collections import Counter, namedtuple
from operator import eq

import numpy as np
import pytest
import torch
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
    default_collate,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from clipless.accounting import FixedSizeSampling, FullBatch, PoissonSampling
from clipless.common import fresh_bits
from clipless.errors import PrivacyError
from clipless.privacy import BatchOptions, IndexSampler, PrivateLoader
from clipless.privacy.sampling._batches import row_weights
from clipless.privacy.sampling._collate import without_examples
from tests.privacy.runs import private_loader

Pair = namedtuple("Pair", ["left", "right"])


class Numbered(Dataset):
    """Example i is i, as a float, with its square."""

    def __init__(self, size=60):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if not 0 <= index < self.size:
            raise IndexError(index)
        return torch.full((2, 3), float(index)), index * index


class Listed(Numbered):
    """Reads a list of examples at once."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Nested(Numbered):
    def __getitem__(self, index):
        return {
            "image": torch.full((2, 3), float(index)),
            "meta": {"name": f"row {index}", "index": index, "pair": Pair(float(index), index)},
            "array": np.full(2, index, dtype=np.int16),
        }


class Lookups(Numbered):
    def __init__(self, size=60):
        super().__init__(size)
        self.lookups = Counter()

    def __getitem__(self, index):
        self.lookups[index] += 1
        return super().__getitem__(index)


def poisson(size=60, rate=0.2, limit=None):
    return PoissonSampling(dataset_size=size, rate=rate, max_batch_size=limit)


def columns(size=60):
    index = torch.arange(size)
    return index.float()[:, None].expand(size, 3).contiguous(), index * index


def fast(size=60, **options):
    options = {"sampling": poisson(size), "insecure_seed": 0, **options}
    return private_loader(columns(size), **options)


def expected_schedule(loader, steps):
    """The samples that the loader's own state announces."""
    sampler = IndexSampler(sampling=loader.sampling)
    sampler.load_state_dict(loader.state_dict())
    return [indices.tolist() for indices in sampler.take(steps=steps)]


def held(x):
    """The indices that a batch of `Numbered` or `columns` holds."""
    return x.flatten(1)[:, 0].long().tolist()


def check_epoch(loader, batches):
    """Every handed-out batch holds what `current` says, and steps are those announced."""
    first = loader.next_step
    announced = expected_schedule(loader, loader.steps_per_epoch)
    steps = {}
    for x, y in batches:
        current = loader.current
        size = len(current.indices)
        assert x.shape[0] == y.shape[0] == current.rows
        assert held(x)[:size] == current.indices.tolist()
        assert y[:size].tolist() == [index**2 for index in current.indices.tolist()]
        steps.setdefault(current.step, []).append(current)
    assert list(steps) == list(range(first, first + loader.steps_per_epoch))
    for parts, sample in zip(steps.values(), announced, strict=True):
        assert list(itertools.chain(*(part.indices.tolist() for part in parts))) == sample
        assert {part.size for part in parts} == {len(sample)}
        assert [part.micro_batch for part in parts] == list(range(parts[0].micro_batches))
        assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
    return steps


# --- tensors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        poisson(),
        poisson(rate=0.02),
        poisson(limit=9),
        FixedSizeSampling(dataset_size=60, batch_size=13),
        FullBatch(dataset_size=60),
    ],
)
@pytest.mark.parametrize("micro_batch_size", [None, 1, 5, 100])
@pytest.mark.parametrize("pad", [False, True])
def test_batches_are_the_announced_samples(sampling, micro_batch_size, pad):
    loader = fast(sampling=sampling, micro_batch_size=micro_batch_size, pad=pad, steps_per_epoch=30)
    steps = check_epoch(loader, loader)
    parts = list(itertools.chain(*steps.values()))
    if micro_batch_size is not None:
        assert max(part.rows for part in parts) <= micro_batch_size
    if pad:
        assert loader.rows == loader.padding.sizes[-1]
        for part in parts:  # none that is larger than it needs to be
            assert part.rows == min(n for n in loader.padding.sizes if n >= len(part.indices))
        assert len(parts) == len(loader)
        for part in parts:
            assert part.weights.dtype == torch.float32
            assert part.weights.shape == (part.rows,)
            size = len(part.indices)
            assert part.weights[:size].eq(1).all()
            assert part.weights[size:].eq(0).all()
    else:
        assert loader.rows is None
        assert all(part.weights is None and part.rows == len(part.indices) for part in parts)
    if not pad and micro_batch_size is None:
        assert len(loader) == len(parts) == 30


def test_shapes_of_tensor_data():
    x, y = columns()
    for batch in fast():
        assert type(batch) is tuple
    for batch in PrivateLoader(TensorDataset(x, y), sampling=poisson()):
        assert type(batch) is list  # as a DataLoader gives it
    for batch in PrivateLoader(x, sampling=poisson()):
        assert type(batch) is torch.Tensor
        assert batch.shape[1:] == (3,)


def test_tensor_data_set_is_gathered_and_its_subclass_is_not():
    class Doubled(TensorDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return 2 * x, y

    x, y = columns()
    loader = PrivateLoader(TensorDataset(x, y), sampling=poisson(), insecure_seed=0)
    doubled = PrivateLoader(Doubled(x, y), sampling=poisson(), insecure_seed=0)
    for (a, _), (b, _) in zip(loader, doubled, strict=True):
        assert torch.equal(2 * a, b)


def test_gathered_equals_read_one_by_one():
    x, y = columns()
    gathered = PrivateLoader(TensorDataset(x, y), sampling=poisson(rate=0.05), insecure_seed=3)
    read = PrivateLoader(
        DataLoader(TensorDataset(x, y), collate_fn=lambda b: _stack(b)),
        sampling=poisson(rate=0.05),
        insecure_seed=3,
    )
    for a, b in zip(gathered, read, strict=True):
        assert type(a) is type(b)
        for p, q in zip(a, b, strict=True):
            assert p.dtype == q.dtype
            assert torch.equal(p, q)


def _stack(examples):
    return default_collate(examples)


def test_batches_are_copies():
    x, y = columns()
    before = x.clone()
    for batch, _ in PrivateLoader((x, y), sampling=FullBatch(dataset_size=60), steps_per_epoch=2):
        batch.zero_()
    assert torch.equal(x, before)


def test_tensors_of_different_length_are_refused():
    with pytest.raises(PrivacyError, match="different numbers of examples: 60, 59"):
        PrivateLoader((torch.zeros(60, 2), torch.zeros(59)), sampling=poisson())
    with pytest.raises(PrivacyError, match="first axis"):
        PrivateLoader((torch.tensor(1.0),), sampling=poisson(1))


# --- empty samples and nested structures --------------------------------------------------------


def empties(loader, steps=200):
    return [batch for batch in itertools.islice(loader, steps) if loader.current.size == 0]


@pytest.mark.parametrize("kind", [Numbered, Listed])
def test_empty_batches_of_a_data_set(kind):
    loader = PrivateLoader(
        kind(), sampling=poisson(rate=0.02), insecure_seed=0, steps_per_epoch=200
    )
    found = empties(loader)
    assert len(found) > 20
    for x, y in found:
        assert x.shape == (0, 2, 3)
        assert x.dtype == torch.float32
        assert y.shape == (0,)
        assert y.dtype == torch.int64


def test_empty_batches_of_tensors():
    for x, y in empties(fast(sampling=poisson(rate=0.02), steps_per_epoch=200)):
        assert x.shape == (0, 3)
        assert y.shape == (0,)
        assert y.dtype == torch.int64


def test_empty_batches_keep_nested_structure():
    loader = PrivateLoader(
        Nested(), sampling=poisson(rate=0.02), insecure_seed=0, steps_per_epoch=200
    )
    full = next(batch for batch in loader if loader.current.size > 1)
    batch = empties(loader)[0]
    assert batch.keys() == full.keys()
    assert batch["image"].shape == (0, 2, 3)
    assert batch["array"].shape == (0, 2)
    assert batch["array"].dtype == full["array"].dtype == torch.int16
    meta = batch["meta"]
    assert meta["name"] == []
    assert meta["index"].shape == (0,)
    assert type(meta["pair"]) is Pair
    assert meta["pair"].left.dtype == full["meta"]["pair"].left.dtype == torch.float64


def test_empty_batches_of_a_users_collate_function():
    def collate(examples):
        x = torch.stack([example[0] for example in examples], dim=1)  # batch axis second
        ragged = torch.cat([torch.ones(3) for _ in examples])
        offsets = torch.arange(len(examples) + 1) * 3
        return {"x": x, "rows": (ragged, offsets), "count": len(examples), "kind": "train"}

    loader = PrivateLoader(
        DataLoader(Numbered(), collate_fn=collate),
        sampling=poisson(rate=0.02),
        steps_per_epoch=200,
        insecure_seed=0,
    )
    batch = empties(loader)[0]
    assert batch["x"].shape == (2, 0, 3)
    assert batch["rows"][0].shape == (0,)
    assert batch["rows"][1].tolist() == [0]
    assert batch["count"] == 0
    assert batch["kind"] == "train"


def test_structures_without_an_empty_form_are_refused():
    class Opaque:
        pass

    with pytest.raises(PrivacyError, match="from a Opaque that collate_fn returned"):
        without_examples(one=[Opaque()], two=[Opaque()])
    with pytest.raises(PrivacyError, match="batch of zero examples"):
        without_examples(one=torch.zeros(1), two=torch.zeros(4))
    with pytest.raises(PrivacyError, match="batch of zero examples"):
        without_examples(one=torch.zeros(1), two=torch.zeros(2, 1))
    with pytest.raises(PrivacyError, match="batch of zero examples"):
        without_examples(one=torch.zeros(1), two=[0.0])


# --- padding ------------------------------------------------------------------------------------


def test_padding_is_announced_to_the_accountant():
    loader = PrivateLoader(
        columns(5000), sampling=poisson(5000, 0.02), batches=BatchOptions(pad=True)
    )
    assert loader.rows == loader.sampling.max_batch_size
    assert loader.rows % 8 == 0
    assert loader.sampling.rate == 0.02
    unpadded = PrivateLoader(columns(5000), sampling=poisson(5000, 0.02))
    assert unpadded.sampling == poisson(5000, 0.02)


def test_padding_is_nobodys_data_and_no_example_is_read_twice():
    data = Lookups()
    loader = PrivateLoader(
        data,
        sampling=poisson(limit=16),
        insecure_seed=0,
        steps_per_epoch=20,
        batches=BatchOptions(pad=True),
    )
    for x, y in loader:
        size = loader.current.size
        rows = 8 if size <= 8 else 16
        assert x.shape == (rows, 2, 3)
        assert y.shape == (rows,)
        assert not x[size:].any()
        assert not y[size:].any()
        assert sum(data.lookups.values()) == max(size, 1)
        data.lookups.clear()


def test_padding_of_tensors_holds_zeros():
    data = (torch.arange(1.0, 61.0), torch.ones(60, 3))
    loader = PrivateLoader(
        data,
        sampling=poisson(limit=16),
        insecure_seed=0,
        steps_per_epoch=5,
        batches=BatchOptions(pad=True),
    )
    for x, y in loader:
        size = loader.current.size
        assert x[:size].all()
        assert not x[size:].any()
        assert not y[size:].any()
    assert data[0].all()  # the data themselves are untouched


@pytest.mark.parametrize("data", [Numbered(), columns(), TensorDataset(*columns())])
def test_empty_samples_are_all_padding(data):
    loader = PrivateLoader(
        data,
        sampling=poisson(rate=0.01, limit=8),
        insecure_seed=0,
        steps_per_epoch=100,
        batches=BatchOptions(pad=True),
    )
    seen = 0
    for x, _ in loader:
        assert x.shape[0] == 8
        if loader.current.size == 0:
            seen += 1
            assert loader.current.weights.sum() == 0
            assert loader.current.indices.shape == (0,)
            assert x.isfinite().all()
    assert seen > 20


def test_padded_samples_are_cut_where_the_sampling_says():
    loader = fast(sampling=poisson(rate=0.5, limit=20), pad=True, steps_per_epoch=50)
    sizes = [loader.current.size for _ in loader]
    assert max(sizes) == 20
    assert sizes.count(20) > 40


def test_padded_micro_batches_spread_the_rows():
    loader = fast(sampling=poisson(rate=0.5, limit=33), pad=True, micro_batch_size=32)
    assert loader.rows == 17  # two batches of 17, not of 32
    assert len(loader) == 2 * loader.steps_per_epoch


# --- epochs, steps and state --------------------------------------------------------------------


def test_an_epoch_has_the_steps_of_one_pass():
    assert len(fast()) == fast().steps_per_epoch == 5
    assert len(fast(steps_per_epoch=7)) == len(list(fast(steps_per_epoch=7))) == 7
    assert len(fast(sampling=FixedSizeSampling(dataset_size=60, batch_size=20))) == 3
    assert len(fast(sampling=FullBatch(dataset_size=60))) == 1


def test_length_is_not_guessed_when_it_depends_on_the_draw():
    loader = fast(micro_batch_size=4)
    with pytest.raises(TypeError, match="steps_per_epoch"):
        len(loader)
    assert len({loader.current.step for _ in loader}) == 5
    fixed = fast(sampling=FixedSizeSampling(dataset_size=60, batch_size=20), micro_batch_size=8)
    assert len(fixed) == len(list(fixed)) == 9


@pytest.mark.parametrize("data", [columns(), Numbered()])
def test_every_epoch_is_fresh(data):
    loader = PrivateLoader(data, sampling=poisson(), insecure_seed=0)
    samples, steps = [], []
    for _ in range(4):
        for _batch in loader:
            samples.append(tuple(loader.current.indices.tolist()))
            steps.append(loader.current.step)
    assert steps == list(range(20))
    assert len(set(samples)) == 20


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4},
    ],
)
def test_an_abandoned_iteration_is_not_replayed(options):
    loader = private_loader(
        Numbered(), sampling=poisson(), insecure_seed=0, steps_per_epoch=10, **options
    )
    announced = expected_schedule(loader, 20)
    handed_out = []
    for take in (3, 1, 10):
        for x, _ in itertools.islice(loader, take):
            assert held(x) == loader.current.indices.tolist()
            handed_out.append((loader.current.step, held(x)))
    assert handed_out == list(enumerate(announced))[:14]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_a_superseded_iteration_cannot_go_on(options):
    loader = private_loader(
        Numbered(), sampling=poisson(), insecure_seed=0, steps_per_epoch=10, **options
    )
    old = iter(loader)
    next(old)
    new = iter(loader)
    with pytest.raises(PrivacyError, match="one iteration at a time"):
        next(old)
    next(new)
    assert loader.current.step == 1
    assert [loader.current.step for _ in new] == list(range(2, 11))


def test_an_abandoned_micro_batch_gives_up_its_step():
    loader = fast(micro_batch_size=2)
    for _ in loader:
        assert loader.current.micro_batches > 2
        break
    for _ in loader:
        assert loader.current.step == 1
        assert loader.current.micro_batch == 0
        break


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "prefetch_factor": 3}])
def test_state_continues_after_the_batch_in_hand(options):
    def build():
        return private_loader(Numbered(), sampling=poisson(), steps_per_epoch=8, **options)

    loader, resumed = build(), build()
    iteration = iter(loader)
    for _ in range(3):
        next(iteration)
    state = loader.state_dict()  # while workers are steps ahead
    expected = [(loader.current.step, held(x)) for x, _ in iteration]
    resumed.load_state_dict(state)
    assert resumed.current is None
    actual = [(resumed.current.step, held(x)) for x, _ in resumed]
    assert actual[:5] == expected
    assert expected[0][0] == 3
    assert len(actual) == 8


def test_going_back_over_handed_out_steps_is_refused():
    loader = fast()
    state = loader.state_dict()
    next(iter(loader))
    with pytest.raises(PrivacyError, match="goes back to step 0, but step 0 was handed out"):
        loader.load_state_dict(state)
    loader.load_state_dict(loader.state_dict())


def test_a_session_draws_samples_of_its_own():
    """Whatever state a loader has loaded, and whatever it is a copy of."""
    one = fast(sampling=poisson(rate=0.5), insecure_seed=None)
    next(iter(one))
    twins = [copy.deepcopy(one), fast(sampling=poisson(rate=0.5), insecure_seed=None)]
    twins[1].load_state_dict(one.state_dict())
    sessions = [Session() for _ in range(3)]
    for each, session in zip([one, *twins], sessions, strict=True):
        each.begin(session, key=fresh_bits(128), repeated=None, until=0)
        assert each.current is None
        next(iter(each))
        assert each.current.step == 1
    drawn = [each.current.indices.tolist() for each in (one, *twins)]
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]


def test_only_the_known_steps_of_a_state_are_repeated():
    one = fast(sampling=poisson(rate=0.5), insecure_seed=None)
    next(iter(one))
    state = one.state_dict()
    expected = [one.current.indices.tolist() for _ in one]
    other, session = fast(sampling=poisson(rate=0.5), insecure_seed=None), Session()
    other.begin(session, key=fresh_bits(128), repeated=state, until=4)
    found = [other.current.indices.tolist() for _ in other]
    assert found[:3] == expected[:3]
    assert not any(map(eq, found[3:], expected[3:]))


def test_samples_that_were_read_ahead_are_dropped_with_the_rest():
    one = PrivateLoader(Numbered(), sampling=poisson(rate=0.5))
    state = one.state_dict()
    expected = [one.current.indices.tolist() for _ in one]
    other, session = (
        PrivateLoader(DataLoader(Numbered(), num_workers=1), sampling=poisson(rate=0.5)),
        Session(),
    )
    other.begin(session, key=fresh_bits(128), repeated=state, until=100)
    found = []
    for _ in other:
        found.append(other.current.indices.tolist())
        if len(found) == 1:
            other.repeat_no_more()
    assert found[0] == expected[0]
    assert len(found) == len(expected)
    assert not any(map(eq, found[1:], expected[1:]))


def test_a_loader_belongs_to_one_session():
    loader, session, other = fast(), Session(), Session()
    loader.begin(session, key=0, repeated=None, until=0)
    with pytest.raises(PrivacyError, match="belongs to another private training session"):
        loader.begin(other, key=0, repeated=None, until=0)
    with pytest.raises(PrivacyError, match="belongs to another private training session"):
        loader.load_state_dict(loader.state_dict())
    loader.end("of a test")
    with pytest.raises(PrivacyError, match="is over: of a test"):
        next(iter(loader))
    loader.let_go(other)
    with pytest.raises(PrivacyError, match="belongs to another private training session"):
        loader.begin(other, key=0, repeated=None, until=0)
    loader.let_go(session)
    loader.begin(other, key=0, repeated=None, until=0)
    next(iter(loader))


class Session:
    """Stands for whom a loader belongs to."""


def test_seeds():
    def draw(**options):
        loader = PrivateLoader(columns(), sampling=poisson(rate=0.5), **options)
        return loader.insecure, [held(x) for x, _ in loader]

    torch.manual_seed(0)
    first = draw()
    torch.manual_seed(0)
    assert first != draw()
    assert first[0] is False
    assert draw(insecure_seed=5) == draw(insecure_seed=5)
    assert draw(insecure_seed=5)[0] is True
    assert draw(insecure_seed=5) != draw(insecure_seed=6)


# --- workers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch_size", [None, 5])
@pytest.mark.parametrize("pad", [False, True])
def test_current_is_the_batch_in_hand_with_workers(micro_batch_size, pad):
    loader = PrivateLoader(
        DataLoader(Numbered(), num_workers=2, prefetch_factor=3, persistent_workers=True),
        sampling=poisson(rate=0.1),
        steps_per_epoch=12,
        batches=BatchOptions(micro_batch_size=micro_batch_size, pad=pad),
    )
    for _ in range(2):
        check_epoch(loader, loader)


def test_workers_do_not_change_the_samples():
    def draw(**options):
        loader = private_loader(
            Numbered(), sampling=poisson(rate=0.03), insecure_seed=1, steps_per_epoch=20, **options
        )
        return [held(x) for x, _ in loader]

    torch.manual_seed(0)
    alone = draw()
    assert [] in alone
    torch.manual_seed(1)
    assert draw(num_workers=2) == alone
    generator = torch.Generator().manual_seed(9)
    assert draw(num_workers=1, generator=generator, multiprocessing_context="fork") == alone


def test_pinned_memory_is_skipped_without_a_device():
    for data in (Numbered(), columns()):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loader = PrivateLoader(
                DataLoader(data, pin_memory=True), sampling=poisson(), insecure_seed=0
            )
            for x, _ in loader:
                assert x.is_pinned() == torch.cuda.is_available()


class Broken(Numbered):
    def __getitems__(self, indices):
        return {"x": torch.zeros(len(indices), 3)}


def test_batches_that_the_data_set_makes_itself_cannot_be_padded():
    batch = next(
        iter(private_loader(Broken(), collate_fn=lambda b: b, sampling=poisson(), insecure_seed=0))
    )
    assert batch["x"].shape[1:] == (3,)
    loader = PrivateLoader(
        DataLoader(Broken(), collate_fn=lambda b: b),
        sampling=poisson(),
        batches=BatchOptions(pad=True),
    )
    with pytest.raises(PrivacyError, match="__getitems__ returned a dict"):
        next(iter(loader))


# --- several processes --------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("micro_batch_size", [None, 3])
@pytest.mark.parametrize("rate", [0.02, 0.3])
def test_ranks_share_one_sample(pad, micro_batch_size, rate):
    world_size = 3
    options = {
        "sampling": poisson(rate=rate),
        "pad": pad,
        "micro_batch_size": micro_batch_size,
        "steps_per_epoch": 20,
    }
    whole = fast(**options)
    announced = expected_schedule(whole, 20)
    assert any(len(sample) < world_size for sample in announced) == (rate < 0.1)
    samples, counts = [[] for _ in announced], []
    for rank in range(world_size):
        loader = fast(**options, rank=rank, world_size=world_size)
        assert loader.sampling == whole.sampling
        counts.append([])
        for _ in loader:
            samples[loader.current.step] += loader.current.indices.tolist()
            counts[-1].append(loader.current.step)
    assert [sorted(sample) for sample in samples] == announced
    # The same number of batches everywhere: nobody waits for a backward pass that never comes.
    assert counts[0] == counts[1] == counts[2]


def test_ranks_must_share_their_randomness():
    options = {"sampling": poisson(), "world_size": 2, "insecure_seed": None}
    first, second = fast(**options, rank=0), fast(**options, rank=1)
    with pytest.raises(PrivacyError, match="a sample of its own"):
        next(iter(first))
    state = first.state_dict()
    first.load_state_dict(state)
    second.load_state_dict(state)
    next(iter(first))
    next(iter(second))
    assert not set(first.current.indices.tolist()) & set(second.current.indices.tolist())
    with pytest.raises(PrivacyError, match="rank=2"):
        fast(rank=2, world_size=2)


# --- wrapping a DataLoader ----------------------------------------------------------------------


def note_worker(worker_id):
    get_worker_info().dataset.size += 0  # the user's own data set, not a wrapper of it
    torch.set_num_threads(1)


def test_wrapping_keeps_how_data_is_read():
    calls = []

    def collate(examples):
        calls.append(len(examples))
        return default_collate(examples)

    data = Numbered()
    wrapped = DataLoader(data, batch_size=12, shuffle=True, drop_last=True, collate_fn=collate)
    loader = PrivateLoader(wrapped, insecure_seed=0)
    assert loader.dataset is data
    assert loader.sampling == poisson(rate=0.2)
    assert loader.steps_per_epoch == 5
    check_epoch(loader, loader)
    assert len(calls) == 5
    assert len(set(calls)) > 1


def test_wrapping_keeps_worker_options():
    wrapped = DataLoader(
        Numbered(),
        batch_size=12,
        num_workers=2,
        worker_init_fn=note_worker,
        persistent_workers=True,
        prefetch_factor=5,
        timeout=30,
        multiprocessing_context="fork",
        generator=torch.Generator(),
    )
    loader = PrivateLoader(wrapped, steps_per_epoch=4)
    inner = loader._source._loader
    for name in (
        "dataset",
        "num_workers",
        "worker_init_fn",
        "persistent_workers",
        "prefetch_factor",
        "timeout",
        "multiprocessing_context",
        "generator",
    ):
        assert getattr(inner, name) == getattr(wrapped, name)
    check_epoch(loader, loader)


def test_wrapping_defaults():
    tensors = TensorDataset(*columns())
    assert PrivateLoader(DataLoader(tensors, batch_size=200)).sampling == FullBatch(dataset_size=60)
    given = FixedSizeSampling(dataset_size=60, batch_size=6)
    loader = PrivateLoader(DataLoader(tensors, batch_size=12), sampling=given)
    assert loader.sampling == given
    explicit = BatchSampler(RandomSampler(tensors), batch_size=6, drop_last=False)
    loader = PrivateLoader(DataLoader(tensors, batch_sampler=explicit))
    assert loader.sampling == poisson(rate=0.1)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(60))


class OwnBatchSampler(BatchSampler):
    pass


class OwnLoader(DataLoader):
    def __iter__(self):
        return map(tuple, super().__iter__())


NUMBERS = TensorDataset(torch.arange(60))


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: DataLoader(Stream(), batch_size=4), "is a stream"),
        (lambda: DataLoader(NUMBERS, batch_size=None), "batch_size=None"),
        (
            lambda: DataLoader(NUMBERS, sampler=WeightedRandomSampler([1.0] * 60, 60)),
            "its own WeightedRandomSampler",
        ),
        (
            lambda: DataLoader(NUMBERS, sampler=DistributedSampler(NUMBERS, 2, 0)),
            "its own DistributedSampler",
        ),
        (
            lambda: DataLoader(NUMBERS, sampler=SubsetRandomSampler(range(60))),
            "its own SubsetRandomSampler",
        ),
        (
            lambda: DataLoader(NUMBERS, sampler=RandomSampler(NUMBERS, replacement=True)),
            "its own RandomSampler",
        ),
        (
            lambda: DataLoader(NUMBERS, sampler=RandomSampler(NUMBERS, num_samples=30)),
            "its own RandomSampler",
        ),
        (
            lambda: DataLoader(NUMBERS, sampler=SequentialSampler(range(30))),
            "its own SequentialSampler",
        ),
        (
            lambda: DataLoader(
                NUMBERS, batch_sampler=OwnBatchSampler(RandomSampler(NUMBERS), 4, False)
            ),
            "its own OwnBatchSampler",
        ),
        (
            lambda: DataLoader(
                NUMBERS, batch_sampler=BatchSampler(SubsetRandomSampler([1, 2]), 1, False)
            ),
            "its own SubsetRandomSampler",
        ),
        (lambda: OwnLoader(NUMBERS), "OwnLoader iterates in a way of its own"),
        (lambda: [1, 2, 3], "expected a torch DataLoader, got list"),
    ],
)
def test_loaders_with_another_distribution_are_refused(loader, message):
    with pytest.raises(PrivacyError, match=message):
        PrivateLoader(loader())


def test_other_misuse_is_refused():
    with pytest.raises(PrivacyError, match="Stream is a stream"):
        PrivateLoader(Stream(), sampling=poisson())
    with pytest.raises(PrivacyError, match="is a stream"):
        PrivateLoader(iter([1, 2]), sampling=poisson())
    with pytest.raises(PrivacyError, match="has 60 examples but the sampling describes 61"):
        fast(sampling=poisson(61))
    with pytest.raises(PrivacyError, match="steps_per_epoch=0"):
        fast(steps_per_epoch=0)
    with pytest.raises(PrivacyError, match="micro_batch_size=0"):
        fast(micro_batch_size=0)
    with pytest.raises(TypeError):
        PrivateLoader(columns(), poisson())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_changed_is_refused(workers):
    data = Numbered()
    loader = PrivateLoader(DataLoader(data, num_workers=workers), sampling=poisson())
    iteration = iter(loader)
    next(iteration)
    data.size = 61
    with pytest.raises(PrivacyError, match="has 61 examples but the sampling describes 60"):
        list(iteration)
    with pytest.raises(PrivacyError, match="has 61 examples"):
        next(iter(loader))


def test_weights_of_rows_are_float32_whatever_the_default():
    torch.set_default_dtype(torch.float64)
    try:
        weights = row_weights(rows=37, real=20, device=torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert weights.dtype == torch.float32
    assert weights.tolist() == [1.0] * 20 + [0.0] * 17
