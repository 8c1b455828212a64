"""Canaries: examples that an audit puts into the training data, or leaves out, by a coin each."""

from __future__ import annotations

import copy
import math
import secrets

import numpy as np
import torch
from torch import Tensor, nn

from clipless.common import require_positive
from clipless.losses import Loss

Examples = tuple[Tensor, Tensor]
"""Inputs and targets, one row for each example."""

_SEED_DOMAIN = 0xC01
"""Keeps the coins apart from initial weights and noise that are drawn from the same seed."""


def orthogonal_canaries(
    count: int, *, input_shape: tuple[int, ...], classes: int, norm: float = 1.0, seed: int = 0
) -> Examples:
    """Return inputs of norm `norm`, orthogonal to each other where there is room, random labels.

    Gradients of a first linear layer are then orthogonal as well, so that the canaries do not
    hide each other. With more canaries than dimensions, they are orthogonal within groups of as
    many as there are dimensions. Use the norm of the input guard: larger gradients are easier to
    find, and none is larger than the guard allows.

    Shape: inputs (count, *input_shape), targets (count,).

    Example:
        >>> x, y = orthogonal_canaries(3, input_shape=(2, 2), classes=5, norm=2.0)
        >>> torch.round(x.flatten(1) @ x.flatten(1).T, decimals=4).abs()
        tensor([[4., 0., 0.],
                [0., 4., 0.],
                [0., 0., 4.]])
    """
    require_positive("norm", norm)
    size = math.prod(input_shape)
    if count < 1 or size < 1 or classes < 1:
        raise ValueError(f"count={count}, input_shape={input_shape}, classes={classes}: empty")
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for _ in range(0, count, size):
        draw = torch.randn(size, min(count, size), generator=generator, dtype=torch.float64)
        groups.append(torch.linalg.qr(draw).Q.T)
    inputs = norm * torch.cat(groups)[:count].reshape(count, *input_shape)
    return inputs.float(), torch.randint(classes, (count,), generator=generator)


@torch.no_grad()
def hardest_labels(inputs: Tensor, *, model: nn.Module, criterion: Loss, classes: int) -> Tensor:
    """Return for each input the label of the largest loss: canaries with large gradients.

    The gradient of a classification loss grows with the loss, up to the bound that a Lipschitz
    network has or that layers enforce. Ask the model before training, which knows no data.

    Example:
        >>> model = torch.nn.Sequential(
        ...     clipless.nn.BoundedInput(9.0), torch.nn.Flatten())
        >>> hardest_labels(torch.tensor([[3.0, 0.0, 1.0]]), model=model,
        ...                criterion=clipless.losses.CrossEntropy(), classes=3)
        tensor([1])
    """
    copied = copy.deepcopy(model).eval()
    losses = [
        criterion.per_example(copied(inputs), torch.full((len(inputs),), label))
        for label in range(classes)
    ]
    return torch.stack(losses).argmax(dim=0)


def draw_coins(count: int, *, seed: int | None = None) -> Tensor:
    """Return `count` fair independent coins, booleans: which canaries take part.

    Example:
        >>> draw_coins(4, seed=1).dtype
        torch.bool
    """
    key = secrets.randbits(128) if seed is None else seed
    generator = np.random.default_rng([_SEED_DOMAIN, key])
    return torch.from_numpy(generator.integers(0, 2, size=count).astype(bool))


def insert_canaries(
    data: Examples, canaries: Examples, included: Tensor, *, stand_ins: Examples | None = None
) -> Examples:
    """Return the data with the included canaries, and stand-ins for the others if there are any.

    Without stand-ins, a coin adds or removes an example; with them it replaces one, and the data
    have the same size whatever the coins say.

    Example:
        >>> data = (torch.zeros(5, 2), torch.zeros(5).long())
        >>> canaries = (torch.ones(3, 2), torch.ones(3).long())
        >>> x, y = insert_canaries(data, canaries, torch.tensor([True, False, True]))
        >>> x.shape, y
        (torch.Size([7, 2]), tensor([0, 0, 0, 0, 0, 1, 1]))
    """
    groups = {"data": data, "canaries": canaries}
    if stand_ins is not None:
        groups["stand_ins"] = stand_ins
    for name, (inputs, targets) in groups.items():
        if len(inputs) != len(targets):
            raise ValueError(f"{name}: {len(inputs)} inputs, but {len(targets)} targets")
        if inputs.shape[1:] != data[0].shape[1:] or targets.shape[1:] != data[1].shape[1:]:
            raise ValueError(f"{name} have another shape than the data")
    if len(included) != len(canaries[0]) or included.dtype != torch.bool:
        raise ValueError(f"included must be {len(canaries[0])} booleans, one for each canary")
    if stand_ins is not None and len(stand_ins[0]) != len(canaries[0]):
        raise ValueError(f"{len(stand_ins[0])} stand-ins for {len(canaries[0])} canaries")
    parts = []
    for part in range(2):
        chosen = canaries[part][included]
        if stand_ins is not None:
            mask = included.reshape(-1, *[1] * (canaries[part].ndim - 1))
            chosen = torch.where(mask, canaries[part], stand_ins[part])
        parts.append(torch.cat([data[part], chosen.to(data[part])]))
    return parts[0], parts[1]
