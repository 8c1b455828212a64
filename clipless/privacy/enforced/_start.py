"""How a run with enforced bounds begins: its proof, its thresholds, and what it refuses."""

from __future__ import annotations

from typing import Any

from torch import nn

from clipless.bounds import unwrap_module
from clipless.distributed import is_sharded
from clipless.errors import PrivacyError
from clipless.losses import Loss
from clipless.privacy._options import PrivacyOptions
from clipless.privacy._plan import Plan
from clipless.privacy.enforced._inputs import InputSpec, spec_of_batch
from clipless.privacy.enforced._options import EnforcedBounds
from clipless.privacy.enforced._passes import PlannedUses
from clipless.privacy.enforced._proof import prove_rows_apart
from clipless.privacy.enforced._report import (
    EnforcedReport,
    bounded_parameters,
    enforced_report,
)
from clipless.privacy.enforced._thresholds import EnforcedThresholds
from clipless.privacy.sampling._loader import PrivateLoader


def enforced_plan(
    module: nn.Module, loader: PrivateLoader, *, criterion: Loss, settings: EnforcedBounds,
    options: PrivacyOptions,
) -> EnforcedReport:  # fmt: skip
    """Prove that the examples of a model stay apart, and return the bounds it begins with."""
    model = unwrap_module(module)
    if is_sharded(model):
        raise PrivacyError(
            "bounds='enforced' does not go with sharded models: their layers have a part of each "
            "parameter. Leave sharding out; ranks with whole models are fine."
        )
    if options.batches.input_shape is not None:
        raise PrivacyError(
            "bounds='enforced' takes shapes from the first batch: leave input_shape out"
        )
    return proved_report(model, spec_of_batch(loader.first_batch(), model), criterion, settings)


def proved_report(
    model: nn.Module, spec: InputSpec, criterion: Loss | float, settings: EnforcedBounds
) -> EnforcedReport:
    """Prove that examples stay apart on such inputs, and return the bounds."""
    proof = prove_rows_apart(model, spec, exact=settings.exact_norms)
    return enforced_report(model, proof, settings=settings, loss=criterion)


def proved_uses(
    model: nn.Module, spec: InputSpec, criterion: Loss, report: EnforcedReport
) -> PlannedUses:
    """Prove that examples stay apart on inputs of another length, under the bounds of a report."""
    proof = prove_rows_apart(model, spec, exact=report.settings.exact_norms)
    uses = {name: len(each) for name, each in proof.planned.uses.items()}
    known = {name: len(each) for name, each in report.proof.planned.uses.items()}
    constant = criterion.lipschitz_for(proof.output_shape)
    if uses != known or constant > report.loss_lipschitz * (1 + 1e-9):
        raise PrivacyError(
            "on sequences of another length the model uses its parameters more or less often, or "
            "its loss has a larger constant: bounds of one length do not hold for the other. Pad "
            "all records to one length."
        )
    return proof.planned


def thresholds_of(model: nn.Module, report: EnforcedReport, plan: Plan) -> EnforcedThresholds:
    """Return the thresholds that a run of this plan begins with."""
    parameters = bounded_parameters(model, report.proof, report.proved_bounds)
    return EnforcedThresholds(parameters, report.settings, plan.noise, plan.loss_divisor)


def notes_of(report: Any) -> tuple[str, ...]:
    """Return what a privacy report should say of the bounds."""
    if not isinstance(report, EnforcedReport):
        return ()
    by = report.bounded_by
    enforced = sum(word == "enforcement" for word in by.values())
    proved = sum(word == "proof" for word in by.values())
    follow = (
        f"follow the {report.settings.quantile:.0%} quantile of their parameters, by counts that "
        "are released with each step"
        if report.settings.follows else "are fixed"
    )  # fmt: skip
    return (
        f"Bounds of {enforced} parameters are enforced in the backward pass, those of {proved} "
        f"proved by the architecture; thresholds {follow}. That examples stay apart was proved by "
        f"following the batch axis through {report.proof.operators} operators, and relies on their "
        "rules; autograd's own backward passes are taken to keep what forward passes keep.",
    )
