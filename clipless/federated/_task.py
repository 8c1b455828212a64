"""`RoundTask`: what a server sends to the clients of a round; and weights in one order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clipless.errors import PrivacyError


@dataclass(frozen=True, kw_only=True)
class RoundTask:
    """The weights to begin with, by name, the number of the round from 1, and the terms' digest."""

    number: int
    terms: str
    weights: Mapping[str, Tensor]


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name."""
    found = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if not found:
        raise PrivacyError("no parameter of this model requires a gradient: nothing is trained")
    return found


def copied_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the weights that are trained, by name, on the CPU."""
    return {name: p.detach().cpu().clone() for name, p in trained_parameters(model).items()}


@torch.no_grad()
def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put weights into a model, or refuse those of another model."""
    own = trained_parameters(model)
    theirs = {name: tuple(each.shape) for name, each in weights.items()}
    if theirs != {name: tuple(each.shape) for name, each in own.items()}:
        raise PrivacyError("the weights of this round are those of another model")
    for name, parameter in own.items():
        parameter.copy_(weights[name])


def flat_difference(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> Tensor:
    """Return what weights have moved by, as one vector in float64."""
    parts = [(after[name].double() - before[name].double()).flatten() for name in before]
    return torch.cat(parts)
