"""`Users`: people as units of privacy, each with any number of records.

Users are sampled, and a sampled user contributes the average of at most `records` of their records,
chosen anew in every step. Each record's gradient is bounded as an example's is, and so is their
average: sensitivity, noise and accounting are those of a data set with one record for each user.

A user's records lie next to each other in a batch. The cotangents of a row are those of an example;
its share, one over the number of records that its user contributes, is applied where the rows of a
parameter's gradient are added up, and nowhere else (`clipless.kernels`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from clipless.errors import PrivacyError
from clipless.kernels import WordSource, random_subset
from clipless.privacy.sampling._batches import StepSample, row_weights
from clipless.privacy.sampling._padding import Padding, smallest_holding

_ROOM = 1 - 2.0**-20
"""Shares are smaller by it than one over the number of records: their roundings never add up."""


@dataclass(frozen=True, eq=False, repr=False)
class Users:
    """Whose the records of a data set are: what is protected is a user with all records.

    Neighbours differ by one user, whose records are all empty in one of the two data sets: they
    keep their places and contribute nothing. So the number of users is public, as the number of
    examples is elsewhere, and so is which record belongs to which user; N, batch sizes, rates, and
    delta by default (0.1/N), count users.

    Args:
        ids: one for each record, in the order of the data: numbers or text, in a list, an array, a
            tensor or a column. Records without an id are refused.
        records: of how many of a user's records a step takes the average at most, chosen at random
            among more of them. It costs time and memory, and no epsilon.

    Example:
        >>> users = Users(["ann", "bob", "ann", "ann"], records=2)
        >>> users, users.number, users.of("bob")
        (Users(2 users, at most 2 records of each in a step), 2, array([1]))
    """

    ids: Any
    records: int = 16

    def __post_init__(self) -> None:
        """Refuse what is no grouping of records."""
        whole = isinstance(self.records, int) and not isinstance(self.records, bool)
        if not (whole and self.records >= 1):
            raise ValueError(
                f"records must be a whole number of at least 1, got {self.records!r}: of how many "
                "of a user's records a step takes the average at most"
            )
        _ = self.codes

    def __repr__(self) -> str:
        return f"Users({self.number} users, at most {self.records} records of each in a step)"

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.codes)

    @cached_property
    def _known(self) -> tuple[Any, Any]:
        return _numbered(self.ids)

    @property
    def codes(self) -> Any:
        """The number of each record's user, from 0, (records,) int64."""
        return self._known[1]

    @property
    def number(self) -> int:
        """How many users there are."""
        return len(self._known[0])

    @cached_property
    def digest(self) -> str:
        """What stands for whose each record is, whatever users are called: public."""
        first = np.unique(self.codes, return_index=True)[1]
        order = np.empty(self.number, dtype=np.int64)
        order[np.argsort(first)] = np.arange(self.number)
        grouped = order[self.codes].astype("<i8").tobytes()
        return f"grouped as {hashlib.sha256(grouped).hexdigest()[:32]}"

    def code(self, user: Any) -> int:
        """Return the number of the user with this id."""
        found = np.flatnonzero(self._known[0] == user)
        if len(found) != 1:
            raise ValueError(f"there is no user {user!r}")
        return int(found[0])

    def of(self, user: Any) -> Any:
        """Return the places of a user's records in the data."""
        return np.flatnonzero(self.codes == self.code(user))

    @cached_property
    def _grouped(self) -> tuple[Any, Any]:
        """The places of all records, user by user, and where each user's begin."""
        order = np.argsort(self.codes, kind="stable")
        sizes = np.bincount(self.codes, minlength=self.number)
        return order, np.concatenate([[0], np.cumsum(sizes)])

    def chosen(
        self, users: torch.Tensor, source: Callable[[int], WordSource]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the records that some users contribute, user by user, and how many of each.

        `source` is where the choice among a user's records comes from, by the user's number.
        """
        order, begins = self._grouped
        numbers = users.numpy()
        first, sizes = begins[numbers], begins[numbers + 1] - begins[numbers]
        taken = np.minimum(sizes, self.records)
        ends = np.cumsum(taken)
        places = np.repeat(first - (ends - taken), taken) + np.arange(int(taken.sum()))
        for each in np.flatnonzero(sizes > self.records):
            subset = random_subset(source(int(numbers[each])), int(sizes[each]), self.records)
            places[ends[each] - self.records : ends[each]] = first[each] + subset
        return torch.from_numpy(order[places]), torch.from_numpy(taken)

    def rooms(self, padding: Padding) -> tuple[int, ...]:
        """Return the sizes of padded batches in records: those in users, times their records."""
        return tuple(size * self.records for size in padding.sizes)

    def samples(
        self,
        frame: StepSample,
        *,
        source: Callable[[int], WordSource],
        micro_batch_size: int | None,
        padding: Padding | None,
        device: torch.device,
    ) -> Iterator[StepSample]:
        """Cut a sample of users, the `indices` of `frame`, into micro-batches of their records.

        A user's records are in one of them, one after the other. In a padded batch there is room
        for as many records of each of so many users as a user may have.
        """
        users = frame.indices
        if padding is not None:
            micro_batch_size = padding.per_batch(len(users))
        at_once = max(1, len(users)) if micro_batch_size is None else micro_batch_size
        for number in range(frame.micro_batches):
            whose = users[number * at_once : (number + 1) * at_once]
            own, sizes = self.chosen(whose, source)
            real, weights = frame.views * len(own), None
            rows = real
            shares = (_ROOM / sizes.double()).float().repeat_interleave(frame.views * sizes)
            if padding is not None:
                rows = frame.views * smallest_holding(self.rooms(padding), len(own))
                weights = row_weights(rows=rows, real=real, device=device)
                shares = torch.cat([shares, torch.zeros(rows - real)])
            yield replace(
                frame,
                indices=own,
                users=whose.repeat_interleave(sizes),
                rows=rows,
                weights=weights,
                shares=shares.to(device),
                micro_batch=number,
            )


def _numbered(ids: Any) -> tuple[Any, Any]:
    """Return the different ids, and the place among them of each record's."""
    if isinstance(ids, torch.Tensor):
        ids = ids.cpu()
    if isinstance(ids, list | tuple):  # of which numpy would make one type, or a table
        values = np.empty(len(ids), dtype=object)
        values[:] = ids
    else:
        values = np.asarray(ids)
    if values.ndim != 1 or not len(values):
        raise PrivacyError(
            f"ids of users must be one for each record, in one column, got shape {values.shape}"
        )
    if values.dtype.kind in "biuSU":
        different, codes = np.unique(values, return_inverse=True)
        return different, codes.astype(np.int64)
    numbers: dict[Any, int] = {}
    try:
        codes = np.array([numbers.setdefault(each, len(numbers)) for each in values.tolist()])
        missing = any(each is None or each != each for each in numbers)
    except TypeError as error:  # what cannot be compared, such as pandas' mark for missing values
        missing = "NA" in str(error)
        if not missing:
            raise PrivacyError(f"ids of users must be numbers or text: {error}") from error
    if missing:
        raise PrivacyError(
            "some records have no user id. A record that is nobody's has no unit to be protected "
            "as: give each such record an id of its own, or leave it out beforehand."
        )
    different = np.empty(len(numbers), dtype=object)
    different[:] = list(numbers)
    return different, codes.astype(np.int64)
