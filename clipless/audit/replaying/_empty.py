"""Data sets in which one record is empty: the neighbours of the guarantee."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from clipless.privacy import Users


@dataclass(frozen=True)
class DataWithEmptyRecord:
    """A data set with an empty record, or an empty user; made by the functions below."""

    data: Any
    """The data set, with the contents of other records in the empty ones' places."""
    index: int
    """Which record, or user, is empty; `size`: of how many."""
    size: int


def with_empty_record(data: Any, index: int) -> DataWithEmptyRecord:
    """Return the neighbour of `data` in which the record at `index` is empty.

    An empty record contributes nothing wherever it is sampled or counted, and all others stay in
    their places. A data set has to hold something there all the same: it holds a copy of the
    record next to it, which `replay` makes the library's loaders and private rows leave out. What
    looks at records by another way sees that copy, and not the record.

    Args:
        data: a tensor, an array, a data frame, a column, a data set, or a tuple or list of such
            parts, all with one entry for each record.
        index: which record, from 0; from the end if negative.

    Example:
        >>> with_empty_record((torch.tensor([7.0, 8.0, 9.0]), torch.tensor([1, 2, 3])), 0).data
        (tensor([8., 8., 9.]), tensor([2, 2, 3]))
    """
    size = _size(data)
    if size < 2 or not -size <= index < size:
        raise ValueError(f"there is no record {index} with another beside it among {size}")
    place = index % size
    order = np.arange(size)
    order[place] = place - 1 if place else 1
    return DataWithEmptyRecord(data=_taken(data, order), index=place, size=size)


def with_empty_user(data: Any, users: Users, user: Any) -> DataWithEmptyRecord:
    """Return the neighbour of `data` in which all records of a user are empty, for `replay`.

    They keep their places, and are still that user's: `users` is the same in both runs. As in
    `with_empty_record`, the data hold copies of somebody else's records there, which the library's
    loaders and private rows leave out.

    Args:
        data: as for `with_empty_record`, without the ids.
        users: whose each record is.
        user: the id of the user.

    Example:
        >>> from clipless.privacy import Users
        >>> users = Users(["ann", "bob", "ann"])
        >>> with_empty_user(torch.tensor([7.0, 8.0, 9.0]), users, "ann").data
        tensor([8., 8., 8.])
    """
    if _size(data) != len(users) or users.number < 2:
        raise ValueError(
            f"{len(users)} records have {users.number} user(s), and the data {_size(data)} records:"
            " give one id for each record, of two users or more"
        )
    own = users.of(user)
    others = np.setdiff1d(np.arange(len(users)), own)
    order = np.arange(len(users))
    order[own] = np.resize(others, len(own))
    return DataWithEmptyRecord(data=_taken(data, order), index=users.code(user), size=users.number)


def _size(data: Any) -> int:
    sizes = {len(part) for part in data} if isinstance(data, tuple | list) else {len(data)}
    if len(sizes) != 1:
        raise ValueError(f"the parts of the data have different numbers of records: {sizes}")
    return int(sizes.pop())


def _taken(data: Any, order: Any) -> Any:
    """The records in another order, with the types that they have."""
    if isinstance(data, Tensor):
        return data[torch.from_numpy(order).to(data.device)]
    if isinstance(data, np.ndarray):
        return data[order]
    if hasattr(data, "iloc"):  # a data frame, or a column of one; its index stays
        taken = data.iloc[order]
        taken.index = data.index
        return taken
    if type(data) is TensorDataset:
        return TensorDataset(*(_taken(part, order) for part in data.tensors))
    if isinstance(data, Dataset):
        return _Reordered(data, order)
    if isinstance(data, tuple):
        return tuple(_taken(part, order) for part in data)
    if isinstance(data, list):
        return [_taken(part, order) for part in data]
    raise TypeError(
        f"a record of a {type(data).__name__} cannot be emptied: pass tensors, arrays, data frames "
        "or data sets, or give replay a neighbour of your own, in which a record is replaced"
    )


class _Reordered(Dataset[Any]):
    """Another data set's examples, one of them in two places."""

    def __init__(self, data: Any, order: Any) -> None:
        self._data, self._order = data, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Any:
        return self._data[int(self._order[index])]
