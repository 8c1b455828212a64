"""The private run behind somebody else's training loop: its settings, start, steps and end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from clipless.errors import PrivacyError
from clipless.losses import Loss
from clipless.privacy import (
    BatchOptions,
    EnforcedBounds,
    Ledger,
    PrivacyEngine,
    PrivacyOptions,
    PrivateLoader,
)
from clipless.training import EpsilonGauge


@dataclass(frozen=True, kw_only=True)
class LoopPrivacy:
    """The budget and the options of a private run in somebody else's loop.

    Args:
        target_epsilon: the budget, at `target_delta`: the least noise is found that keeps it.
        noise_multiplier: train with this noise; with `target_epsilon`, until that is reached.
        target_delta: by default 0.1/N, rounded down.
        ledger: the file that counts what is released. A run without one cannot be resumed.
        accountant, insecure_seed: as for `PrivacyEngine`.
        options: of the guarantee: sampling, precision, augmentation and the like. How long
            training lasts is what the loop says.
        further: other arguments of `PrivacyEngine.make_private`.
    """

    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    target_delta: float | None = None
    ledger: str | os.PathLike[str] | Ledger | None = None
    accountant: Any = "pld"
    insecure_seed: int | None = None
    options: PrivacyOptions = PrivacyOptions()
    further: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what could only be wrong."""
        if self.target_epsilon is None and self.noise_multiplier is None:
            raise ValueError("give target_epsilon, or noise_multiplier")
        if self.options.epochs is not None or self.options.steps is not None:
            raise ValueError(
                "epochs and steps are given to the trainer, whose schedule the noise is found for: "
                "leave them out of options"
            )

    @property
    def enforced(self) -> bool:
        """Whether bounds are enforced, in a model of any kind, instead of proved."""
        bounds = self.further.get("bounds", self.options.bounds)
        return bounds == "enforced" or isinstance(bounds, EnforcedBounds)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> LoopPrivacy:
        """Return the settings from keywords; what is no field is handed to `make_private`."""
        own = {each.name for each in fields(cls)} - {"further"}
        further = {name: value for name, value in given.items() if name not in own}
        return cls(**{k: v for k, v in given.items() if k in own}, further=further)

    def begin(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        criterion: Loss,
        steps: int | None,
        batches: BatchOptions,
        saved: Mapping[str, Any] | None = None,
    ) -> LoopRun:
        """Make the run private, or continue a `saved` one."""
        ledger = self.ledger
        if ledger is None and saved is not None:
            ledger = saved["ledger"]
        if saved is not None and (
            ledger is None or not (isinstance(ledger, Ledger) or os.path.exists(ledger))
        ):
            raise PrivacyError(
                f"the run to resume has its ledger at {ledger}, which is not there: what it spent "
                "after this checkpoint would be forgotten. Give ledger= the file that the run was "
                "begun with (a run without one cannot be resumed)."
            )
        engine = PrivacyEngine(
            ledger=ledger, accountant=self.accountant, insecure_seed=self.insecure_seed
        )
        arguments: dict[str, Any] = {
            "module": module, "optimizer": optimizer, "data_loader": data_loader,
            "criterion": criterion, "target_delta": self.target_delta,
            "options": replace(self.options, steps=steps, batches=batches),
            "resume_from": None if saved is None else saved["engine"],
            "target_epsilon": self.target_epsilon, **self.further,
        }  # fmt: skip
        if self.noise_multiplier is not None:
            loader = engine.make_private(noise_multiplier=self.noise_multiplier, **arguments)[2]
        elif steps is None:
            raise ValueError(
                "the trainer has no end (max_steps, max_epochs), for which noise could be found: "
                "give it one, or give noise_multiplier"
            )
        else:
            loader = engine.make_private_with_epsilon(**arguments)[2]
        return LoopRun(engine, loader)


class LoopRun:
    """A private run in progress: its engine, its batches, and what to show and save of it."""

    def __init__(self, engine: PrivacyEngine, loader: PrivateLoader) -> None:
        self.engine, self.loader = engine, loader
        planned = engine.plan.steps
        self._gauge = None if planned is None else EpsilonGauge(engine, steps=max(planned, 1))

    @property
    def epsilon(self) -> float:
        """An upper bound of what has been spent, which costs next to nothing to ask for."""
        if self._gauge is None:
            return self.engine.get_epsilon()
        return self._gauge.at(self.engine.session.steps_taken)

    @property
    def between_steps(self) -> bool:
        """Whether the batch handed out last was the last one of its step."""
        return self.loader.current is None or self.loader.current.is_last

    def state_dict(self) -> dict[str, Any]:
        """Return what `LoopPrivacy.begin` needs to continue: plain data and tensors. Secret."""
        path = self.engine.ledger.path
        place = None if path is None else os.path.abspath(path)
        return {"engine": self.engine.state_dict(), "ledger": place}

    def end(self) -> None:
        """Make everything ordinary again, and let go of the ledger's file."""
        self.engine.detach()
        if self.engine.ledger.path is not None:
            self.engine.close()


class StepBatches:
    """The batches of a private loader, whose state is saved with the engine's and nowhere else."""

    def __init__(self, loader: PrivateLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Any:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the engine's state says which samples come next."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the loader is where the engine's state was."""


def several_batches(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    """Return a loader of the same data whose batches are `count` times as large."""
    if count == 1:
        return loader
    return DataLoader(
        loader.dataset,
        batch_size=count * (loader.batch_size or 1),
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        persistent_workers=loader.persistent_workers,
        prefetch_factor=loader.prefetch_factor,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
    )


def accumulated(batches: BatchOptions, *, size: int | None, count: int) -> BatchOptions:
    """Return the options of a step whose sample is handed out in `count` batches of that size."""
    if count == 1:
        return batches
    if batches.micro_batch_size is not None:
        raise PrivacyError(
            f"gradients are accumulated over {count} batches, and micro_batch_size is given too. "
            "Both cut a step's sample into parts: give one of them."
        )
    return replace(batches, micro_batch_size=size)
