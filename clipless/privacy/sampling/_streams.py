"""Batches of ordinary epochs: which loaders may be read as they are, and reading them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from clipless.accounting import FixedOrder
from clipless.common import not_set_error
from clipless.errors import PrivacyError
from clipless.privacy.sampling._batches import StepSample
from clipless.privacy.sampling._order import places_of
from clipless.privacy.sampling._wrapping import check_wrappable


def is_stream(data: Any) -> bool:
    """Whether data can only be read from the beginning to the end, batch by batch."""
    if isinstance(data, DataLoader):
        return isinstance(data.dataset, IterableDataset)
    return isinstance(data, IterableDataset) or (
        isinstance(data, Iterable) and not hasattr(data, "__getitem__")
    )


def epochs_of(loader: DataLoader[Any]) -> FixedOrder:
    """Return the order in which a loader of a data set with a length reads it, or refuse it."""
    if isinstance(loader, DataLoader) and is_stream(loader):
        raise PrivacyError(
            "a stream does not say how many examples a pass has, which must be public: give "
            "sampling=FixedOrder(dataset_size=..., batch_size=...)"
        )
    batch_size = check_wrappable(loader)
    check_keeps_its_order(loader)
    size = len(loader.dataset)  # type: ignore[arg-type]
    return FixedOrder(
        dataset_size=size, batch_size=min(batch_size, size), drop_last=loader.drop_last
    )


def check_keeps_its_order(loader: DataLoader[Any]) -> None:
    """Refuse a loader that reads its data set in another order in every epoch."""
    batches = loader.batch_sampler
    sampler = batches.sampler if isinstance(batches, BatchSampler) else None
    if isinstance(sampler, RandomSampler):
        raise PrivacyError(
            "this loader shuffles anew in every epoch: an example may come twice within a few "
            "steps, which epochs in one order are not accounted for. Use shuffle=False, where "
            "the data are in an order that does not depend on them; or have them shuffled once, "
            "with sampling=FixedOrder(dataset_size=..., batch_size=..., shuffle_seed=0), of "
            "clipless.privacy, and shuffle=False"
        )
    if sampler is not None and type(sampler) is not SequentialSampler:
        raise PrivacyError(
            f"this loader chooses examples with its own {type(sampler).__name__}: that its order "
            "is the same in every epoch, and independent of the data, cannot be told. Use "
            "shuffle=False, or FixedOrder(..., shuffle_seed=0)"
        )


class StreamSource:
    """The batches that a loader or stream yields, step by step, in the order of its own.

    What is checked: every pass has as many batches as `sampling` says, each with as many rows. What
    is trusted: that a pass holds every example once, in the same order as all others.
    """

    device = torch.device("cpu")

    def __init__(self, stream: Any, sampling: FixedOrder) -> None:
        if isinstance(stream, IterableDataset):
            stream = DataLoader(stream, batch_size=sampling.batch_size)
        if sampling.shuffle_seed is not None:
            raise PrivacyError("a stream is read in its own order: leave shuffle_seed out")
        self._stream, self._sampling = stream, sampling
        self._reading: Iterator[Any] | None = None
        self._next = 0
        """Which batch of the pass comes next, the one that was looked at included."""
        self._peeked: list[Any] = []
        self._opened = False
        self._batch: Any = None
        self._step = -1

    def __len__(self) -> int:
        return self._sampling.dataset_size

    def batches(self, samples: Iterator[StepSample]) -> Iterator[tuple[StepSample, Any]]:
        """Yield every sample with the rows of its step's batch that belong to it."""
        for sample in samples:
            if sample.step != self._step:
                self._batch, self._step = self._read(sample.step), sample.step
            first, last = places_of(self._sampling, sample.step)
            whole = len(sample.indices) == last - first
            # Other tensors than the stream's own, which may hand out the same ones again.
            yield (
                sample,
                (
                    _mapped(self._batch, Tensor.detach)
                    if whole
                    else rows_of(self._batch, sample.indices - first)
                ),
            )

    def first(self) -> Any:
        """Return the first batch; it is read once."""
        if not self._peeked:
            self._open()
            self._peeked = [self._get()]
            self._next = 0
        return self._peeked[0]

    def _read(self, step: int) -> Any:
        number = step % self._sampling.steps_per_pass
        if self._reading is None or number < self._next:
            self._open()
        while self._next < number:  # a run that is resumed in the middle of a pass
            self._get()
        batch = self._get()
        first, last = places_of(self._sampling, step)
        check_rows(batch, last - first, step)
        if self._next == self._sampling.steps_per_pass:
            self._check_end()
        return batch

    def _open(self) -> None:
        opened = iter(self._stream)
        if opened is self._stream and self._opened:
            raise PrivacyError(
                "this stream can be read once only, and another pass is asked for: give an object "
                "that begins anew whenever it is iterated over, or train for one epoch"
            )
        self._reading, self._next, self._peeked, self._opened = opened, 0, [], True

    def _get(self) -> Any:
        if self._peeked:
            self._next += 1
            return self._peeked.pop()
        if self._reading is None:
            raise not_set_error("the stream")
        try:
            batch = next(self._reading)
        except StopIteration:
            raise self._other_length(f"ended after {self._next} batches") from None
        self._next += 1
        return batch

    def _check_end(self) -> None:
        """Refuse a stream that goes on after the last batch of a pass."""
        if self._reading is None:
            raise not_set_error("the stream")
        left = sum(1 for _ in islice(self._reading, 2))
        if left > self._sampling.drop_last:  # what is left over of the pass may be one batch
            raise self._other_length("goes on after that many batches")
        self._reading = None

    def _other_length(self, what: str) -> PrivacyError:
        order = self._sampling
        return PrivacyError(
            f"the stream {what}, but {order.dataset_size} examples in batches of "
            f"{order.batch_size} are {order.steps_per_pass} batches in every pass. Each example "
            "must come once a pass, every so many steps: give the true dataset_size, and a stream "
            "that is as long in every epoch"
        )


def check_rows(batch: Any, rows: int, step: int) -> None:
    """Refuse a batch that is not as large as the order says."""
    found = {len(each) for each in _tensors(batch)}
    if found != {rows}:
        raise PrivacyError(
            f"the batch of step {step} has {sorted(found) or 'no'} rows, and not the {rows} that "
            "FixedOrder(dataset_size, batch_size) has at this place. The sizes of batches must not "
            "depend on the data"
        )


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from (each for part in batch.values() for each in _tensors(part))
    elif isinstance(batch, list | tuple):
        yield from (each for part in batch for each in _tensors(part))


def rows_of(batch: Any, rows: Tensor) -> Any:
    """Return some rows of all tensors of a batch."""
    return _mapped(batch, lambda tensor: tensor.index_select(0, rows.to(tensor.device)))


def _mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: _mapped(part, change) for key, part in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [_mapped(part, change) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
