"""Padded batches: their sizes, which of them a batch has, and how many rows are empty."""

import numpy as np
import pytest
import torch
from scipy import stats

from clipless.accounting import FixedSizeSampling, FullBatch, PoissonSampling
from clipless.errors import PrivacyError
from clipless.privacy import BatchOptions, PrivateLoader, Users, padded_sampling
from clipless.privacy.sampling._padding import Padding, padding_of, smallest_holding


def poisson(expected, size=50_000):
    return padded_sampling(PoissonSampling(dataset_size=size, rate=expected / size))


def rows_by_hand(padding, size, processes):
    """The rows of all batches of a step whose sample has a certain size."""
    total = 0
    for rank in range(processes):
        part = len(range(rank, size, processes))
        at_once = min(n for n in padding.sizes if n * padding.batches >= part)
        for number in range(padding.batches):
            held = min(max(part - number * at_once, 0), at_once)
            total += min(n for n in padding.sizes if n >= held)
    return total


@pytest.mark.parametrize(
    ("expected", "most", "sizes"), [(512, 0.06, 3), (2048, 0.04, 3), (8192, 0.03, 2)]
)
def test_few_rows_are_empty(expected, most, sizes):
    padding = padding_of(poisson(expected))
    assert padding.empty_share <= most
    assert len(padding.sizes) == sizes  # one that saves less than 1% is not worth compiling


@pytest.mark.parametrize("sizes", [None, 1, 2, 5])
@pytest.mark.parametrize(("processes", "batches"), [(1, 1), (3, 1), (1, 4), (2, 3), (7, 5)])
def test_the_empty_share_is_exact(sizes, processes, batches):
    sampling = poisson(40, 300)
    padding = padding_of(sampling, sizes=sizes, processes=processes, batches=batches)
    law, limit = stats.binom(300, 40 / 300), sampling.max_batch_size
    counts = np.arange(limit + 1)
    probabilities = law.pmf(counts)
    probabilities[limit] += law.sf(limit)
    rows = [rows_by_hand(padding, int(n), processes) for n in counts]
    assert padding.empty_share == pytest.approx(
        1 - probabilities @ counts / (probabilities @ rows), abs=1e-12
    )


@pytest.mark.parametrize("expected", [12, 100, 512])
def test_no_other_sizes_are_better(expected):
    """All pairs of a smaller size and the largest one are tried."""
    sampling = poisson(expected, 5_000)
    law, largest = stats.binom(5_000, expected / 5_000), sampling.max_batch_size

    def rows(small):
        return small * law.cdf(small) + largest * law.sf(small)

    best = min(map(rows, range(8, largest, 8)))
    assert rows(padding_of(sampling, sizes=2).sizes[0]) == pytest.approx(best)


def test_what_has_one_size_anyway():
    assert padding_of(FullBatch(dataset_size=70)).sizes == (70,)
    fixed = padding_of(FixedSizeSampling(dataset_size=70, batch_size=30), batches=4)
    assert fixed.sizes == (8,)
    assert fixed.empty_share == pytest.approx(2 / 32)
    tiny = padding_of(PoissonSampling(dataset_size=5, rate=0.5))
    assert tiny.sizes == (5,)
    assert padding_of(poisson(512), sizes=1).sizes == (656,)


def test_nothing_larger_than_the_largest():
    assert smallest_holding((8, 16), 9) == 16
    with pytest.raises(PrivacyError, match="17 examples do not fit into a batch padded to 16"):
        smallest_holding((8, 16), 17)


@pytest.mark.parametrize("sizes", [0, 9])
def test_impossible_numbers_of_sizes(sizes):
    with pytest.raises(PrivacyError, match="from 1 to 8"):
        PrivateLoader(
            torch.ones(9), sampling=poisson(4, 9), batches=BatchOptions(pad=True, sizes=sizes)
        )
    with pytest.raises(PrivacyError, match="leave sizes out"):
        PrivateLoader(
            torch.ones(9), sampling=poisson(4, 9), batches=BatchOptions(pad=False, sizes=2)
        )


class Rows(torch.utils.data.Dataset):
    """Examples that a `DataLoader` has to read."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.tensor([float(index + 1)])


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, None), (3, None), (2, 9)])
def test_ranks_and_micro_batches_share_the_sample(read, world_size, micro_batch_size):
    """Together they are the sample, all padding is empty, and the share of it is as foretold."""
    data = Rows() if read else torch.arange(1.0, 401.0)[:, None]
    options = BatchOptions(pad=True, micro_batch_size=micro_batch_size)
    loaders = [
        PrivateLoader(
            data, sampling=poisson(40, 400), batches=options, insecure_seed=3, rank=rank,
            world_size=world_size, steps_per_epoch=60,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    seen, rows, real = {}, 0, 0
    for loader in loaders:
        for x in loader:
            current = loader.current
            held = x.flatten()[: len(current.indices)] - 1
            assert held.tolist() == current.indices.tolist()
            assert not x[len(held) :].any()
            assert current.weights.sum() == len(held)
            assert len(x) == current.rows in loader.padding.sizes
            seen.setdefault(current.step, []).extend(held.tolist())
            rows, real = rows + len(x), real + len(held)
    assert all(len(set(each)) == len(each) for each in seen.values())
    assert len(seen) == 60
    padding = loaders[0].padding
    assert len(padding.sizes) > 1
    # 60 samples: the mean of their sizes is off by a deviation of 0.8.
    assert 1 - real / rows == pytest.approx(padding.empty_share, abs=0.04)


def test_users_have_room_for_the_records_they_bring():
    users = Users([number // 3 for number in range(300)], records=4)  # three records each
    loader = PrivateLoader(
        torch.arange(300.0), sampling=poisson(20, 100), unit=users, insecure_seed=1,
        batches=BatchOptions(pad=True, micro_batch_size=9), steps_per_epoch=20,
    )  # fmt: skip
    rooms = users.rooms(loader.padding)
    counts = set()
    for x in loader:
        current = loader.current
        assert len(current.indices) == 3 * len(set(current.users.tolist()))
        assert len(x) == len(current.weights) == len(current.shares)
        assert len(x) == min(room for room in rooms if room >= len(current.indices))
        counts.add(len(x))
    assert len(counts) > 1
    assert loader.rows == max(rooms)


def test_sizes_and_their_caveat_are_in_the_notes():
    def notes(**batches):
        return PrivateLoader(
            torch.ones(1000), sampling=poisson(100, 1000), batches=BatchOptions(**batches)
        ).notes

    assert notes() == ()
    (several,) = notes(pad=True)
    assert "104, 120 or 168 examples" in several
    assert "9.0% of which are empty" in several
    assert "timing" in several
    (one,) = notes(pad=True, sizes=1)
    assert "timing" not in one


def test_describing_users():
    assert Padding(sizes=(4, 8)).describe(False) == "padded to 4 or 8 users"
