"""One call of `Trainer.fit`: the loop, the checkpoints, and how a killed run goes on.

A checkpoint holds all that determines what comes next: weights, optimizer, sampler key, noise
generator. A killed run goes on from its last checkpoint and repeats, with the same samples and
noise, the steps that the ledger has digests of; the engine compares each before it is used. After
the last one, or the first that comes out otherwise, it draws fresh samples and noise and pays for
every step (see `clipless.privacy.step._book`). So the ledger never counts less than was released.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from clipless.common import not_set_error
from clipless.distributed import (
    full_state,
    load_full_optimizer_state,
    load_full_state,
    processes_present,
)
from clipless.errors import BudgetExhaustedError, PrivacyError
from clipless.privacy import FixedOrder, example_shape, key_names
from clipless.training._callbacks import Callback, MetricsWriter
from clipless.training._data import pair
from clipless.training._interrupt import Interrupt, deferred_interrupts
from clipless.training._metrics import classifies
from clipless.training._processes import (
    SharedFolder,
    all_generator_states,
    noise_places,
    open_folder,
    optimizer_state,
    own_metrics,
    restore_own_generators,
    total_metrics,
)
from clipless.training._progress import EpsilonGauge, ProgressBar
from clipless.training._run_folder import SavedRun, TrainerFolder, describe

if TYPE_CHECKING:
    from clipless.training._trainer import Trainer


_SMALL_STEP = 1 << 25
"""Products of a step up to which a second thread costs more than it brings."""


@contextlib.contextmanager
def _few_threads(products: float | None) -> Iterator[None]:
    """Compute small steps with one thread: on a busy machine, waiting for others costs far more."""
    before = torch.get_num_threads()
    if products is not None and products <= _SMALL_STEP:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Fit:
    """The run in progress of a trainer."""

    def __init__(self, trainer: Trainer, data: DataLoader[Any], validation: Any) -> None:
        self._trainer, self._data, self._validation = trainer, data, validation
        self._processes = processes_present()
        self._first = self._processes is None or self._processes.first
        self._folder: TrainerFolder | SharedFolder | None = None
        if trainer.run_dir is not None:
            self._folder = open_folder(
                trainer.run_dir, keep=trainer._training.keep_checkpoints, processes=self._processes
            )
        self._callbacks: list[Callback] = [
            each for each in trainer.callbacks if self._first or each.everywhere
        ]
        if (
            self._first
            and self._folder is not None
            and not any(isinstance(each, MetricsWriter) for each in self._callbacks)
        ):
            self._callbacks.insert(0, MetricsWriter())
        self._classifies = classifies(trainer.criterion)
        self._between_steps = True
        self._seconds, self._begun = 0.0, time.monotonic()

    @property
    def seconds(self) -> float:
        """How long the run has taken, interruptions left out."""
        return self._seconds + time.monotonic() - self._begun

    def run(self) -> None:
        """Train to the end, to the budget, or until interrupted."""
        trainer = self._trainer
        training = trainer.model.training
        trainer.model.train()
        trainer.resumed_from = None
        try:
            with _few_threads(self._products_of_a_step() if trainer.device.type == "cpu" else None):
                self._begin()
                self._train()
        finally:
            trainer.engine.detach()
            if self._folder is not None:
                trainer.engine.close()
            trainer.model.train(training)

    def _products_of_a_step(self) -> float | None:
        """Return roughly how many products a forward pass over a batch takes; None if unknown."""
        batches, dataset = self._trainer._options.batches, self._data.dataset
        rows = batches.micro_batch_size or self._data.batch_size
        if rows is None or isinstance(dataset, IterableDataset):
            return None
        try:
            shape: Any = batches.input_shape or example_shape(dataset)
        except PrivacyError:  # an example that is no tensor
            return None
        sizes = [shape] if isinstance(shape, int) else list(shape)
        if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
            return None
        positions = math.prod(sizes) / min(sizes)  # of an image or a sequence, at most
        return rows * positions * sum(each.numel() for each in self._trainer.model.parameters())

    # --- beginning, new or resumed ---------------------------------------------------------------

    def _begin(self) -> None:
        trainer, folder = self._trainer, self._folder
        trainer._reset(None if folder is None else folder.ledger)
        unit = trainer._options.unit
        description = describe(
            trainer.model,
            dataset_size=self._dataset_size,
            optimizer=trainer.optimizer,
            scheduler=trainer._schedule_name,
            average=trainer.average,
            micro_batch_size=trainer._options.batches.micro_batch_size,
            augmentation=trainer._augmentation_name,
            users=None if unit is None else unit.digest,
        )
        saved = (
            None if folder is None else folder.saved(description, resume=trainer._training.resume)
        )
        self._make_private(saved, replay=saved is None or self._can_replay(saved))
        self._description = description
        self._seconds, self._begun = 0.0, time.monotonic()
        if saved is not None:
            self._restore(saved)
        self._saved_run = "" if saved is None else str(saved.state["engine"]["run"])
        if folder is not None and saved is None:
            folder.begin(description, trainer.engine.state_dict()["plan"])
        if self._afresh:
            self._save()

    def _can_replay(self, saved: SavedRun) -> bool:
        return key_names(saved.state["engine"]["noise"]) == noise_places(
            self._trainer.model, self._processes
        )

    @property
    def _dataset_size(self) -> int:
        sampling = self._trainer._sampling
        if isinstance(sampling, FixedOrder):  # of a stream, which has no length
            return sampling.dataset_size
        return len(self._data.dataset)  # type: ignore[arg-type]

    def _make_private(self, saved: SavedRun | None, replay: bool) -> None:
        """Make the run private; a saved one with the weights it had."""
        trainer = self._trainer
        if saved is None:
            self._loader = trainer._make_private(self._data, None, replay)
            return
        before = copy.deepcopy(full_state(trainer.model))
        load_full_state(trainer.model, saved.weights)
        try:
            self._loader = trainer._make_private(self._data, saved.state["engine"], replay)
        except BaseException:
            load_full_state(trainer.model, before)
            raise

    def _restore(self, saved: SavedRun) -> None:
        trainer, state = self._trainer, saved.state
        load_full_optimizer_state(trainer.optimizer, saved.optimizer["optimizer"])
        if trainer.scheduler is not None:
            trainer.scheduler.load_state_dict(saved.optimizer["scheduler"])
        if trainer.average is not None:
            trainer.average.load_state_dict(state["average"])
        trainer.step = trainer.resumed_from = saved.step
        trainer.history = list(state["history"])
        trainer._running = own_metrics(state["running"], self._processes)
        self._seconds = float(state["seconds"])
        restore_own_generators(state["generators"], self._processes)

    # --- the loop --------------------------------------------------------------------------------

    def _train(self) -> None:
        trainer = self._trainer
        trainer.stopped = "failed"
        self._gauge = EpsilonGauge(trainer.engine, steps=trainer.steps)
        show = trainer._training.progress if self._first else False
        bar = ProgressBar(show=show, steps=trainer.steps, done=trainer.step)
        try:
            self._call("on_fit_start")
            with deferred_interrupts() as interrupt:
                self._steps(bar, interrupt)
            trainer.stopped = "finished"
        except BudgetExhaustedError:
            trainer.stopped = "budget"
            self._between_steps = True
            if trainer._running.steps:
                self._end_epoch()
            self._save()
        except KeyboardInterrupt:
            trainer.stopped = "interrupted"
            if self._between_steps:
                self._save()
            raise
        finally:
            bar.stop(trainer.step)
            self._call("on_fit_end")

    def _steps(self, bar: ProgressBar, interrupt: Interrupt) -> None:
        trainer = self._trainer
        while trainer.step < trainer.steps:
            # Batches are read anew after every checkpoint, also if nobody interrupts, so that
            # what data loaders draw from global generators is the same after resuming.
            boundary = self._next_boundary()
            for batch in self._loader:
                self._between_steps = False
                if not self._batch(batch):
                    continue
                self._between_steps = True
                self._call("on_step_end")
                bar.update(trainer.step, metrics=trainer._running, gauge=self._gauge)
                if trainer.step >= boundary or self._afresh:
                    break
                self._stop_if_requested(interrupt)
            if trainer.step % trainer.steps_per_epoch == 0 or trainer.step >= trainer.steps:
                self._end_epoch()
            due = trainer.step % self._checkpoint_every == 0 or trainer.step >= trainer.steps
            if due or self._afresh:
                self._save()
            self._stop_if_requested(interrupt)

    def _stop_if_requested(self, interrupt: Interrupt) -> None:
        """Stop where somebody asked to; of several processes, all after the same step."""
        group = self._trainer.engine.session.group
        if group.agrees_to_stop(requested=interrupt.requested):
            interrupt.requested = False
            raise KeyboardInterrupt

    @property
    def _afresh(self) -> bool:
        """Whether samples and noise are other ones than those that the last checkpoint knows.

        Steps can be repeated from a checkpoint that does, and from no earlier one.
        """
        return self._trainer.engine.session.outcomes.run != self._saved_run

    @property
    def _checkpoint_every(self) -> int:
        return self._trainer._training.checkpoint_every or self._trainer.steps_per_epoch

    def _next_boundary(self) -> int:
        """The next step after which an epoch or the run ends, or a checkpoint is due."""
        trainer = self._trainer
        after = [
            (trainer.step // every + 1) * every
            for every in (trainer.steps_per_epoch, self._checkpoint_every)
        ]
        return min(trainer.steps, *after)

    def _batch(self, batch: Any) -> bool:
        """One batch, and the step if it completes one; return whether it did."""
        trainer = self._trainer
        inputs, target = pair(batch, trainer.device)
        trainer.optimizer.zero_grad()
        output = trainer.model(inputs)
        loss = trainer.criterion(output, target)
        loss.backward()
        sample = self._loader.current
        if sample is None:
            raise not_set_error("sample")
        trainer._running.add_batch(loss, output, target, sample.weights, self._classifies)
        if not sample.is_last:
            return False
        trainer.optimizer.step()
        if trainer.scheduler is not None:
            trainer.scheduler.step()
        if trainer.average is not None:
            trainer.average.update()
        trainer.step += 1
        trainer._running.end_step()
        return True

    def _end_epoch(self) -> None:
        trainer = self._trainer
        line: dict[str, Any] = {"epoch": trainer.epoch, "step": trainer.step}
        line |= total_metrics(trainer._running, self._processes).read()
        if self._validation is not None:
            found = trainer.evaluate(self._validation)
            line |= {f"validation_{name}": value for name, value in found.items()}
        bound = self._gauge.at(trainer.step) if self._first else math.inf
        line["epsilon_bound"] = bound if math.isfinite(bound) else None
        trainer.history.append(line)
        trainer._running = trainer._no_metrics()
        self._call("on_epoch_end")

    def _call(self, name: str) -> None:
        for callback in self._callbacks:
            getattr(callback, name)(self._trainer)

    # --- checkpoints -----------------------------------------------------------------------------

    def _save(self) -> None:
        trainer, folder = self._trainer, self._folder
        self._saved_run = trainer.engine.session.outcomes.run
        if folder is None:
            return
        ledger = trainer.engine.ledger.snapshot()
        trainer.engine.gather_optimizer_state()
        scheduler = trainer.scheduler
        state = {
            "step": trainer.step,
            "seconds": self.seconds,
            "history": trainer.history,
            "running": total_metrics(trainer._running, self._processes).state_dict(),
            "engine": trainer.engine.state_dict(),
            "average": None if trainer.average is None else trainer.average.state_dict(),
            "generators": all_generator_states(self._processes),
            "description": self._description,
        }
        folder.save(
            state,
            weights=full_state(trainer.model),
            optimizer={
                "optimizer": optimizer_state(trainer.optimizer, self._processes, trainer.model),
                "scheduler": None if scheduler is None else scheduler.state_dict(),
            },
            average=None if trainer.average is None else trainer.average.averaged_parameters(),
            ledger=ledger,
            step=trainer.step,
        )
