"""What stands in `parameter.grad`, and who put it there."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from clipless.errors import PrivacyError


class Gradients:
    """The gradients of a model's parameters: nothing without noise is left where others look."""

    def __init__(self, parameters: Mapping[str, Tensor], trainable: Sequence[Tensor]) -> None:
        self._parameters, self._trainable = list(parameters.values()), list(trainable)
        self._own: list[Tensor] = []

    def drop(self) -> None:
        """Take all gradients away."""
        for parameter in self._parameters:
            parameter.grad = None

    def put(self, gradients: Sequence[Tensor | None]) -> None:
        """Let the trainable parameters have these gradients, and remember that they are ours.

        None is for parameters that another process looks after.
        """
        self.drop()
        for parameter, gradient in zip(self._trainable, gradients, strict=True):
            parameter.grad = gradient
        self._own = [p.grad for p in self._parameters if p.grad is not None]

    def check_own(self) -> None:
        """Refuse gradients that somebody else has put there, and discard them."""
        own = set(map(id, self._own))
        if any(p.grad is not None and id(p.grad) not in own for p in self._parameters):
            self.drop()
            raise PrivacyError(
                "a parameter has a gradient that did not come through the private criterion: "
                "another loss was differentiated, or `grad` was assigned. It was discarded. Only "
                "the private loss may be differentiated, and gradients cannot be edited."
            )


def without_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    """Compute in the precision of the tensors, whatever surrounds the call of `backward`."""
    if not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)
