"""The network of the estimators: one or two spectral layers behind a guard, and its last bias."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from sklearn.utils import check_random_state
from torch import Tensor

from clipless import nn as lip
from clipless.common import fresh_bits


def build_network(features: int, hidden: int, outputs: int) -> torch.nn.Sequential:
    """Spectral layers behind an input guard that puts every row on the unit sphere.

    The hidden layer has `hidden` units, or two for each output if that is more. With `hidden` 0
    there is none, and the model is linear on the sphere; it begins at zero, where all that it says
    comes from the data.
    """
    guard = lip.BoundedInput(1.0, mode="sphere")
    if not hidden:
        head = lip.SpectralLinear(features, outputs, bias=True, constraint="ball")
        torch.nn.init.zeros_(head.weight)
        return torch.nn.Sequential(guard, head)
    width = max(hidden, 2 * outputs)
    return torch.nn.Sequential(
        guard,
        lip.SpectralLinear(features, width, constraint="ball"),
        lip.GroupSort(2),
        lip.SpectralLinear(width, outputs, bias=True, constraint="ball"),
    )


def add_to_bias(network: torch.nn.Sequential, shift: Tensor) -> None:
    """Shift the outputs of a trained network, as far as the bound of its last bias lets."""
    head, bias = _last_bias(network)
    with torch.no_grad():
        bias.add_(shift)
    head.project()


def set_bias(network: torch.nn.Sequential, value: Tensor | None) -> None:
    """Set the last bias and keep it out of training: noise on it would shift all outputs."""
    head, bias = _last_bias(network)
    if value is not None:
        with torch.no_grad():
            bias.copy_(value)
        head.project()
    bias.requires_grad_(False)


def _last_bias(network: torch.nn.Sequential) -> tuple[lip.SpectralLinear, torch.nn.Parameter]:
    head = network[-1]
    if not isinstance(head, lip.SpectralLinear) or head.bias is None:
        raise TypeError("the network must end in a spectral layer with a bias")
    return head, head.bias


@contextlib.contextmanager
def seeded(random_state: Any) -> Iterator[None]:
    """Draw initial weights by `random_state`, and leave torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        if random_state is None:
            torch.manual_seed(fresh_bits(63))
        else:
            torch.manual_seed(int(check_random_state(random_state).randint(2**31 - 1)))
        yield
