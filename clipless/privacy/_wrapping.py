"""Which `DataLoader` can be replaced by one that samples privately, and which says no."""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from clipless.errors import PrivacyError
from clipless.privacy._mechanism import FullBatch, PoissonSampling, Sampling


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


def default_sampling(loader: DataLoader[Any], batch_size: int) -> Sampling:
    """Return Poisson sampling whose expected batch size is that of `loader`."""
    size = len(loader.dataset)  # type: ignore[arg-type]
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
