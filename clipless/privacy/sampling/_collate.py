"""Collating the examples of a step when there are none, or fewer than the batch has rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch

from clipless.errors import PrivacyError
from clipless.privacy.sampling._padding import smallest_holding


class StepCollate:
    """A collate function that also makes batches of no examples and batches of certain sizes.

    `collate_fn` is called with one example or more, whatever the size of the sample. With `sizes`,
    the list it gets is filled up to the smallest of them that holds it by repeating the first one
    (example 0 of the data set if the sample is empty); in tensors, those rows are then set to zero,
    so that padding is nobody's data, and the caller gives them weight zero. Without, an empty
    sample becomes a batch of the right structure, types and shapes with no examples in it.
    """

    def __init__(
        self,
        *,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        sizes: Sequence[int] | None,
    ) -> None:
        # In a worker process this is the worker's own copy, the one it reads all examples from.
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.sizes = sizes

    def __call__(self, examples: Any) -> Any:
        if not isinstance(examples, list):
            # A data set with its own __getitems__ may hand over a whole batch in any form.
            if self.sizes is not None or (isinstance(examples, Sized) and len(examples) == 0):
                raise PrivacyError(
                    f"the data set's __getitems__ returned a {type(examples).__name__}; padded and "
                    "empty batches need the list of examples: return one, or drop __getitems__"
                )
            return self.collate_fn(examples)
        if self.sizes is not None:
            rows = smallest_holding(self.sizes, len(examples))
            filler = examples[0] if examples else self.dataset[0]
            full = self.collate_fn(examples + [filler] * (rows - len(examples)))
            return _blank(full, first=len(examples), rows=rows)
        if examples:
            return self.collate_fn(examples)
        example = self.dataset[0]
        return without_examples(
            one=self.collate_fn([example]), two=self.collate_fn([example, example])
        )


def _blank(batch: Any, *, first: int, rows: int) -> Any:
    """Set the rows from `first` on to zero in every tensor of the batch."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        if batch.ndim and batch.shape[0] == rows and first < rows:
            batch = batch.clone() if isinstance(batch, torch.Tensor) else batch.copy()
            batch[first:] = 0
        return batch
    if isinstance(batch, Mapping):
        entries = {key: _blank(part, first=first, rows=rows) for key, part in batch.items()}
        return entries if type(batch) is dict else type(batch)(entries)  # type: ignore[call-arg]
    if isinstance(batch, list | tuple):
        parts = [_blank(part, first=first, rows=rows) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def without_examples(*, one: Any, two: Any) -> Any:
    """Return the batch of no examples, given the batches of one example and of it twice.

    Every length is extrapolated: what is 1 for one example and 2 for two is 0 for none, wherever
    the batch axis is; what does not change stays. Containers are followed to any depth.
    """
    if type(one) is not type(two):
        raise _no_empty_batch(one)
    if isinstance(one, torch.Tensor | np.ndarray):
        if one.ndim != two.ndim:
            raise _no_empty_batch(one)
        lengths = [_extrapolate(a, b, one) for a, b in zip(one.shape, two.shape, strict=True)]
        return one[tuple(slice(length) for length in lengths)]
    if isinstance(one, Mapping) and one.keys() == two.keys():
        entries = {key: without_examples(one=one[key], two=two[key]) for key in one}
        return entries if type(one) is dict else type(one)(entries)  # type: ignore[call-arg]
    if isinstance(one, list | tuple):
        if len(one) != len(two):
            return one[: _extrapolate(len(one), len(two), one)]
        items = [without_examples(one=a, two=b) for a, b in zip(one, two, strict=True)]
        return type(one)(*items) if hasattr(one, "_fields") else type(one)(items)
    if isinstance(one, int) and not isinstance(one, bool):
        return 2 * one - two
    if one is None or (isinstance(one, str | bytes | bool | float) and one == two):
        return one
    raise _no_empty_batch(one)


def _extrapolate(length_of_one: int, length_of_two: int, leaf: Any) -> int:
    length = 2 * length_of_one - length_of_two
    if length < 0:
        raise _no_empty_batch(leaf)
    return length


def _no_empty_batch(leaf: Any) -> PrivacyError:
    return PrivacyError(
        "a Poisson sample came out empty and no batch of zero examples could be made from a "
        f"{type(leaf).__name__} that collate_fn returned; let collate_fn return tensors in tuples, "
        "lists or dicts with one entry per example along an axis, or use pad=True"
    )
