"""From the indices of a step to the batches that are handed out, and what is recorded of them."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from clipless.errors import PrivacyError
from clipless.privacy.sampling._collate import StepCollate
from clipless.privacy.sampling._padding import Padding
from clipless.privacy.sampling._wrapping import check_map_style


@dataclass(frozen=True, kw_only=True, eq=False)
class StepSample:
    """What is in one handed-out batch and how it belongs to its step.

    A step is handed out in `micro_batches` batches, counted from 0 by `micro_batch`; all carry the
    same `step`, a number that grows and is never used twice. Their `indices` are disjoint and
    together are this process's part of the step's sample, `size` examples (or users) in all.

    `indices`: int64 `[n]` on the CPU, the examples in this batch, in the order of its rows.
    `rows`: the rows of this batch, those of n examples and then any padding.
    `weights`: float32 `[rows]`, 1 for a view of an example and 0 for padding; None if the loader
    does not pad.
    `views`: how many rows an example has, one after the other.
    `users`: if users are sampled, whose each example is, by number; None if examples are.
    `shares`: then float32 `[rows]`, at most one over the number of examples of the row's user.
    `length`: of the sequences in this batch, if they are in buckets (`Buckets`).
    `origin`: stands for the loader that drew it, and no other one.

    Which examples a step used, and how many, is private: this is for the training loop's own
    checks and not for logs. Copies of a marked tensor keep it; what is saved or sent does not.
    """

    step: int
    indices: torch.Tensor
    rows: int
    weights: torch.Tensor | None
    micro_batch: int
    micro_batches: int
    size: int
    views: int = 1
    origin: object = None
    users: torch.Tensor | None = None
    shares: torch.Tensor | None = None
    length: int | None = None

    def __deepcopy__(self, memo: Any) -> StepSample:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (OrderedDict, ())  # which torch.load accepts

    @property
    def is_last(self) -> bool:
        """Whether this batch completes its step."""
        return self.micro_batch == self.micro_batches - 1


def tag(batch: Any, sample: StepSample) -> None:
    """Mark the tensors of a batch with the sample they hold, as far as tensors can be found."""
    if isinstance(batch, torch.Tensor):
        batch._clipless_sample = sample  # type: ignore[attr-defined]
    elif isinstance(batch, Mapping):
        for part in batch.values():
            tag(part, sample)
    elif isinstance(batch, list | tuple):
        for part in batch:
            tag(part, sample)


def sample_of(inputs: tuple[Any, ...]) -> StepSample | None:
    """Return the sample that a model's inputs were marked with, if the mark is still there.

    It is lost when a tensor is moved or transformed, which makes another tensor.
    """
    marks = [getattr(value, "_clipless_sample", None) for value in inputs]
    return next((mark for mark in marks if isinstance(mark, StepSample)), None)


def split_step(
    frame: StepSample, *, micro_batch_size: int | None, padding: Padding | None,
    device: torch.device,
) -> Iterator[StepSample]:  # fmt: skip
    """Cut the sample of one step, `frame`, into its micro-batches, the last of which may be empty.

    Examples are counted, not rows: the views of an example stay together. Padded micro-batches are
    as small as all of them together can be.
    """
    indices, views = frame.indices, frame.views
    if padding is not None:
        micro_batch_size = padding.per_batch(len(indices))
    for number in range(frame.micro_batches):
        part = indices
        if micro_batch_size is not None:
            part = indices[number * micro_batch_size : (number + 1) * micro_batch_size]
        rows, weights = views * len(part), None
        if padding is not None:
            rows = views * padding.fitting(len(part))
            weights = row_weights(rows=rows, real=views * len(part), device=device)
        yield replace(frame, indices=part, rows=rows, weights=weights, micro_batch=number)


def without_record(sample: StepSample, record: int | None, device: torch.device) -> StepSample:
    """Return the sample in which one record, if it is there, keeps its place and weighs nothing.

    Where users are sampled, it is the number of a user, all of whose records do.
    """
    units = sample.indices if sample.users is None else sample.users
    places = [] if record is None else torch.nonzero(units == record).flatten().tolist()
    if not places:
        return sample
    weights = torch.ones(sample.rows, device=device) if sample.weights is None else sample.weights
    weights = weights.clone()
    for place in places:
        weights[sample.views * place : sample.views * (place + 1)] = 0
    return replace(sample, weights=weights)


def row_weights(*, rows: int, real: int, device: torch.device) -> torch.Tensor:
    """Return the weights of a padded batch: 1 for the `real` rows, 0 for those after them."""
    return _ones_then_zeros(rows, device)[rows - real : 2 * rows - real].clone()


@lru_cache(maxsize=8)
def _ones_then_zeros(rows: int, device: torch.device) -> torch.Tensor:
    """All weights that batches of so many rows can have, one beside the other."""
    both = torch.zeros(2 * rows, dtype=torch.float32, device=device)
    both[:rows] = 1
    return both


def count_micro_batches(*, size: int, micro_batch_size: int | None) -> int:
    """Return how many micro-batches hold `size` examples; none still take one."""
    return 1 if micro_batch_size is None else max(1, math.ceil(size / micro_batch_size))


class BatchSource(Protocol):
    """Reads the examples of micro-batches, in the order in which it is given them."""

    device: torch.device

    def __len__(self) -> int: ...

    def batches(self, samples: Iterator[StepSample]) -> Iterator[tuple[StepSample, Any]]:
        """Yield every sample with its batch, one row for each example; may look ahead."""
        ...

    def first(self) -> Any:
        """Return a batch that holds the first example, to see what batches look like."""
        ...


class ColumnSource:
    """Batches gathered from tensors whose first axis counts examples, on the tensors' device."""

    def __init__(
        self,
        *,
        columns: tuple[torch.Tensor, ...],
        arrange: Callable[[list[torch.Tensor]], Any],
        pin_memory: bool,
    ) -> None:
        if not columns or any(column.ndim == 0 for column in columns):
            raise PrivacyError("tensors of data need a first axis that counts the examples")
        if len({len(column) for column in columns}) > 1:
            lengths = ", ".join(str(len(column)) for column in columns)
            raise PrivacyError(f"the tensors hold different numbers of examples: {lengths}")
        self.device = columns[0].device
        self._columns = columns
        self._arrange = arrange
        self._pin_memory = pin_memory and torch.cuda.is_available()

    def __len__(self) -> int:
        return min(len(column) for column in self._columns)

    def batches(self, samples: Iterator[StepSample]) -> Iterator[tuple[StepSample, Any]]:
        """Yield every sample with its batch, copied out of the tensors."""
        for sample in samples:
            yield sample, self._arrange(self._gather(sample.indices, sample.rows // sample.views))

    def first(self) -> Any:
        """Return a batch of one example."""
        return self._arrange(self._gather(torch.zeros(1, dtype=torch.int64), 1))

    def _gather(self, indices: torch.Tensor, size: int) -> list[torch.Tensor]:
        examples = len(indices)
        # From pinned memory a copy does not wait for the kernels that are queued already.
        pinned = any(column.is_cuda for column in self._columns)
        rows = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        rows[:examples] = indices
        located: dict[torch.device, torch.Tensor] = {}
        gathered = []
        for column in self._columns:
            if column.device not in located:
                located[column.device] = rows.to(column.device, non_blocking=pinned)
            batch = column.index_select(0, located[column.device])
            if examples < size:  # padding is nobody's data, whatever weight it is given
                batch.narrow(0, examples, size - examples).zero_()
            pin = self._pin_memory and batch.device.type == "cpu"
            gathered.append(batch.pin_memory() if pin else batch)
        return gathered


class DatasetSource:
    """Batches read by a `DataLoader`, in this process or by its workers.

    Samples are drawn in this process when the loader asks for indices, which with workers is some
    batches before it returns the batch. It returns them in the order it asked, so a queue of the
    samples asked for gives each batch the sample it was made from.
    """

    device = torch.device("cpu")

    def __init__(self, read: Callable[..., DataLoader[Any]]) -> None:
        self._requests = _Requests()
        self._loader = read(batch_sampler=self._requests)

    def __len__(self) -> int:
        return len(self._loader.dataset)  # type: ignore[arg-type]

    def batches(self, samples: Iterator[StepSample]) -> Iterator[tuple[StepSample, Any]]:
        """Yield every sample with its batch; workers run ahead by their prefetch."""
        asked: deque[StepSample] = deque()
        self._requests.begin(samples, asked)
        for batch in self._loader:
            yield asked.popleft(), batch

    def first(self) -> Any:
        """Return a batch that holds one example, read in this process."""
        dataset: Any = self._loader.dataset
        together = hasattr(dataset, "__getitems__")
        return self._loader.collate_fn(dataset.__getitems__([0]) if together else [dataset[0]])


class _Requests:
    """The batch sampler of a `DatasetSource`: turns samples into lists of indices, once each."""

    def __init__(self) -> None:
        self.begin(iter(()), deque())

    def begin(self, samples: Iterator[StepSample], asked: deque[StepSample]) -> None:
        self._samples, self._asked = samples, asked

    def __iter__(self) -> Iterator[list[int]]:
        return self._ask(self._samples, self._asked)

    @staticmethod
    def _ask(samples: Iterator[StepSample], asked: deque[StepSample]) -> Iterator[list[int]]:
        for sample in samples:
            asked.append(sample)
            yield sample.indices.tolist()


def make_source(
    data: Any,
    *,
    collate_fn: Callable[[list[Any]], Any] | None,
    sizes: Sequence[int] | None,
    pin_memory: bool,
    read: Callable[..., DataLoader[Any]],
) -> BatchSource:
    """Choose how to read `data`: tensors are gathered, anything else goes through `read`."""
    are_columns = type(data) is tuple and all(isinstance(part, torch.Tensor) for part in data)
    if collate_fn is None or collate_fn is default_collate:
        collate_fn = default_collate
        if are_columns:
            return ColumnSource(columns=data, arrange=tuple, pin_memory=pin_memory)
        if type(data) is torch.Tensor:
            return ColumnSource(columns=(data,), arrange=_only, pin_memory=pin_memory)
        # The exact type: a subclass may compute its examples.
        if type(data) is TensorDataset:
            return ColumnSource(columns=data.tensors, arrange=list, pin_memory=pin_memory)
    elif are_columns:
        data = TensorDataset(*data)  # the user's collate function wants examples, one by one
    check_map_style(data)
    collate = StepCollate(dataset=data, collate_fn=collate_fn, sizes=sizes)
    pin = pin_memory and torch.accelerator.is_available()
    return DatasetSource(partial(read, data, collate_fn=collate, pin_memory=pin))


def _only(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0]
