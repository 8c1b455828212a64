"""From the arguments of the engine to a session with its hooks on, in one process or several."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from clipless.bounds._sensitivity import unwrap
from clipless.losses import Loss
from clipless.privacy._budget import Budget, BudgetMeter
from clipless.privacy._distributed import processes_present
from clipless.privacy._distributed_sharded import whole
from clipless.privacy._distributed_start import agree_on_plan, begin_together, form_team
from clipless.privacy._history import Accountant
from clipless.privacy._ledger import Ledger
from clipless.privacy._loader import PrivateLoader
from clipless.privacy._mechanism import Relation
from clipless.privacy._noise import GaussianNoise
from clipless.privacy._preparation import RunOptions, prepare
from clipless.privacy._session import TrainingSession


def start_session(
    *,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader[Any] | PrivateLoader,
    criterion: Loss,
    options: RunOptions,
    accountant: Accountant,
    seed: int | None,
    derived_seed: Callable[[str], int | None],
    open_ledger: Callable[[int, Relation], Ledger],
    earlier: Iterable[TrainingSession],
) -> TrainingSession:
    """Make the plan and attach a session; sessions that hold the same objects are detached."""
    processes = processes_present()
    if processes is not None:
        begin_together(
            processes, module=module, optimizer=optimizer, dataset=data_loader.dataset,
            criterion=criterion,
            further={
                "seed": seed, "resumed": options.resume_from is not None,
                "replay": options.replay, "compiled": bool(options.compile),
            },
        )  # fmt: skip
    with whole(unwrap(module)):
        plan, loader, shape = prepare(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            criterion=criterion,
            options=options,
            accountant=accountant,
            sampling_seed=derived_seed("sampling"),
            open_ledger=open_ledger,
        )
    for session in earlier:
        if session.shares(unwrap(module), optimizer, criterion, loader):
            session.detach()
    team, stream = None, "noise"
    if processes is not None:
        agree_on_plan(processes, plan, loader)
        # Each process draws noise of its own, from a stream that no other one draws from.
        team, stream = form_team(processes, plan, module), f"noise/{processes.rank}"
    ledger = open_ledger(plan.sampling.dataset_size, plan.relation)
    meter = None
    if plan.target_epsilon is not None:
        budget = Budget(epsilon=plan.target_epsilon, delta=plan.delta, accountant=plan.accountant)
        meter = BudgetMeter(budget=budget, ledger=ledger)
    return TrainingSession(
        model=unwrap(module),
        optimizer=optimizer,
        loader=loader,
        criterion=criterion,
        plan=plan,
        ledger=ledger,
        noise=GaussianNoise(seed=derived_seed(stream)),
        meter=meter,
        input_shape=shape,
        projection=options.projection,
        grad_scaler=options.grad_scaler,
        team=team,
    )
