"""Which batches epochs have, of data sets with an index and of streams."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from clipless.errors import PrivacyError
from clipless.privacy import BatchOptions, FixedOrder, PrivateLoader, epochs_of
from clipless.privacy.sampling._order import batch_in_order

ROWS = torch.arange(11.0)[:, None]
ORDER = FixedOrder(dataset_size=11, batch_size=4)


class Squares(Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, index):
        return ROWS[index], index


class Stream(IterableDataset):
    """A stream of so many rows; of a shorter one in every second pass, if `fades`."""

    def __init__(self, size=11, fades=0):
        self.size, self.fades, self.passes = size, fades, 0

    def __iter__(self):
        self.passes += 1
        left = self.size - self.fades * (self.passes % 2 == 0)
        return ((ROWS[n % 11], n) for n in range(left))


def handed_out(loader, epochs=2):
    found = []
    for _ in range(epochs):
        for x, _ in loader:
            found.append([int(value) for value in x.flatten()])
            assert loader.current.indices.tolist() == found[-1]
    return found


def test_the_order_is_that_of_the_data_the_same_in_every_pass():
    one = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    y = torch.arange(11)
    ways = [
        PrivateLoader((ROWS, y), sampling=ORDER),
        PrivateLoader(DataLoader(TensorDataset(ROWS, y), batch_size=4), sampling=ORDER),
        PrivateLoader(DataLoader(Squares(), batch_size=4), sampling=ORDER),
        PrivateLoader(DataLoader(Squares(), batch_size=4, num_workers=2), sampling=ORDER),
        PrivateLoader(DataLoader(Stream(), batch_size=4), sampling=ORDER),
        PrivateLoader(Stream(), sampling=ORDER),
        PrivateLoader(
            type("Batches", (), {"__iter__": lambda self: iter(
                [(ROWS[n:n + 4], y[n:n + 4]) for n in (0, 4, 8)])})(),
            sampling=ORDER,
        ),
    ]  # fmt: skip
    for loader in ways:
        assert handed_out(loader) == one + one
        assert len(loader) == 3
        assert loader.sampling.expected_batch_size == 4


def test_shuffled_once_by_a_public_number():
    order = FixedOrder(dataset_size=11, batch_size=4, shuffle_seed=3)
    loader = PrivateLoader((ROWS, torch.arange(11)), sampling=order)
    found = handed_out(loader)
    assert found[:3] == found[3:] == [batch_in_order(order, step).tolist() for step in range(3)]
    together = [each for batch in found[:3] for each in batch]
    assert sorted(together) == list(range(11)) != together
    other = FixedOrder(dataset_size=11, batch_size=4, shuffle_seed=4)
    assert batch_in_order(other, 0).tolist() != found[0]


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_left_over_may_be_dropped(stream):
    order = FixedOrder(dataset_size=11, batch_size=4, drop_last=True)
    data = Stream() if stream else Squares()
    for drop_last in (True, False):
        loader = PrivateLoader(DataLoader(data, batch_size=4, drop_last=drop_last), sampling=order)
        assert handed_out(loader) == 2 * [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("stream", [False, True])
def test_micro_batches_and_parts_of_processes_are_the_whole_batch(stream):
    def loader(**options):
        data = Stream() if stream else (ROWS, torch.arange(11))
        return PrivateLoader(data, sampling=ORDER, **options)

    small = loader(batches=BatchOptions(micro_batch_size=3))
    assert handed_out(small, epochs=1) == [[0, 1, 2], [3], [4, 5, 6], [7], [8, 9, 10]]
    parts = [loader(rank=rank, world_size=2, insecure_seed=0) for rank in (0, 1)]
    assert handed_out(parts[0], 1) == [[0, 2], [4, 6], [8, 10]]
    assert handed_out(parts[1], 1) == [[1, 3], [5, 7], [9]]


def test_a_stream_goes_on_where_an_iteration_stopped_and_where_a_run_is_resumed():
    loader = PrivateLoader(Stream(), sampling=ORDER)
    next(iter(loader))
    assert [int(v) for v in next(iter(loader))[0].flatten()] == [4, 5, 6, 7]
    other = PrivateLoader(Stream(), sampling=ORDER)
    other.first_batch()
    other.load_state_dict(loader.state_dict())
    assert [int(v) for v in next(iter(other))[0].flatten()] == [8, 9, 10]


@pytest.mark.parametrize(
    ("stream", "match"),
    [
        (Stream(12), "goes on|rows"),
        (Stream(15), "goes on|rows"),
        (Stream(16), "goes on|rows"),
        (Stream(8), "ended after 2"),
        (Stream(10), "rows, and not the 3"),
        (Stream(11, fades=1), "rows, and not the 3"),
        (Stream(11, fades=4), "rows, and not the 4"),
        (DataLoader(Stream(), batch_size=3), "rows, and not the 4"),
        (DataLoader(Stream(), batch_size=4, num_workers=2), "goes on|rows"),
        ([(ROWS[:4], ROWS[:3])].__iter__(), "rows"),
    ],
)
def test_streams_of_another_length_are_refused(stream, match):
    loader = PrivateLoader(stream, sampling=ORDER)
    with pytest.raises(PrivacyError, match=match):
        [each for _ in range(2) for each in loader]


def test_a_stream_that_can_be_read_once_has_one_pass():
    batches = iter([(ROWS[n : n + 4], ROWS[n : n + 4]) for n in (0, 4, 8)])
    loader = PrivateLoader(batches, sampling=ORDER)
    assert len(loader.first_batch()[0]) == 4
    assert handed_out(loader, 1) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    with pytest.raises(PrivacyError, match="read once only"):
        handed_out(loader, 1)


def test_streams_without_their_length_with_padding_or_to_be_shuffled():
    with pytest.raises(PrivacyError, match="FixedOrder\\(dataset_size="):
        epochs_of(DataLoader(Stream(), batch_size=4))
    with pytest.raises(PrivacyError, match="not padded"):
        PrivateLoader(Stream(), sampling=ORDER, batches=BatchOptions(pad=True))
    shuffled = FixedOrder(dataset_size=11, batch_size=4, shuffle_seed=0)
    with pytest.raises(PrivacyError, match="leave shuffle_seed out"):
        PrivateLoader(Stream(), sampling=shuffled)
