"""From the arguments of the engine to a plan and a private loader, with everything checked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader

from clipless.accounting import (
    Accountant,
    FixedOrder,
    LargeDelta,
    Relation,
    RenyiFilter,
    Sampling,
    chosen_delta,
    epsilon,
    meter_accountant,
    steps_paid_together,
)
from clipless.bounds import SensitivityReport, Shape, sensitivity, unwrap_module
from clipless.common import not_set_error
from clipless.distributed import is_sharded, rank_and_size
from clipless.errors import PrivacyError
from clipless.ledger import Ledger, accountant_of, delta_of
from clipless.losses import Loss
from clipless.privacy._defaults import (
    example_shape,
    named_sampling,
    noise_coefficients,
    parameter_dtype,
    relation_for,
)
from clipless.privacy._options import PrivacyOptions
from clipless.privacy._plan import Plan, planned_parameters
from clipless.privacy._precision import arithmetic_slack, sum_rounding
from clipless.privacy._quantile_thresholds import planned_queries
from clipless.privacy._resume import (
    plan_to_resume,
    require_same_plan,
    require_same_users,
    unit_of,
)
from clipless.privacy._schedule import Schedule
from clipless.privacy.enforced._options import enforced_bounds
from clipless.privacy.enforced._report import EnforcedReport
from clipless.privacy.enforced._start import enforced_plan, thresholds_of
from clipless.privacy.enforced._validate import exploding_bounds
from clipless.privacy.noise._correlated_options import correlated_options
from clipless.privacy.noise._scales import NoiseStrategy
from clipless.privacy.sampling._batch_options import BatchOptions
from clipless.privacy.sampling._loader import PrivateLoader
from clipless.privacy.sampling._samplers import largest_sample
from clipless.privacy.sampling._streams import epochs_of, is_stream
from clipless.privacy.sampling._wrapping import check_wrappable
from clipless.privacy.step._checks import check_criterion
from clipless.privacy.step._refusals import users_are_sampled, users_run_eagerly

OpenLedger = Callable[[int, Relation, Callable[[], RenyiFilter | None], str | None], Ledger]
"""Opens the ledger for so many units, a relation, and the units' digest; a new one with the filter
declared."""


@dataclass(frozen=True, kw_only=True)
class PrivacyTarget:
    """The budget of a run: its noise, or the epsilon that the noise is found from, or both."""

    noise_multiplier: float | None
    target_epsilon: float | None
    target_delta: float | None


def prepare(
    *,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader[Any] | PrivateLoader,
    criterion: Loss,
    goal: PrivacyTarget,
    options: PrivacyOptions,
    resume_from: Mapping[str, Any] | None,
    accountant: Accountant,
    sampling_seed: int | None,
    open_ledger: OpenLedger,
) -> tuple[Plan, PrivateLoader, Shape, SensitivityReport]:
    """Check everything and make the plan; model, optimizer and criterion are not changed yet."""
    check_criterion(criterion)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PrivacyError(f"{type(optimizer).__name__} is not a torch.optim.Optimizer")
    loader = _private_loader(data_loader, options, sampling_seed)
    if loader.unit is not None and (options.compile or is_sharded(unwrap_module(module))):
        raise users_run_eagerly()
    settings = enforced_bounds(options.bounds)
    if loader.buckets is not None and (settings is None or options.compile):
        raise PrivacyError(
            "Buckets are for bounds='enforced', uncompiled: proved bounds, and compiled code, are "
            "for inputs of one shape. Pad all records to one length, or leave compile out."
        )
    shape: Shape = ()
    if settings is None:
        shape = options.batches.input_shape or loader.input_shape or _example_shape(loader)
    report = (
        sensitivity(module, loss=criterion, input_shape=shape)
        if settings is None
        else enforced_plan(module, loader, criterion=criterion, settings=settings, options=options)
    )
    _warn_of_unused(report)
    if goal.noise_multiplier != 0:
        for warning in exploding_bounds(report):
            warnings.warn(warning, stacklevel=6)
    relation = relation_for(options.relation, loader.sampling)
    size = loader.sampling.dataset_size
    begun = plan_to_resume(resume_from)
    if begun is None and steps_paid_together(loader.sampling) > 1 and loader.next_step:
        raise PrivacyError(
            "this loader has begun a pass for another run: make a new one, whose passes begin with "
            "the first example, or group"
        )
    target_delta = goal.target_delta
    if target_delta is None and begun is not None:
        target_delta = LargeDelta(begun.delta)  # was agreed on when the run began
    delta = chosen_delta(target_delta, size)
    steps = options.steps
    if options.epochs is not None:
        steps = round(options.epochs * loader.steps_per_epoch)
    correlated = correlated_options(options.noise)
    strategy, strategy_error = None, None
    if correlated is not None:
        if begun is not None and begun.strategy is not None:  # what a search finds may differ
            strategy, strategy_error = begun.strategy, begun.strategy_error
        else:
            strategy, error = correlated.chosen(optimizer, loader.sampling, steps=steps)
            strategy_error = None if strategy is None else error

    def declare() -> RenyiFilter | None:
        if accountant != "filter":
            return None
        if goal.target_epsilon is None:
            raise PrivacyError("accountant='filter' declares a budget: give target_epsilon")
        return RenyiFilter.for_run(
            epsilon=goal.target_epsilon, delta=delta, sampling=loader.sampling,
            relation=relation, steps=_releases(loader.sampling, steps),
            noise_multiplier=goal.noise_multiplier,
        )  # fmt: skip

    if begun is not None:
        require_same_users(resume_from, begun, loader)
    ledger = open_ledger(size, relation, declare, unit_of(loader))
    relation = ledger.relation  # an old ledger is continued under its own
    accountant = accountant_of(ledger, accountant)
    if ledger.filter is not None:
        delta = delta_of(ledger, epsilon=goal.target_epsilon, delta=target_delta)
    noise_multiplier = goal.noise_multiplier
    if noise_multiplier is None and begun is not None:
        noise_multiplier = begun.noise_multiplier
    if noise_multiplier is None:
        if goal.target_epsilon is None:
            raise not_set_error("target epsilon")
        if steps is None:
            raise not_set_error("steps")
        unit = Schedule(
            sampling=loader.sampling, relation=relation, strategy=strategy, noise_multiplier=1.0
        )
        noise_multiplier = unit.fitted(
            target_epsilon=goal.target_epsilon, target_delta=delta, steps=steps,
            accountant=meter_accountant(accountant), history=ledger.history(),
        ).noise_multiplier  # fmt: skip
    given_noise = options.noise
    weights = given_noise if isinstance(given_noise, Mapping) else None
    scales: NoiseStrategy = "per_layer"
    if weights is None:
        scales = cast("NoiseStrategy", options.noise) if correlated is None else correlated.scales
    sums = sum_rounding(
        report,
        rows=largest_sample(loader.sampling) * loader.views,
        records=1 if loader.unit is None else loader.unit.records,
        dtype=parameter_dtype(module),
        device=next(module.parameters()).device.type,
        processes=rank_and_size()[1] if is_sharded(unwrap_module(module)) else 1,
    )
    if settings is not None and settings.follows and scales == "per_layer" and weights is None:
        weights = dict.fromkeys(report.gradient_bounds, 1.0)  # counts then get a small part
    plan = Plan(
        sampling=loader.sampling,
        relation=relation,
        noise_multiplier=float(noise_multiplier),
        noise=scales,
        noise_coefficients=noise_coefficients(weights, report),
        parameters=planned_parameters(report),
        queries=planned_queries(unwrap_module(module), report),
        views=loader.views,
        user_records=None if loader.unit is None else loader.unit.records,
        loss=report.loss,
        loss_lipschitz=report.loss_lipschitz,
        precision=options.precision,
        sums=sums,
        arithmetic_slack=arithmetic_slack(
            parameter_dtype(module), precision=options.precision, report=report, sums=sums
        ),
        accountant=accountant,
        delta=delta,
        target_epsilon=goal.target_epsilon,
        steps=steps,
        strategy=strategy,
        strategy_error=strategy_error,
    )
    if isinstance(report, EnforcedReport):
        plan = thresholds_of(unwrap_module(module), report, plan).applied(plan)
        shape = report.input_shapes
    if not plan.parameters:
        raise PrivacyError("the model has no trainable parameters")
    # Fails now, and not at the first question, if this combination cannot be accounted for.
    epsilon([(plan.mechanism, 1)], delta, accountant=meter_accountant(accountant))
    if options.bounds == "none" and plan.noise_multiplier != 0:
        raise PrivacyError(
            "without projection the weights leave their constraint sets and the bounds no "
            "longer hold: bounds='none' needs noise_multiplier=0, which guarantees nothing."
        )
    if begun is not None:
        require_same_plan(begun, plan)
    return plan, loader, shape, report


def _private_loader(
    data_loader: DataLoader[Any] | PrivateLoader, options: PrivacyOptions, seed: int | None
) -> PrivateLoader:
    sampling, batches = options.sampling, options.batches
    if isinstance(data_loader, PrivateLoader):
        data_loader.check_free()
        if options.unit is not None:
            raise PrivacyError("this loader is private already: give unit to it")
        own = replace(batches, pad=batches.pad or None, input_shape=None)
        if sampling != "poisson" or own != BatchOptions():
            raise PrivacyError(
                "this loader is private already: give sampling and batches (micro_batch_size, pad, "
                "augment, views) to it"
            )
        if data_loader.place != rank_and_size():
            raise PrivacyError(
                f"this loader hands out part {data_loader.place[0]} of {data_loader.place[1]} of "
                f"each sample, but this is process {rank_and_size()[0]} of {rank_and_size()[1]}. "
                "Leave rank and world_size out, and make it after init_process_group."
            )
        return data_loader
    ordered = sampling == "epochs" or isinstance(sampling, FixedOrder)
    if ordered and options.unit is not None:
        raise users_are_sampled()
    if sampling == "epochs":
        sampling = epochs_of(data_loader)
    if not (isinstance(sampling, FixedOrder) and is_stream(data_loader)):
        batch_size = check_wrappable(data_loader)
        size = len(data_loader.dataset)  # type: ignore[arg-type]
        if options.unit is not None:
            size = options.unit.number
        if isinstance(sampling, str):
            sampling = named_sampling(sampling, size, batch_size)
    if batches.pad is None:
        # Batches of a fixed order have one size, but for the last of a pass.
        whole = isinstance(sampling, FixedOrder) and (
            is_stream(data_loader)
            or sampling.drop_last
            or not sampling.dataset_size % sampling.batch_size
        )
        batches = replace(batches, pad=bool(options.compile) and not whole)
    return PrivateLoader(
        data_loader, sampling=sampling, unit=options.unit, batches=batches, insecure_seed=seed
    )


def _example_shape(loader: PrivateLoader) -> Shape:
    """Return the shape of an example; of a stream, in the first batch."""
    if not is_stream(loader.dataset):
        return example_shape(loader.dataset)
    batch = loader.first_batch()
    first = batch[0] if isinstance(batch, tuple | list) else batch
    if not isinstance(first, torch.Tensor):
        raise PrivacyError("the shape of an example cannot be told from the stream: pass "
                           "BatchOptions(input_shape=...)")  # fmt: skip
    return tuple(first.shape[1:])


def _releases(sampling: Sampling, steps: int | None) -> int | None:
    """Return how many releases so many steps are: a pass or a round of groups is one."""
    return None if steps is None else -(-steps // steps_paid_together(sampling))


def _warn_of_unused(report: SensitivityReport) -> None:
    """Say which trainable parameters will not be trained, because their gradient is zero."""
    unused = [p.name for p in report.parameters if p.trainable and p.gradient_bound == 0]
    if unused:
        warnings.warn(
            f"{', '.join(unused)}: the forward pass does not depend on it. Its gradient will be "
            "zero, also if something is switched on later. Freeze it (requires_grad_(False)), take "
            "it out, or call make_private again when it is used.",
            stacklevel=7,
        )
