"""Conversion of the data that `fit`, `evaluate` and `predict` accept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from clipless.privacy import PrivateLoader, check_wrappable

_EVALUATION_BATCH = 1024


def training_loader(data: Any, batch_size: int | None) -> DataLoader[Any]:
    """Return a loader whose batch size is the expected batch size of private training."""
    if isinstance(data, DataLoader):
        if batch_size not in (None, data.batch_size):
            raise ValueError(
                f"batch_size={batch_size}, but the data loader has {data.batch_size}: give one"
            )
        check_wrappable(data)
        return data
    if batch_size is None:
        raise ValueError("batch_size is needed: the number of examples in a batch, on average")
    return DataLoader(_dataset(data), batch_size=batch_size)


def evaluation_batches(data: Any) -> Iterator[Any]:
    """Yield batches of all examples, each once."""
    if isinstance(data, DataLoader):
        return iter(data)
    return iter(DataLoader(_dataset(data), batch_size=_EVALUATION_BATCH))


def pair(batch: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a batch on the device."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise TypeError(
            "the trainer needs batches of two tensors, inputs and targets; for models with "
            "several inputs write the loop with PrivacyEngine"
        )
    return batch[0].to(device, non_blocking=True), batch[1].to(device, non_blocking=True)


def inputs_of(batch: Any, device: torch.device) -> Tensor:
    """Return the inputs of a batch, with or without targets, on the device."""
    first = batch[0] if isinstance(batch, tuple | list) else batch
    return first.to(device, non_blocking=True)


def _dataset(data: Any) -> Dataset[Any]:
    if isinstance(data, Tensor):
        return TensorDataset(data)
    if isinstance(data, tuple | list) and all(isinstance(part, Tensor) for part in data):
        return TensorDataset(*data)
    if isinstance(data, PrivateLoader):
        raise TypeError("a PrivateLoader draws at random: give the data set that it reads")
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise TypeError(
            f"a {type(data).__name__} is no data: give a tuple of tensors, a Dataset, or a "
            "DataLoader"
        )
    return data
