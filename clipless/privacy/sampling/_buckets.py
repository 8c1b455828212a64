"""`Buckets`: sequences of several lengths in one run, each batch cut to a length that is public."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from clipless.errors import PrivacyError
from clipless.privacy.sampling._batches import StepSample, count_micro_batches
from clipless.privacy.sampling._streams import StreamSource


@dataclass(frozen=True, eq=False)
class Buckets:
    """Sequences by length: each step's sample is handed out in batches of sequences alike in it.

    A record's bucket is the shortest length that it fits into. It depends on that record alone, but
    it is *public*: who is in which bucket is not protected, and a record that is removed keeps its
    place in it. What is protected is everything else of a record. Give all records one length, by
    padding, where even lengths to within a bucket are secret.

    The data hold all sequences padded to the longest length, on the second axis of their batches;
    every tensor of a batch that has this axis is cut (token numbers, masks, labels of tokens).

    Args:
        sizes: the length of every record, in the order of the data, without its padding.
        lengths: the lengths of batches, the longest of which is that of the padded data.

    Example:
        >>> buckets = Buckets(torch.tensor([3, 9, 4]), lengths=(4, 16))
        >>> buckets.numbers.tolist()
        [0, 1, 0]
    """

    sizes: Tensor | Sequence[int]
    lengths: Sequence[int]
    numbers: Tensor = field(init=False)
    """The number of every record's bucket, which is public."""

    def __post_init__(self) -> None:
        """Find the bucket of every record; refuse records that fit into none."""
        lengths = tuple(int(each) for each in self.lengths)
        if not lengths or lengths[0] < 1 or list(lengths) != sorted(set(lengths)):
            raise ValueError(f"lengths must grow from 1 on, got {lengths}")
        sizes = torch.as_tensor(self.sizes).cpu()
        if sizes.ndim != 1 or sizes.is_floating_point():
            raise ValueError("sizes must be whole numbers, one for each record")
        if len(sizes) and int(sizes.max()) > lengths[-1]:
            row = int(sizes.argmax())
            raise ValueError(
                f"record {row} has {int(sizes[row])} entries, the longest bucket {lengths[-1]}: "
                "cut records to that length, or add a longer bucket"
            )
        object.__setattr__(self, "lengths", lengths)
        numbers = torch.searchsorted(torch.tensor(lengths), sizes.to(torch.int64))
        object.__setattr__(self, "numbers", numbers)

    def check(self, source: Any, *, padded: bool, users: bool, processes: int) -> None:
        """Refuse what buckets do not go with."""
        if isinstance(source, StreamSource):
            raise PrivacyError("Buckets need a data set whose records are known by number")
        records = len(source)
        if len(self.numbers) != records:
            raise PrivacyError(
                f"Buckets know the sizes of {len(self.numbers)} records, and the data set has "
                f"{records}: give one for each, in the order of the data"
            )
        for refused, what in (
            (padded, "pad=True or compile: their batches differ in length"),
            (users, "a unit of users"),
            (processes > 1, "several processes, whose batches must be equally many"),
        ):  # fmt: skip
            if refused:
                raise PrivacyError(f"Buckets do not go with {what}. Leave one of them out.")

    def split(self, frame: StepSample, *, micro_batch_size: int | None) -> Iterator[StepSample]:
        """Cut a step's sample into the micro-batches of each bucket, one at least for each."""
        parts: list[tuple[Tensor, int]] = []
        own = self.numbers[frame.indices]
        for number, length in enumerate(self.lengths):
            some = frame.indices[own == number]
            size = micro_batch_size or max(1, len(some))
            count = count_micro_batches(size=len(some), micro_batch_size=size)
            parts += [(some[n * size : (n + 1) * size], length) for n in range(count)]
        for place, (indices, length) in enumerate(parts):
            yield replace(
                frame, indices=indices, rows=frame.views * len(indices), micro_batch=place,
                micro_batches=len(parts), length=length,
            )  # fmt: skip

    def cut(self, batch: Any, length: int) -> Any:
        """Return a batch whose sequences, padded to the longest length, have this one."""
        if isinstance(batch, Tensor):
            if batch.ndim < 2 or batch.shape[1] != self.lengths[-1]:
                return batch
            return batch[:, :length].contiguous()
        if isinstance(batch, Mapping):
            return {key: self.cut(value, length) for key, value in batch.items()}
        if isinstance(batch, list | tuple):
            return type(batch)([self.cut(each, length) for each in batch])
        return batch
