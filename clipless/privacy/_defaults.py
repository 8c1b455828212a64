"""Defaults of the engine's arguments, and values derived from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from clipless.accounting import (
    FixedOrder,
    FixedSizeSampling,
    FullBatch,
    PoissonSampling,
    Relation,
    Sampling,
    require_supported_relation,
)
from clipless.bounds import SensitivityReport
from clipless.errors import PrivacyError

SamplingName = Literal["poisson", "fixed_size", "full_batch", "epochs"]


def example_shape(dataset: Any) -> tuple[int, ...]:
    """Return the shape of one example's input: the first part of what the data set returns."""
    if type(dataset) is tuple and dataset and isinstance(dataset[0], torch.Tensor):
        return tuple(dataset[0].shape[1:])
    if isinstance(dataset, torch.Tensor):
        return tuple(dataset.shape[1:])
    example = dataset[0]
    first = example[0] if isinstance(example, tuple | list) else example
    shape = getattr(first, "shape", None)
    if shape is None:
        raise PrivacyError(
            f"the shape of the model's input cannot be told from an example of type "
            f"{type(example).__name__}: pass "
            "BatchOptions(input_shape=...)."
        )
    return tuple(shape)


def named_sampling(name: str, size: int, batch_size: int) -> Sampling:
    """Return the sampling of a name; a Poisson batch of all examples is the full batch."""
    if name == "full_batch" or (name == "poisson" and batch_size >= size):
        return FullBatch(dataset_size=size)
    if name == "poisson":
        return PoissonSampling(dataset_size=size, rate=batch_size / size)
    if name == "fixed_size":
        return FixedSizeSampling(dataset_size=size, batch_size=batch_size)
    if name == "epochs":
        return FixedOrder(dataset_size=size, batch_size=min(batch_size, size))
    raise ValueError(f"sampling must be poisson, fixed_size, full_batch or epochs, got {name!r}")


def relation_for(relation: Relation | str | None, sampling: Sampling) -> Relation:
    """Return the relation asked for, or the one that the sampling is accounted under."""
    if relation is not None:
        return require_supported_relation(relation)
    fixed = isinstance(sampling, FixedSizeSampling)
    return Relation.REPLACE_ONE if fixed else Relation.ZERO_OUT


def noise_coefficients(
    given: Mapping[str, float] | None, report: SensitivityReport
) -> tuple[float, ...] | None:
    """Return noise coefficients in the order of the parameters; every one must be there."""
    if given is None:
        return None
    names = list(report.gradient_bounds)
    if set(given) != set(names):
        raise ValueError(
            f"noise, by parameter name, needs one number for each of {', '.join(names)}"
        )
    return tuple(float(given[name]) for name in names)


def parameter_dtype(module: nn.Module) -> torch.dtype:
    """Return the one dtype of the trainable parameters."""
    dtypes = {p.dtype for p in module.parameters() if p.requires_grad}
    if len(dtypes) > 1:
        raise PrivacyError(f"trainable parameters have several dtypes: {sorted(map(str, dtypes))}")
    return dtypes.pop() if dtypes else torch.float32
