"""Conversion of the data that `fit`, `evaluate` and `predict` accept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from clipless.privacy import (
    FixedOrder,
    PrivateLoader,
    Sampling,
    SamplingName,
    check_wrappable,
    epochs_of,
)

_EVALUATION_BATCH = 1024


def training_loader(
    data: Any, batch_size: int | None, sampling: Sampling | str = "poisson"
) -> DataLoader[Any]:
    """Return a loader whose batch size is the expected batch size of private training.

    A stream is read as it is, for which `sampling` must be a `FixedOrder`.
    """
    if isinstance(sampling, FixedOrder):
        if batch_size not in (None, sampling.batch_size):
            raise ValueError(
                f"batch_size={batch_size}, but sampling has {sampling.batch_size}: give one"
            )
        batch_size = sampling.batch_size
        if isinstance(data, IterableDataset):
            return DataLoader(data, batch_size=batch_size, drop_last=sampling.drop_last)
        if isinstance(data, DataLoader) and isinstance(data.dataset, IterableDataset):
            return data
    if isinstance(data, DataLoader):
        if batch_size not in (None, data.batch_size):
            raise ValueError(
                f"batch_size={batch_size}, but the data loader has {data.batch_size}: give one"
            )
        check_wrappable(data)
        return data
    if batch_size is None:
        raise ValueError("batch_size is needed: the number of examples in a batch, on average")
    loader = DataLoader(_dataset(data), batch_size=batch_size)
    check_wrappable(loader)
    return loader


def fixed_order(
    data: Any, loader: DataLoader[Any], sampling: Sampling | SamplingName
) -> Sampling | SamplingName:
    """Return the sampling of a trainer: epochs of data that are in no order are shuffled once."""
    if sampling != "epochs" or isinstance(data, DataLoader):
        return sampling
    return replace(epochs_of(loader), shuffle_seed=0)


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
    if isinstance(data, Tensor | np.ndarray):
        data = (data,)
    if isinstance(data, tuple | list) and all(
        isinstance(part, Tensor | np.ndarray) for part in data
    ):
        parts = [_tensor(part) for part in data]
        sizes = [len(part) for part in parts]
        if len(set(sizes)) > 1:
            raise ValueError(f"inputs and targets differ in number: {sizes}")
        return TensorDataset(*parts)
    if isinstance(data, IterableDataset):
        raise TypeError(
            f"{type(data).__name__} is a stream: examples can only be drawn independently from a "
            "data set with a length and an index. Use a map-style Dataset, or read the stream "
            "in its own order: PrivacyOptions(sampling=FixedOrder(dataset_size=, batch_size=))."
        )
    if isinstance(data, PrivateLoader):
        raise TypeError("a PrivateLoader draws at random: give the data set that it reads")
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise TypeError(
            f"a {type(data).__name__} is no data: give a tuple of tensors, a Dataset, or a "
            "DataLoader"
        )
    return data


def _tensor(values: Tensor | np.ndarray[Any, Any]) -> Tensor:
    """Return an array as a tensor, and float64, which numpy makes of everything, as float32."""
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "biuf":
            raise TypeError(
                f"an array of {values.dtype} is no tensor: encode text and objects as numbers, or "
                "use clipless.sklearn, which does"
            )
        values = torch.from_numpy(np.ascontiguousarray(values))
    default = torch.get_default_dtype()
    return values.to(default) if values.dtype == torch.float64 else values
