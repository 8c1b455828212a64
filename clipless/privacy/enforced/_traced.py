"""A pass with thresholds as a function of tensors, which a compiler can trace.

Everything that changes from step to step comes in as a tensor: parameters, limits, and whether a
parameter is only counted. The layers are the ones of an ordinary pass, each use sealed; what they
hand in, sums and counts, comes out as the gradient of tensors that are there for nothing else. The
model's own code runs while it is traced, and not afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from clipless.kernels import Threshold, TracedCount
from clipless.privacy.enforced._inputs import call
from clipless.privacy.enforced._passes import EnforcingPass
from clipless.privacy.enforced._proof import ProvedModel
from clipless.privacy.step._enforcement import Deliveries
from clipless.privacy.step._output_guard import main_output

Casts = Callable[[], Any]


class TracedPass:
    """The tensors of a pass that is compiled, and the function of them that a compiler traces."""

    def __init__(
        self, model: nn.Module, trainable: Sequence[Tensor], names: Sequence[str],
        limits: Mapping[str, Threshold], *, proof: ProvedModel, casts: Casts,
        begin: Callable[[EnforcingPass], None],
    ) -> None:  # fmt: skip
        self._model, self.names = model, list(names)
        self._proof, self._casts, self._begin = proof, casts, begin
        device = trainable[0].device
        self.sums = [
            torch.zeros((), dtype=torch.float64, device=device).expand(each.shape).requires_grad_()
            for each in trainable
        ]
        """Whose gradients are the sums over the batch, one for each trainable parameter."""
        self.counts = torch.zeros(len(self.names), device=device, requires_grad=True)
        """Whose gradient are the counts of examples above the thresholds."""
        self._trained = {id(each): place for place, each in enumerate(trainable)}
        known = {id(each): each for each in (*model.parameters(), *model.buffers())}
        self._held = list(known.values())
        """Parameters and buffers, each once."""
        self._limits = torch.zeros(len(self.names), device=device)
        self._only_counted = torch.zeros(len(self.names), device=device)
        self.kind: Any = None
        """What the model returns, if it is an object with logits."""
        self.adopt(limits)

    @torch.no_grad()
    def adopt(self, limits: Mapping[str, Threshold]) -> None:
        """Hold gradients to these limits from the next pass on."""
        # A parameter without a limit gets no gradient.
        values = [float(limits[each].limit) if each in limits else 0.0 for each in self.names]
        only = [float(each not in limits or limits[each].only_counted) for each in self.names]
        self._limits.copy_(_rounded_down(values))
        self._only_counted.copy_(torch.tensor(only))

    def function(self) -> Callable[..., Tensor]:
        """Return the pass as a function of the model's inputs, for `torch.compile`."""
        whole = torch.compiler.allow_in_graph(self._run)
        sums, counts, held = self.sums, self.counts, self._held
        limits, only_counted = self._limits, self._only_counted

        def run(*inputs: Tensor) -> Tensor:
            found: Tensor = whole(sums, counts, limits, only_counted, held, list(inputs))
            return found

        return run

    def _run(
        self, sums: list[Tensor], counts: Tensor, limits: Tensor, only_counted: Tensor,
        held: list[Tensor], inputs: list[Tensor],
    ) -> Tensor:  # fmt: skip
        counters = [TracedCount() for _ in self.names]
        deliveries = _TracedDeliveries(sums, counts, counters)
        values = [each.detach() for each in held]
        trained = {
            id(value): self._trained[id(own)]
            for own, value in zip(self._held, values, strict=True)
            if id(own) in self._trained
        }
        thresholds = {
            name: Threshold(limits[place], counters[place], only_counted[place])
            for place, name in enumerate(self.names)
        }
        stand_for = {id(own): value for own, value in zip(self._held, values, strict=True)}
        with _holding(self._model, stand_for):
            self._begin(
                EnforcingPass(
                    self._model, self._proof.planned, limits=thresholds, places=trained,
                    batch=inputs[0].shape[0], deliveries=deliveries,
                    names={key: self.names[place] for key, place in trained.items()},
                )
            )  # fmt: skip
            with self._casts():
                output = call(self._model, self._proof.spec, inputs)
        self.kind = None if isinstance(output, Tensor) else type(output)
        main: Tensor = main_output(output)
        return main


class _TracedDeliveries(Deliveries):
    """What the uses of a traced pass hand in: it comes out behind the last of them."""

    def __init__(
        self, sums: Sequence[Tensor], counts: Tensor, counters: Sequence[TracedCount]
    ) -> None:
        super().__init__(counts.device)
        self._sums = {}
        self._counters = counters
        self.anchor = _Collected.apply(self, counts, *sums)  # type: ignore[no-untyped-call]

    def wanted_from(self, use: Any) -> bool:
        """Whether a use should hand in its gradients: for the first time."""
        wanted = not use.handed_in
        use.handed_in = True
        return wanted

    def found(self, like: Sequence[Tensor]) -> list[Tensor | None]:
        """The counts, and the sums, of which there may be none."""
        none = torch.zeros((), device=like[0].device)
        counted = [none if each.count is None else each.count for each in self._counters]
        handed_in = self._sums or {}
        return [torch.stack(counted), *(handed_in.get(place) for place in range(len(like)))]


class _Collected(torch.autograd.Function):
    """What every use depends on; so its backward pass runs when all have handed in."""

    @staticmethod
    def forward(ctx: Any, deliveries: _TracedDeliveries, counts: Tensor, *sums: Tensor) -> Tensor:
        ctx.deliveries, ctx.sums = deliveries, [each.detach() for each in sums]
        return counts.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        return None, *ctx.deliveries.found(ctx.sums)


def _rounded_down(values: Sequence[float]) -> Tensor:
    """Return numbers in float32, none of them larger: models may compute in float64."""
    exact = torch.tensor(values, dtype=torch.float64)
    nearest = exact.float()
    return torch.where(
        nearest.double() > exact, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest
    )


@contextmanager
def _holding(model: nn.Module, stand_for: Mapping[int, Tensor]) -> Iterator[None]:
    """Let tensors stand for a model's parameters and buffers."""
    before: list[tuple[dict[str, Any], str, Tensor]] = [
        (table, name, own)
        for module in model.modules()
        for table in cast(Any, (module._parameters, module._buffers))
        for name, own in table.items()
        if own is not None and id(own) in stand_for
    ]
    for table, name, own in before:
        table[name] = stand_for[id(own)]
    try:
        yield
    finally:
        for table, name, own in before:
            table[name] = own
