"""Uses of a layer whose graphs nobody else can see: gradients do not travel by autograd's edges.

A gradient that went from node to node could be changed on its way, or joined by others: by a hook
on a node (`y.grad_fn.register_hook`), on a leaf that was found behind it, by a second use of that
leaf. So each use of a layer is one node, which has a graph and leaves of its own inside. Its
backward pass hands the bounded gradients to the pass that they belong to, and passes on nothing but
the cotangent of its input, which is a constant to whoever differentiates once more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from clipless.errors import PrivacyError
from clipless.kernels import row_shares

Layer = Callable[[Sequence[Any], Mapping[int, Tensor]], Tensor]
"""A use of a layer: from its inputs, and leaves by their parameters' places, to its output."""


class Deliveries:
    """The gradients that the uses of one forward pass hand in, by the parameter's place.

    They are taken while the pass's own backward pass runs, once from every use. What else runs
    backwards through a use (a gradient inside of `forward`, a backward pass inside of another one)
    gets the cotangent of its input, and adds nothing here.
    """

    def __init__(self, device: torch.device) -> None:
        self.anchor = torch.empty(0, device=device, requires_grad=True)
        """What every use depends on, so that a backward pass has something to look for."""
        self.shares: Tensor | None = None
        """Of the rows, where several of them are one user's; set before the backward pass."""
        self._lock = threading.Lock()
        self._sums: dict[int, Tensor] | None = None

    def collect(self, run: Callable[[], object]) -> dict[int, Tensor]:
        """Run a backward pass, and return what was handed in meanwhile."""
        with self._lock:
            self._sums = sums = dict[int, Tensor]()
        try:
            run()
        finally:
            with self._lock:
                self._sums = None
        return sums

    def wanted_from(self, use: Any) -> bool:
        """Whether a use should hand in its gradients: now, and for the first time."""
        with self._lock:
            wanted = self._sums is not None and not use.handed_in
            use.handed_in = use.handed_in or wanted
        return wanted

    def hand_in(self, gradients: Mapping[int, Tensor | None]) -> None:
        """Add the gradients of one use."""
        with self._lock:
            for place, gradient in gradients.items():
                if gradient is not None and self._sums is not None:
                    known = self._sums.get(place)
                    gradient = gradient.to(torch.float64)
                    self._sums[place] = gradient if known is None else known + gradient


def sealed(
    layer: Layer, leaves: Mapping[int, Tensor], inputs: Sequence[Any], deliveries: Deliveries
) -> Tensor:
    """Run a layer with leaves that nobody else has; its gradients go to `deliveries`."""
    output: Tensor = _SealedUse.apply(  # type: ignore[no-untyped-call]
        deliveries.anchor, deliveries, layer, leaves, *inputs
    )
    return output


class _SealedUse(torch.autograd.Function):
    """One use of a layer, with a graph of its own inside."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, deliveries: Deliveries, layer: Layer,
        leaves: Mapping[int, Tensor], *inputs: Any,
    ) -> Tensor:  # fmt: skip
        own = [
            x.detach().requires_grad_(needed) if isinstance(x, Tensor) else x
            for x, needed in zip(inputs, ctx.needs_input_grad[4:], strict=True)
        ]
        # Nobody listens in: a mode or a tensor's own class would be shown the leaves.
        with torch.enable_grad(), torch._C.DisableTorchFunction():
            output = layer(own, leaves)
        ctx.deliveries, ctx.handed_in = deliveries, False
        # The way back from the output, and not its memory.
        ctx.inside = get_gradient_edge(output), own, leaves
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        if ctx.inside is None:
            raise PrivacyError(
                "a layer's backward pass ran a second time in one backward pass of the model. "
                "Every use of a layer contributes once: differentiate nothing inside of a "
                "backward pass."
            )
        behind, own, leaves = ctx.inside
        wanted = ctx.deliveries.wanted_from(ctx)
        inputs = [x for x in own if isinstance(x, Tensor) and x.requires_grad]
        asked = [*inputs, *leaves.values()] if wanted else inputs
        if not asked:
            return (None,) * (4 + len(own))
        shares = ctx.deliveries.shares if wanted else None
        with torch._C.DisableTorchFunction(), row_shares(shares) as used:
            found = torch.autograd.grad(
                behind, asked, cotangents[0], allow_unused=True, retain_graph=not wanted
            )  # fmt: skip
        if wanted:
            ctx.inside = None  # activations are not kept until the whole backward pass is over
            sums = sum(each is not None for each in found[len(inputs) :])
            if shares is not None and used.count < sums:
                raise PrivacyError(
                    "a parameter's gradient was added up over the records of users without their "
                    "shares, so that a user with many records would count for several. This layer "
                    "does not go with a unit of users: report it, and train on single records."
                )
            ctx.deliveries.hand_in(dict(zip(leaves, found[len(inputs) :], strict=True)))
        to_inputs = iter(found)
        passed_on = (
            next(to_inputs) if isinstance(x, Tensor) and x.requires_grad else None for x in own
        )
        return None, None, None, None, *passed_on
