"""The parts of a private step: model, criterion, optimizer, plan, and what enforces the plan."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from clipless.bounds import (
    ModelSnapshot,
    SensitivityReport,
    Shape,
    TracedModel,
    input_shapes,
    prove_bounds,
    seed_generators,
    traced_model,
)
from clipless.common import not_set_error
from clipless.distributed import ProcessGroup, gathered_parameters, without_sharding
from clipless.errors import PrivacyError
from clipless.kernels import GaussianNoise
from clipless.ledger import Ledger
from clipless.losses import Loss
from clipless.nn import clipping_modules
from clipless.privacy._plan import Plan, planned_parameters
from clipless.privacy._precision import arithmetic_slack
from clipless.privacy._quantile_thresholds import QuantileThresholds, planned_queries
from clipless.privacy.enforced._enforcement import ThresholdEnforcement
from clipless.privacy.enforced._inputs import InputSpec, call
from clipless.privacy.enforced._passes import PlannedUses
from clipless.privacy.enforced._report import EnforcedReport, bounded_parameters
from clipless.privacy.enforced._start import (
    notes_of,
    proved_report,
    proved_uses,
    thresholds_of,
)
from clipless.privacy.enforced._thresholds import EnforcedThresholds
from clipless.privacy.noise._correlated import CorrelatedNoise
from clipless.privacy.sampling._loader import PrivateLoader
from clipless.privacy.step import _checks as checks
from clipless.privacy.step import _refusals as refusals
from clipless.privacy.step._book import Outcomes, StepBook, budget_meter
from clipless.privacy.step._enforcement import Enforcement
from clipless.privacy.step._output_guard import Gradients, main_output
from clipless.privacy.step._projection import ModelGuard
from clipless.privacy.step._row_trial import RowTrial


class StepParts:
    """A model, its optimizer, loader and criterion, held to a plan."""

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: PrivateLoader,
        criterion: Loss,
        plan: Plan,
        ledger: Ledger,
        noise: GaussianNoise | CorrelatedNoise,
        input_shape: Shape,
        report: SensitivityReport,
        projection: bool,
        grad_scaler: Any,
        group: ProcessGroup,
    ) -> None:
        self.group = group
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self.loader, self.plan, self.ledger, self.noise = loader, plan, ledger, noise
        self.steps_taken = 0
        self._criterion_as_checked: ModelSnapshot | None = None
        """The criterion with the session's hooks: looked at in full again once it has changed."""
        self._settings_as_checked: tuple[object, ...] | None = None
        self._held_as_checked: list[int] | None = None
        """How products are rounded, and what the optimizer holds, when it was last looked at."""
        self._projection = projection
        self.allows_scaling = grad_scaler is not None
        """Whether a known gradient scaler multiplies the loss."""
        self._input_shapes = input_shapes(input_shape)
        self._parameters = dict(model.named_parameters())
        self._trainable = [self._parameters[p.name] for p in plan.parameters]
        checks.check_optimizer(optimizer, self._parameters)
        checks.check_scaler(grad_scaler, optimizer)
        self._book = StepBook(ledger, budget_meter(plan, ledger), last_step=loader.next_step - 1)
        self._gradients = Gradients(self._parameters, self._trainable)
        self.outcomes, self.trial = Outcomes(self), RowTrial(self)
        self.thresholds: EnforcedThresholds | None = None
        """The thresholds of enforced bounds; None where bounds are proved."""
        self.enforcement = Enforcement(model, self._trainable, sharded=group.sharded)
        if isinstance(report, EnforcedReport):
            self.thresholds = thresholds_of(model, report, plan)
            self.enforcement = ThresholdEnforcement(
                model, self._trainable, self.thresholds, report.settings.exact_norms
            )
        self._guard = ModelGuard(
            model, self._trainable, precision=plan.precision, projection=projection, group=group
        )
        self._graph: TracedModel | None = None
        self._spec_of_pass: InputSpec | None = None
        self._uses_by_length: dict[InputSpec, PlannedUses] = {}
        """Of enforced bounds: what the model is called on, and what it does, by length."""
        self._hold_to(plan, report)
        self._followers: QuantileThresholds | EnforcedThresholds | None = self.thresholds
        if plan.queries and self.thresholds is None:
            self._followers = QuantileThresholds(model, report, plan.loss_divisor)
        self._pass = contextlib.ExitStack()
        """What holds for as long as a forward pass runs."""
        self.inside_forward, self._thread = False, threading.current_thread()
        self._delivering = threading.Lock()
        self._drawn_for: tuple[tuple[int, int] | None, int] = None, 0
        """Which batch the model has drawn for, and in how many passes before."""

    def _hold_to(self, plan: Plan, report: SensitivityReport) -> None:
        """Scale noise by the bounds of a plan, and hold every gradient to them."""
        self.plan, self.report = plan, report
        self.enforcement.adopt(report, plan)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a privacy report should say besides the plan."""
        return (*notes_of(self.report), *self.loader.notes)

    def prove_again(self, spec: InputSpec) -> None:
        """Prove that examples stay apart in a model that has changed, or on other inputs."""
        report, thresholds = self.report, self.thresholds
        if not isinstance(report, EnforcedReport) or thresholds is None:
            raise not_set_error("enforced bounds")
        report = proved_report(self.model, spec, self.criterion, report.settings)
        check_same_parameters(self.model, report, self.plan, self._parameters, self._trainable)
        self.thresholds = self._followers = thresholds.renewed(
            bounded_parameters(self.model, report.proof, report.proved_bounds)
        )
        self.enforcement = ThresholdEnforcement(
            self.model, self._trainable, self.thresholds, report.settings.exact_norms
        )
        self._uses_by_length.clear()
        self._hold_to(self.thresholds.applied(self.plan), report)

    def move_thresholds(self) -> None:
        """Move the thresholds of enforced bounds, given the counts with their noise."""
        if self.thresholds is not None and self.thresholds.follows:
            self.thresholds.move(self.group.counts, self.plan)
            self.hold_to_thresholds()

    def hold_to_thresholds(self) -> None:
        """Hold every gradient to the thresholds as they are now, and scale noise by them."""
        if self.thresholds is None:
            raise not_set_error("enforced bounds")
        self._hold_to(self.thresholds.applied(self.plan), self.report)

    def run_eagerly(self, inputs: Sequence[Any]) -> Any:
        """Run the model on the tensors of a batch, past its hooks, and return its main output."""
        with self.casts():
            if isinstance(self.report, EnforcedReport):
                return main_output(call(self.model, self.report.proof.spec, inputs))
            return self.model.forward(*inputs)

    @contextlib.contextmanager
    def secret_draws(self) -> Iterator[None]:
        """Let what the model draws (masks of dropout) follow from the sampler's secret key.

        Privacy: draws fall on places in the batch, and without an example those after it have other
        places. So a sample that lacks it has other masks than one in which it is empty, and both
        are the same to the accountant only because nobody knows which: a seed that somebody chose,
        and perhaps published, must not decide. The generators are left as they were found.
        """
        sample = self.loader.current
        if sample is None:  # which is refused where the sample is asked for
            yield
            return
        place = sample.step, sample.micro_batch
        known, number = self._drawn_for
        self._drawn_for = place, number + 1 if place == known else 0
        device = self._trainable[0].device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            seed_generators(self.model, self.loader.seed_for_model(sample, self._drawn_for[1]))
            yield

    def casts(self) -> contextlib.AbstractContextManager[object]:
        """Let the model compute in the precision of the plan."""
        if self.plan.precision != "bfloat16":
            return contextlib.nullcontext()
        return torch.autocast(self._trainable[0].device.type, dtype=torch.bfloat16)

    def _tensors_of_call(
        self, report: EnforcedReport, inputs: Any, named: Mapping[str, Any]
    ) -> list[Tensor]:
        """The tensors that the model was called on; other ones than before are proved anew.

        That is for the first call, which shows how the model is really called.
        """
        spec = InputSpec.of(inputs, named)
        tensors = spec.tensors(inputs, named)
        if any(each.grad_fn is not None for each in tensors):
            raise refusals.computed_input()
        self._spec_of_pass = spec
        if self.loader.buckets is not None and self._is_of_another_length(spec):
            return tensors
        if spec != report.proof.spec:
            if self.steps_taken or self._book.progress is not None:
                raise refusals.other_inputs(spec, report.proof.spec)
            self.prove_again(spec)
        return tensors

    def _is_of_another_length(self, spec: InputSpec) -> bool:
        """Expect what the model does on sequences of this length, if that is all that is new."""
        report, buckets = self.report, self.loader.buckets
        if not isinstance(report, EnforcedReport) or buckets is None:
            return False
        enforcement = self.enforcement
        if not isinstance(enforcement, ThresholdEnforcement):
            raise not_set_error("enforced bounds")
        known = report.proof.spec
        if spec != known and not spec.differs_in_length(known, buckets.lengths):
            return False
        if spec not in self._uses_by_length:
            planned = report.proof.planned
            if spec != known:
                planned = proved_uses(self.model, spec, self.criterion, report)
            self._uses_by_length[spec] = planned
        enforcement.expect(self._uses_by_length[spec])
        return True

    def _renew_bounds(self) -> None:
        """The model has changed since the plan was made: prove its bounds anew."""
        self.trial.draws = None
        if isinstance(self.report, EnforcedReport):
            self.prove_again(self._spec_of_pass or self.report.proof.spec)
            self._guard.accept()
            self._guard.prepare()
            return
        known = None if self._guard.changed(numbers=False) else self._graph
        self._graph, report, plan = renewed_bounds(
            self.model, self.criterion, self.plan, self._input_shapes, known,
            parameters=self._parameters, trainable=self._trainable,
        )  # fmt: skip
        self._hold_to(plan, report)
        self._guard.accept()
        self._guard.prepare()


def renewed_bounds(
    model: nn.Module,
    criterion: Loss,
    plan: Plan,
    shapes: tuple[tuple[int, ...], ...],
    graph: TracedModel | None,
    *,
    parameters: Mapping[str, Tensor],
    trainable: Sequence[Tensor],
) -> tuple[TracedModel, SensitivityReport, Plan]:
    """Return the trace, the proof and the plan for the model as it is now.

    `graph` is the trace if the model's structure has not changed.
    """
    with gathered_parameters(model):
        graph = graph or traced_model(model, shapes)
        report = prove_bounds(graph, model, loss=criterion)
    with without_sharding(model):
        check_same_model(model, report, plan, parameters, trainable)
        slack = arithmetic_slack(
            trainable[0].dtype, precision=plan.precision, report=report, sums=plan.sums
        )
    return graph, report, replace(plan.with_bounds(report), arithmetic_slack=slack)


def check_same_model(
    model: nn.Module,
    report: SensitivityReport,
    plan: Plan,
    parameters: Mapping[str, Tensor],
    trainable: Sequence[Tensor],
) -> None:
    """Refuse changes that new bounds alone do not make good: other parameters, scales, queries."""
    check_same_parameters(model, report, plan, parameters, trainable)
    if planned_queries(model, report) != plan.queries:
        raise PrivacyError(
            "layers whose threshold follows a quantile were added or removed. Call "
            "make_private again; the ledger goes on from what is spent."
        )


def check_same_parameters(
    model: nn.Module,
    report: SensitivityReport,
    plan: Plan,
    parameters: Mapping[str, Tensor],
    trainable: Sequence[Tensor],
) -> None:
    """Refuse other parameters and scales than those of the plan."""
    now = dict(model.named_parameters())
    if [(n, id(p)) for n, p in now.items()] != [(n, id(p)) for n, p in parameters.items()]:
        raise PrivacyError(
            "parameters of the model were replaced by other tensors (a new layer, or "
            "load_state_dict(assign=True)). Call make_private again with an optimizer for the "
            "new ones; the ledger goes on from what is spent."
        )
    scale = 1 / plan.loss_divisor
    for path, module in clipping_modules(model):
        if module.loss_scale != scale:
            raise PrivacyError(
                f"{path}.loss_scale was changed to {module.loss_scale:g}. In private training "
                f"it is what the loss of every row is weighted by, {scale:g}; change `norm` or "
                "`weight_clip` instead."
            )
    planned = [(p.name, p.size) for p in plan.parameters]
    if [(p.name, p.size) for p in planned_parameters(report)] != planned:
        raise PrivacyError(
            "the trainable parameters of the model are no longer those of the plan: layers "
            "were added, removed, frozen or unfrozen. Call make_private again; the ledger "
            "goes on from what is spent."
        )
    checks.check_dtypes(trainable)
