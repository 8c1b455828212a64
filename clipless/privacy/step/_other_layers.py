"""Layers of other libraries, run on one example at a time; unknown ways to a parameter: refused."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clipless.errors import PrivacyError
from clipless.kernels import GradientLimits, per_example_parameter


def by_rows(
    module: nn.Module, *inputs: Any, parameters: Mapping[str, Tensor], limits: GradientLimits
) -> Any:
    """Run a layer that is not ours on one example at a time, each with parameters of its own."""
    plain = copy.copy(module)
    vars(plain).pop("forward", None)
    rows = inputs[0].shape[0]
    dtypes = {name: each.dtype for name, each in module.named_parameters()}
    copies = {
        name: per_example_parameter(each, rows, limits.get(name), dtypes[name])
        for name, each in parameters.items()
    }

    def one(own: dict[str, Tensor], *example: Any) -> Any:
        batch = tuple(x.unsqueeze(0) if isinstance(x, Tensor) else x for x in example)
        return torch.func.functional_call(plain, own, batch).squeeze(0)

    axes = (0, *(0 if isinstance(x, Tensor) else None for x in inputs))
    try:
        return torch.func.vmap(one, axes, randomness="different")(copies, *inputs)
    except RuntimeError as error:
        raise PrivacyError(
            f"{type(module).__name__} has trainable parameters and a rule, but cannot be run on "
            f"single examples by torch.func.vmap, which is how its gradients are bounded: {error}"
        ) from error


def refuse_other_ways(output: Tensor, ways: Sequence[Any]) -> None:
    """Refuse an output that depends on a parameter other than by these nodes of its graph."""
    known: set[Any] = {None, *ways}
    waiting: list[Any] = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in known:
            continue
        known.add(node)
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            raise PrivacyError(
                "the forward pass uses a parameter of a sharded model in another way than by "
                "calling its layer, or uses what an earlier pass has computed. What reaches the "
                "parameter by that way has no bound: call the layer itself, and detach what is "
                "kept between calls."
            )
        waiting += [each for each, _ in node.next_functions]
