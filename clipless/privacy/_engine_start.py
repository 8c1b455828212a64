"""From the arguments of the engine to a session with its hooks on, in one process or several."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from clipless.accounting import Accountant, Relation, RenyiFilter
from clipless.bounds import unwrap_module
from clipless.common import not_set_error
from clipless.distributed import SingleProcess, gathered_parameters, processes_present
from clipless.errors import PrivacyError
from clipless.ledger import Ledger
from clipless.losses import Loss
from clipless.privacy._agreement import (
    agree_on_beginning,
    agree_on_plan,
    form_group,
    ledger_together,
)
from clipless.privacy._bounds_options import ProvedBounds, products_clipped
from clipless.privacy._defaults import example_shape
from clipless.privacy._options import PrivacyOptions
from clipless.privacy._preparation import PrivacyTarget, prepare
from clipless.privacy._resume import unit_of
from clipless.privacy.noise._of_plan import noise_of
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
    books: EngineLedger,
    run: int,
) -> TrainingSession:
    """Check everything, make the plan and a session, which takes hold of nothing yet."""
    processes = processes_present() or SingleProcess()
    agree_on_beginning(
        processes, module=module, optimizer=optimizer, dataset=getattr(data_loader, "dataset", ()),
        criterion=criterion,
        further={
            "insecure_seed": books.insecure_seed, "resumed": resume_from is not None,
            "replay": options.replay, "compiled": bool(options.compile),
        },
    )  # fmt: skip
    clipped = ExitStack()  # undone if what follows fails
    with clipped, gathered_parameters(unwrap_module(module)):
        if isinstance(options.bounds, ProvedBounds):
            dataset = getattr(data_loader, "dataset", ())
            shape = options.batches.input_shape or example_shape(dataset)
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
            sampling_seed=books.derived_seed("sampling", run=run),
            open_ledger=books.open,
        )
    agree_on_plan(processes, plan)
    group = form_group(processes, plan, module)
    ledger = books.open(plan.sampling.dataset_size, plan.relation, lambda: None, unit_of(loader))
    try:
        return TrainingSession(
            model=unwrap_module(module),
            optimizer=optimizer,
            loader=loader,
            criterion=criterion,
            plan=plan,
            ledger=ledger,
            noise=noise_of(plan, insecure_seed=books.derived_seed(group.noise_stream, run=run)),
            input_shape=shape,
            report=report,
            projection=options.bounds != "none",
            grad_scaler=options.grad_scaler,
            group=group,
        )
    except BaseException:
        group.leave()
        raise


class EngineLedger:
    """The ledger of an engine: where it is, opened once and for all runs; and the seeds of tests.

    A seed differs for sampling and noise, and from one run of the engine to the next: noise that
    repeats could be removed by taking the difference of two releases.
    """

    def __init__(
        self, place: str | os.PathLike[str] | Ledger | None, *, insecure_seed: int | None
    ) -> None:
        self._place = place
        self.insecure_seed = insecure_seed
        self.ledger: Ledger | None = place if isinstance(place, Ledger) else None
        self.opened = False

    def open(
        self,
        dataset_size: int,
        relation: Relation,
        declare: Callable[[], RenyiFilter | None],
        unit: str | None,
    ) -> Ledger:
        """Return the ledger, for data of this size and units; `declare` says with which filter to
        begin.
        """
        if not self.opened:
            place = self._place
            self.ledger = ledger_together(
                lambda: place if isinstance(place, Ledger)
                else _opened(place, dataset_size, relation, declare, unit)
            )  # fmt: skip
            self.opened = True
        ledger = self.ledger
        if ledger is None:
            raise not_set_error("ledger")
        if ledger.dataset_size != dataset_size or not relation.continues(ledger.relation):
            raise PrivacyError(
                f"this engine's ledger is kept for {ledger.dataset_size} examples under "
                f"{ledger.relation}, not for {dataset_size} under {relation}. Use one engine for "
                "each data set."
            )
        ledger.require_unit(unit)
        return ledger

    def forget(self) -> None:
        """Let go of a ledger that was opened for nothing: the next call may be about other data."""
        ledger = self.ledger
        if isinstance(self._place, Ledger) or ledger is None:
            return
        ledger.close()
        if ledger.path is not None and not ledger.entries()[1:]:  # nothing but that it was opened
            os.unlink(ledger.path)
        self.ledger, self.opened = None, False

    def derived_seed(self, purpose: str, *, run: int) -> int | None:
        """Return the seed of one purpose in one run, if there is a seed."""
        if self.insecure_seed is None:
            return None
        history = f"{0 if self.ledger is None else self.ledger.releases}/{run}"
        text = f"clipless/{purpose}/{self.insecure_seed}/{history}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def _opened(
    place: str | os.PathLike[str] | None,
    dataset_size: int,
    relation: Relation,
    declare: Callable[[], RenyiFilter | None],
    unit: str | None,
) -> Ledger:
    """Continue the ledger that is there, or begin one, with the filter that is declared."""
    there = place is not None and os.path.exists(place) and os.path.getsize(place) > 0
    filter = None if there else declare()
    return Ledger(place, dataset_size=dataset_size, relation=relation, filter=filter, unit=unit)
