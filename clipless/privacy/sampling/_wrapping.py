"""Checks that a `DataLoader` can be replaced by one that samples privately."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from clipless.accounting import FullBatch, PoissonSampling, Sampling
from clipless.errors import PrivacyError


def check_wrappable(loader: DataLoader[Any]) -> int:
    """Return the batch size of a loader that does nothing but batch its data set, or refuse it."""
    if not isinstance(loader, DataLoader):
        raise PrivacyError(f"expected a torch DataLoader, got {type(loader).__name__}")
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise PrivacyError(
            f"{type(loader).__name__} iterates in a way of its own, which sampling anew would "
            "lose; pass its data set to PrivateLoader instead"
        )
    check_map_style(loader.dataset)
    if loader.batch_sampler is None:
        raise PrivacyError(
            "this loader has batch_size=None: its data set makes batches itself, so examples "
            "cannot be sampled one by one; index single examples and give a batch_size"
        )
    if type(loader.batch_sampler) is not BatchSampler:
        raise _other_distribution(loader.batch_sampler)
    sampler: Any = loader.batch_sampler.sampler
    if type(sampler) not in (RandomSampler, SequentialSampler):
        raise _other_distribution(sampler)
    size = len(loader.dataset)  # type: ignore[arg-type]
    replacement = isinstance(sampler, RandomSampler) and sampler.replacement
    if replacement or len(sampler) != size:
        raise _other_distribution(sampler)
    return loader.batch_sampler.batch_size


def check_map_style(data: Any) -> None:
    """Refuse data in which examples cannot be looked up by index."""
    if isinstance(data, IterableDataset) or not (
        hasattr(data, "__getitem__") and hasattr(data, "__len__")
    ):
        raise PrivacyError(
            f"{type(data).__name__} is a stream: examples can only be drawn independently from a "
            "data set with a length and an index. Use a map-style data set, or read the stream "
            "into tensors."
        )


def check_distinct(data: Any) -> None:
    """Refuse data in which a record obviously stands at several places, and counts that often.

    Found are repeated indices of a `Subset`, parts of a `ConcatDataset` that overlap, and tensors
    whose rows are one and the same memory. Copies are not: whether two equal rows are two people
    is not to be decided by looking at them.
    """
    tensors = data if isinstance(data, tuple) else getattr(data, "tensors", (data,))
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.ndim and len(tensor) > 1 and not tensor.stride(0):
            raise _repeated("a tensor's rows are one row, expanded")
    places = _places(data)
    if places is not None and len(np.unique(places, axis=0)) < len(places):
        raise _repeated(f"{type(data).__name__} leads to some record from several indices")


def _places(data: Any) -> Any:
    """Where the examples of a data set lie in what it is made of: rows of (data set, index).

    None stands for a data set that is not made of others.
    """
    if type(data) is Subset:
        indices, inner = np.asarray(data.indices, dtype=np.int64), _places(data.dataset)
        indices = np.where(indices < 0, indices + len(data.dataset), indices)  # type: ignore[arg-type]
        if inner is not None:
            return inner[indices]
        return np.stack([np.full_like(indices, id(data.dataset)), indices], axis=1)
    if type(data) is ConcatDataset:
        parts = [
            _places(Subset(part, range(len(part))))  # type: ignore[arg-type]
            for part in data.datasets
        ]
        return np.concatenate(parts)
    return None


def _repeated(how: str) -> PrivacyError:
    return PrivacyError(
        f"{how}. A record that is there k times contributes k times, and k times as much as is "
        "accounted for. Let every record be there once (weights belong into the loss, as a bound "
        "does); for a bootstrap, sample people before the data set is made, each at most once."
    )


def default_sampling(size: int, batch_size: int) -> Sampling:
    """Return Poisson sampling of `size` units with an expected batch size."""
    if batch_size >= size:
        return FullBatch(dataset_size=size)
    return PoissonSampling(dataset_size=size, rate=batch_size / size)


def _other_distribution(sampler: Any) -> PrivacyError:
    return PrivacyError(
        f"this loader chooses examples with its own {type(sampler).__name__}. Its distribution is "
        "not one that is accounted for, and replacing it would silently train on another. Drop it "
        "(shuffle=True or the default): steps are sampled anew, each example with the same "
        "probability; processes share out one sample with rank and world_size."
    )
