"""From the arguments of the engine to a session with its hooks on, in one process or several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from clipless.accounting import Accountant
from clipless.bounds import unwrap_module
from clipless.distributed import SingleProcess, gathered_parameters, processes_present
from clipless.losses import Loss
from clipless.privacy._agreement import agree_on_beginning, agree_on_plan, form_group
from clipless.privacy._bounds_options import ProvedBounds, products_clipped
from clipless.privacy._correlated_noise import noise_of
from clipless.privacy._defaults import example_shape
from clipless.privacy._options import PrivacyOptions
from clipless.privacy._preparation import OpenLedger, PrivacyTarget, prepare
from clipless.privacy.sampling._loader import PrivateLoader
from clipless.privacy.step._session import TrainingSession


def start_session(
    *,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader[Any] | PrivateLoader,
    criterion: Loss,
    goal: PrivacyTarget,
    options: PrivacyOptions,
    resume_from: Mapping[str, Any] | None,
    accountant: Accountant,
    insecure_seed: int | None,
    derived_seed: Callable[[str], int | None],
    open_ledger: OpenLedger,
) -> TrainingSession:
    """Check everything, make the plan and a session, which takes hold of nothing yet."""
    processes = processes_present() or SingleProcess()
    agree_on_beginning(
        processes, module=module, optimizer=optimizer, dataset=getattr(data_loader, "dataset", ()),
        criterion=criterion,
        further={
            "insecure_seed": insecure_seed, "resumed": resume_from is not None,
            "replay": options.replay, "compiled": bool(options.compile),
        },
    )  # fmt: skip
    clipped = ExitStack()  # undone if what follows fails
    with clipped, gathered_parameters(unwrap_module(module)):
        if isinstance(options.bounds, ProvedBounds):
            dataset = getattr(data_loader, "dataset", ())
            shape = options.input_shape or example_shape(dataset)
            clipped.enter_context(
                products_clipped(module, options.bounds, loss=criterion, input_shape=shape)
            )
        plan, loader, shape, report = prepare(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            criterion=criterion,
            goal=goal,
            options=options,
            resume_from=resume_from,
            accountant=accountant,
            sampling_seed=derived_seed("sampling"),
            open_ledger=open_ledger,
        )
    agree_on_plan(processes, plan)
    group = form_group(processes, plan, module)
    ledger = open_ledger(plan.sampling.dataset_size, plan.relation, lambda: None)
    try:
        return TrainingSession(
            model=unwrap_module(module),
            optimizer=optimizer,
            loader=loader,
            criterion=criterion,
            plan=plan,
            ledger=ledger,
            noise=noise_of(plan, insecure_seed=derived_seed(group.noise_stream)),
            input_shape=shape,
            report=report,
            projection=options.bounds != "none",
            grad_scaler=options.grad_scaler,
            group=group,
        )
    except BaseException:
        group.leave()
        raise
