"""From the arguments of the engine to a plan and a private loader, with everything checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from clipless.bounds import sensitivity
from clipless.bounds._sensitivity import Shape, unwrap
from clipless.errors import PrivacyError
from clipless.losses import Loss
from clipless.privacy._accounting import default_delta, epsilon
from clipless.privacy._calibration import noise_multiplier_for
from clipless.privacy._choices import (
    SamplingName,
    coefficients,
    example_shape,
    named_sampling,
    parameter_dtype,
    relation_for,
)
from clipless.privacy._distributed import rank_and_size
from clipless.privacy._following import planned_queries
from clipless.privacy._history import Accountant
from clipless.privacy._inspection import check_criterion
from clipless.privacy._ledger import Ledger
from clipless.privacy._loader import PrivateLoader
from clipless.privacy._mechanism import Relation, Sampling
from clipless.privacy._noise import NoiseStrategy
from clipless.privacy._plan import Plan, arithmetic_slack, planned_parameters
from clipless.privacy._precision import Precision
from clipless.privacy._resume import require_same_plan
from clipless.privacy._views import Augment
from clipless.privacy._wrapping import check_wrappable


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """All that a run is asked to be, besides the objects that it is made of.

    The keyword arguments of `PrivacyEngine.make_private`, which explains them. Without
    `noise_multiplier`, the noise is found from `target_epsilon`.
    """

    noise_multiplier: float | None
    target_epsilon: float | None
    target_delta: float | None
    sampling: SamplingName | Sampling
    relation: Relation | str | None
    noise: NoiseStrategy
    noise_coefficients: Mapping[str, float] | None
    epochs: float | None
    steps: int | None
    micro_batch_size: int | None
    pad: bool | None
    augment: Augment | None
    views: int | None
    input_shape: Shape | None
    precision: Precision
    compile: bool | str
    grad_scaler: Any
    projection: bool
    resume_from: Mapping[str, Any] | None
    replay: bool


def prepare(
    *,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader[Any] | PrivateLoader,
    criterion: Loss,
    options: RunOptions,
    accountant: Accountant,
    sampling_seed: int | None,
    open_ledger: Callable[[int, Relation], Ledger],
) -> tuple[Plan, PrivateLoader, Shape]:
    """Check everything and make the plan; model, optimizer and criterion are not changed yet."""
    check_criterion(criterion)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PrivacyError(f"{type(optimizer).__name__} is not a torch.optim.Optimizer")
    loader = _private_loader(data_loader, options, sampling_seed)
    given = options.input_shape
    shape = given if given is not None else example_shape(loader.dataset)
    report = sensitivity(module, loss=criterion, input_shape=shape)
    relation = relation_for(options.relation, loader.sampling)
    size = loader.sampling.dataset_size
    delta = default_delta(size) if options.target_delta is None else options.target_delta
    steps = options.steps
    if options.epochs is not None:
        steps = round(options.epochs * loader.steps_per_epoch)
    ledger = open_ledger(size, relation)
    resume_from = options.resume_from
    begun = None if resume_from is None else Plan.from_dict(resume_from["plan"])
    noise_multiplier = options.noise_multiplier
    if noise_multiplier is None and begun is not None:
        noise_multiplier = begun.noise_multiplier
    if noise_multiplier is None:
        assert options.target_epsilon is not None
        assert steps is not None
        noise_multiplier = noise_multiplier_for(
            target_epsilon=options.target_epsilon, target_delta=delta, steps=steps,
            sampling=loader.sampling, relation=relation, accountant=accountant,
            history=ledger.history(),
        )  # fmt: skip
    plan = Plan(
        sampling=loader.sampling,
        relation=relation,
        noise_multiplier=float(noise_multiplier),
        noise=options.noise,
        noise_coefficients=coefficients(options.noise_coefficients, report),
        parameters=planned_parameters(report),
        queries=planned_queries(unwrap(module), report),
        views=loader.views,
        loss=report.loss,
        loss_lipschitz=report.loss_lipschitz,
        precision=options.precision,
        arithmetic_slack=arithmetic_slack(
            parameter_dtype(module),
            precision=options.precision,
            model=unwrap(module),
            report=report,
        ),
        accountant=accountant,
        delta=delta,
        target_epsilon=options.target_epsilon,
        steps=steps,
    )
    if not plan.parameters:
        raise PrivacyError("the model has no trainable parameters")
    # Fails now, and not at the first question, if this combination cannot be accounted for.
    epsilon([(plan.mechanism, 1)], delta, accountant=accountant)
    if not options.projection and plan.noise_multiplier != 0:
        raise PrivacyError(
            "without projection the weights leave their constraint sets and the bounds no "
            "longer hold: projection=False needs noise_multiplier=0, which guarantees nothing."
        )
    if begun is not None and resume_from is not None:
        require_same_plan(begun, plan)
        loader.load_state_dict(resume_from["sampler"])
        if not options.replay:
            loader.renew()
    return plan, loader, shape


def _private_loader(
    data_loader: DataLoader[Any] | PrivateLoader, options: RunOptions, seed: int | None
) -> PrivateLoader:
    sampling, given = options.sampling, (options.micro_batch_size, options.augment, options.views)
    if isinstance(data_loader, PrivateLoader):
        if sampling != "poisson" or options.pad or any(each is not None for each in given):
            raise PrivacyError(
                "this loader is private already: give sampling, micro_batch_size, pad, augment "
                "and views to it"
            )
        if data_loader.place != rank_and_size():
            raise PrivacyError(
                f"this loader hands out part {data_loader.place[0]} of {data_loader.place[1]} of "
                f"each sample, but this is process {rank_and_size()[0]} of {rank_and_size()[1]}. "
                "Leave rank and world_size out, and make it after init_process_group."
            )
        return data_loader
    batch_size = check_wrappable(data_loader)
    size = len(data_loader.dataset)  # type: ignore[arg-type]
    if isinstance(sampling, str):
        sampling = named_sampling(sampling, size, batch_size)
    return PrivateLoader.from_data_loader(
        data_loader,
        sampling=sampling,
        micro_batch_size=options.micro_batch_size,
        pad=bool(options.compile) if options.pad is None else options.pad,
        augment=options.augment,
        views=options.views,
        seed=seed,
    )
