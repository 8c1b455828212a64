"""Enforcement for any network: each use of a parameter is held to its threshold."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from clipless.bounds import SensitivityReport
from clipless.common import not_set_error
from clipless.privacy._plan import Plan
from clipless.privacy.enforced._calls import StandIns
from clipless.privacy.enforced._passes import EnforcingPass, PlannedUses
from clipless.privacy.enforced._report import EnforcedReport
from clipless.privacy.enforced._thresholds import EnforcedThresholds
from clipless.privacy.enforced._traced import Casts, TracedPass
from clipless.privacy.step._enforcement import (
    BackwardPass,
    Deliveries,
    Enforcement,
    norm_margin,
)


class ThresholdEnforcement(Enforcement):
    """Holds what one example adds to each parameter's gradient to a threshold, in any network."""

    def __init__(
        self, model: nn.Module, trainable: Sequence[Tensor], thresholds: EnforcedThresholds,
        exact: bool | None,
    ) -> None:  # fmt: skip
        super().__init__(model, trainable)
        self._thresholds, self._exact = thresholds, exact
        self._report: EnforcedReport | None = None
        self._room = 0.0
        self._traced: TracedPass | None = None
        self._planned: PlannedUses | None = None

    def adopt(self, report: SensitivityReport, plan: Plan) -> None:
        """Hold gradients to the thresholds as they are now, from the next forward pass on."""
        if not isinstance(report, EnforcedReport):
            raise TypeError("enforced bounds need an EnforcedReport")
        margin = norm_margin(self._trainable[0].dtype, plan)
        room = (1 + plan.arithmetic_slack) * (1 - margin) / (1 + plan.sums.slack)
        self._room = room / plan.loss_divisor
        self._report = report
        self._limits = self._thresholds.limits(self._room)
        if self._traced is not None:
            self._traced.adopt(self._limits)

    def expect(self, planned: PlannedUses) -> None:
        """Expect these uses from the next pass on: those of inputs of another length."""
        self._planned = planned

    def traced_pass(self, casts: Casts) -> TracedPass:
        """Return the pass for a compiler, which may trace it while layers stand in (`stand_in`)."""
        if self._report is None:
            raise not_set_error("the report of the bounds")
        names = {id(p): name for name, p in self._model.named_parameters()}
        self._traced = TracedPass(
            self._model, self._trainable, [names[id(each)] for each in self._trainable],
            self._limits, proof=self._report.proof, casts=casts,
            begin=lambda begun: self._stand_ins.begin(begun),
        )  # fmt: skip
        return self._traced

    @contextmanager
    def stand_in(self) -> Iterator[None]:
        """Let the layers hold their gradients to thresholds."""
        self._stand_ins = StandIns(self._model, self._exact)
        with self._stand_ins.installed():
            yield

    def begin_pass(self, inputs: Sequence[Any]) -> None:
        """Count uses anew: another pass of the model begins, on these inputs."""
        if self._report is None:
            raise not_set_error("the report of the bounds")
        self.rows = next((x.shape[0] for x in inputs if isinstance(x, Tensor)), 0)
        if torch.is_grad_enabled():
            self.deliveries = Deliveries(self._trainable[0].device)
        self._stand_ins.begin(
            EnforcingPass(
                self._model, self._planned or self._report.proof.planned, limits=self._limits,
                places=self.places,
                batch=self.rows, deliveries=self.deliveries,
            )
        )  # fmt: skip

    def renew_leaves(self) -> None:
        """Nothing is kept from one pass to the next: each use makes leaves of its own."""

    def as_returned(self, output: Any) -> Any:
        """Return a compiled pass's output as the model returns it, if that is an object."""
        kind = None if self._traced is None or not isinstance(output, Tensor) else self._traced.kind
        return output if kind is None else kind(logits=output)

    def backward_pass(self, output: Tensor, shares: Tensor | None = None) -> BackwardPass:
        """Return the backward pass from an output of the present pass to its parameters."""
        if self.deliveries is not None:
            self.deliveries.shares = shares
        return functools.partial(self.gradients, output, deliveries=self.deliveries)

    def gradients(
        self,
        output: Tensor,
        cotangents: Tensor,
        leaves: Sequence[Tensor] | None = None,
        deliveries: Deliveries | None = None,
    ) -> list[Tensor | None]:
        """Return the gradients of the trainable parameters: what the uses of layers hand in."""
        deliveries = deliveries or self.deliveries
        if deliveries is None:
            raise not_set_error("the pass that gradients belong to")
        if not output.requires_grad:
            return [None] * len(self._trainable)
        traced, found = self._traced, list[Tensor | None]()
        asked = [deliveries.anchor]
        if traced is not None:
            asked += [traced.counts, *traced.sums]

        def run_backwards() -> None:
            found.extend(torch.autograd.grad(output, asked, cotangents, allow_unused=True)[1:])

        handed_in = deliveries.collect(run_backwards)
        if handed_in or traced is None or found[0] is None:
            return [handed_in.get(place) for place in range(len(self._trainable))]
        # Compiled code hands in nothing: its sums and counts are gradients.
        self._thresholds.add_counted(dict(zip(traced.names, found[0], strict=True)), len(output))
        return found[1:]
