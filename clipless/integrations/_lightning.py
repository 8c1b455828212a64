"""`CliplessCallback`: private training in a `lightning.Trainer`, by one more callback."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from clipless.errors import PrivacyError
from clipless.integrations._lightning_checks import (
    check_started,
    check_trainer,
    private_parts,
    training_loader,
)
from clipless.integrations._loop_run import (
    LoopPrivacy,
    LoopRun,
    StepBatches,
    accumulated,
    several_batches,
)
from clipless.losses import Loss
from clipless.privacy import BatchOptions, Sampling, named_sampling, steps_of_one_pass


class CliplessCallback(Callback):
    """Trains a `LightningModule` privately: `lightning.Trainer(callbacks=[CliplessCallback(...)])`.

    Guarantee: that of `PrivacyEngine`, on which it sits. The module's `training_step` calls its
    model and then a loss of `clipless.losses`, and returns what that returns; training is
    planned, and the noise found, for the trainer's `max_epochs` and `max_steps`. Batches are
    Poisson samples, whose expected size is the data loader's batch size, times
    `accumulate_grad_batches` (each step's sample is then handed out in padded micro-batches of
    the loader's size). Training ends where the next step would exceed the budget. What the
    guarantee does not cover, or Lightning would do to gradients, is refused before anything is
    trained, with the reason. Losses that the module logs have no noise.

    The ledger is kept in the logger's folder (`trainer.log_dir`), unless `ledger` names a file.
    Checkpoints hold the state of the run, from which its noise can be computed: keep them to
    yourself, and publish those of `ModelCheckpoint(save_weights_only=True)`.
    `trainer.fit(ckpt_path=...)` goes on where the run was, on the same ledger.

    Args:
        model: the part of the module that is trained, or its name; by default the one part that
            holds all trainable parameters, or the module itself.
        criterion: the loss, or its name; by default the one that the module holds.
        privacy: the budget and the options: `target_epsilon`, `noise_multiplier`,
            `target_delta`, `ledger`, `accountant`, `insecure_seed`, `options`, and other
            arguments of `PrivacyEngine.make_private`.

    Example:
        >>> callback = CliplessCallback(target_epsilon=3.0)
        >>> trainer = lightning.Trainer(max_epochs=5, callbacks=[callback])  # doctest: +SKIP
    """

    def __init__(
        self, *, model: Any = None, criterion: Loss | str | None = None, **privacy: Any
    ) -> None:
        self._privacy = LoopPrivacy.of(privacy)
        self._model, self._criterion = model, criterion
        self.run: LoopRun | None = None
        """The run in progress, or the last one: `run.engine.report()` says what it guarantees."""
        self._saved: Mapping[str, Any] | None = None
        self._state: dict[str, Any] = {}
        self._batches: StepBatches | None = None
        self._undo: list[Callable[[], None]] = []

    # --- beginning and end -----------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make module, optimizer and criterion private, and the data loader another one."""
        check_trainer(trainer, pl_module, resumed=self._saved is not None)
        model, criterion = private_parts(pl_module, self._model, self._criterion)
        given = training_loader(trainer)
        count = trainer.accumulate_grad_batches
        batches = accumulated(self._privacy.options.batches, size=given.batch_size, count=count)
        if batches.micro_batch_size is not None:
            batches = _of_constant_number(batches)
        loader = several_batches(given, count)
        privacy = self._privacy
        if privacy.ledger is None and self._saved is None and trainer.loggers:
            privacy = replace(privacy, ledger=_ledger_place(trainer))
        self.run = privacy.begin(
            module=model,
            optimizer=trainer.optimizers[0],
            data_loader=loader,
            criterion=criterion,
            steps=_planned_steps(trainer, self._privacy.options.sampling, loader),
            batches=batches,
            saved=self._saved,
        )
        self._saved = None
        if self.run.engine.ledger.path is None:  # a second fit goes on with it
            self._privacy = replace(self._privacy, ledger=self.run.engine.ledger)
        self._batches = StepBatches(self.run.loader)
        self._take_over(trainer, count)

    def _take_over(self, trainer: Any, count: int) -> None:
        """Let the trainer read the private loader, and step when a sample is complete."""
        loop, batches = trainer.fit_loop, self._batches
        source = loop._data_source
        loop._data_source = type(source)(batches, source.name)
        loop._combined_loader = None  # what was read of the other one
        self._undo.append(lambda: setattr(loop, "_data_source", source))
        run = self.run
        if run is not None and run.loader.rows is not None:
            trainer.accumulate_grad_batches = 1  # or losses would be divided by it
            loop.epoch_loop._accumulated_batches_reached = lambda: run.between_steps
            self._undo.append(lambda: setattr(trainer, "accumulate_grad_batches", count))
            self._undo.append(lambda: vars(loop.epoch_loop).pop("_accumulated_batches_reached"))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make sure that it is the private loader that the trainer has come to read."""
        check_started(trainer, self._batches)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Make everything ordinary again."""
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Make everything ordinary again after a failure or an interruption."""
        self._end()

    def _end(self) -> None:
        while self._undo:
            self._undo.pop()()
        if self.run is not None and self._batches is not None:
            self._batches = None
            if self.run.between_steps:
                self._state = self.run.state_dict()
            self.run.end()

    # --- a step ----------------------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Say what is spent, and end training where the budget does."""
        if self.run is None or not self.run.between_steps:
            return
        pl_module.log("epsilon", self.run.epsilon, prog_bar=True, on_step=True, batch_size=1)
        if not self.run.engine.allows_step():
            trainer.should_stop = True

    # --- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run, which is kept in the checkpoint. Keep it secret."""
        if self.run is None or self._batches is None:
            return self._state
        if not self.run.between_steps:
            raise PrivacyError(
                "a checkpoint was to be written in the middle of a step, between two of its "
                "micro-batches. Save after a step: ModelCheckpoint(every_n_train_steps=...), or at "
                "the end of an epoch."
            )
        return self.run.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember the run that the next `fit` continues."""
        self._saved = state_dict or None


def _ledger_place(trainer: Any) -> str:
    folder = trainer.log_dir or trainer.default_root_dir
    os.makedirs(folder, exist_ok=True)
    return os.path.join(folder, "clipless-ledger.jsonl")


def _of_constant_number(batches: BatchOptions) -> BatchOptions:
    """Let every step have the same number of micro-batches, so that an epoch has a length."""
    if batches.pad is False:
        raise PrivacyError(
            "without padding the number of micro-batches varies from step to step, and Lightning "
            "reads batches ahead that are not trained on then. Leave pad out."
        )
    return replace(batches, pad=True)


def _planned_steps(trainer: Any, sampling: str | Sampling, loader: DataLoader[Any]) -> int | None:
    """Return how many steps the trainer will take, or None if it has no end."""
    size = len(loader.dataset)  # type: ignore[arg-type]
    if isinstance(sampling, str):
        sampling = named_sampling(sampling, size, loader.batch_size)  # type: ignore[arg-type]
    an_epoch, limit = steps_of_one_pass(sampling), trainer.limit_train_batches
    an_epoch = min(an_epoch, limit) if isinstance(limit, int) else int(an_epoch * limit)
    ends = [trainer.max_steps] if trainer.max_steps not in (None, -1) else []
    if trainer.max_epochs not in (None, -1):
        ends.append(trainer.max_epochs * an_epoch)
    return min(ends, default=None)
