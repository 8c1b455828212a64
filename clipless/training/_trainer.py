"""`Trainer`: private training without a loop of one's own."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from clipless.common import names_moved_arguments, not_set_error
from clipless.distributed import rank_and_size, reshard
from clipless.losses import Loss
from clipless.privacy import (
    BoundsChoice,
    EnforcedBounds,
    FixedOrder,
    Ledger,
    PrivacyEngine,
    PrivacyOptions,
    PrivacyReport,
    PrivateLoader,
    epochs_of,
    example_shape,
    merge_arguments,
    planned_for,
)
from clipless.training._averaging import WeightAverage
from clipless.training._data import (
    evaluation_batches,
    fixed_order,
    inputs_of,
    training_loader,
)
from clipless.training._fit import Fit
from clipless.training._layer_adam import LayerAdam
from clipless.training._metrics import FitResult, RunningMetrics, StopReason, evaluate
from clipless.training._options import MakeOptimizer, TrainingOptions
from clipless.training._processes import join_torchrun
from clipless.training._signal import typical_gradients, warn_of_little_signal


@names_moved_arguments(options=PrivacyOptions, training=TrainingOptions)
class Trainer:
    """Trains a model privately: `Trainer(model, criterion, ...).fit(data)`.

    Guarantee: that of `PrivacyEngine`, on which it sits; it adds no privacy logic of its own.
    Training ends when the planned steps are taken or the next one would exceed the budget. Not
    covered are the loss and accuracy on the training data, which are shown and written down while
    training, and what is decided by looking at them. Validation data are taken to be public, or
    handled otherwise: nothing measured on them is accounted for.

    With `run_dir`, everything is kept in that folder and a run that was interrupted or killed goes
    on where `fit` is called again with the same arguments and data: the steps after the last
    checkpoint are repeated with the same samples and noise, end at the same weights, and are not
    paid for twice. If they do not end at the same weights, which is noticed before anybody sees
    them, they are taken anew and paid for. A folder that belongs to another model, data size or
    plan is refused. Keep checkpoints secret: they determine the samples and the noise to come. Do
    not train two copies of a folder: they would use the same noise twice. Ctrl-C ends
    training after the present step with a checkpoint and raises `KeyboardInterrupt`.

    Without `run_dir`, a second `fit` is a new run on what is left of the same budget.

    Args:
        model: a model that `clipless.sensitivity` accepts, or with `bounds="enforced"` any model
            whose examples stay apart. It is trained in place.
        criterion: a loss of `clipless.losses`.
        target_epsilon: the budget, at `target_delta`: the least noise is found that keeps it.
        target_delta: by default 0.1/N, rounded down.
        noise_multiplier: train with this noise; with `target_epsilon`, until that is reached.
        batch_size: how many examples are in a batch, on average. Left out for a `DataLoader`.
        epochs, steps: how long to train, one of the two.
        bounds: `"proved"`, or `"enforced"` for any network: as in `PrivacyOptions`.
            `ProvedBounds(product_clip=0.3)` clips weight gradients at a fraction of their bound.
        run_dir: the folder of the run: plan, ledger, checkpoints, metrics.
        options: of the guarantee: sampling, precision, augmentation and the like.
        training: of training: optimizer, checkpoints, callbacks and the like.

    Example:
        >>> model = torch.nn.Sequential(
        ...     clipless.nn.BoundedInput(1.0), clipless.nn.SpectralLinear(4, 2))
        >>> x = torch.randn(600, 4)
        >>> data = (x, (x[:, 0] > 0).long())
        >>> trainer = Trainer(model, clipless.losses.CrossEntropy(tau=10.0),
        ...                   target_epsilon=3.0, batch_size=100, epochs=5)
        >>> result = trainer.fit(data)
        >>> result.steps, result.stopped, result.epsilon <= 3.0
        (30, 'finished', True)
        >>> trainer.predict(x[:5]).shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Loss,
        *,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        noise_multiplier: float | None = None,
        batch_size: int | None = None,
        epochs: float | None = None,
        steps: int | None = None,
        bounds: BoundsChoice | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        options: PrivacyOptions = PrivacyOptions(),
        training: TrainingOptions = TrainingOptions(),
    ) -> None:
        if target_epsilon is None and noise_multiplier is None:
            raise ValueError("give target_epsilon, or noise_multiplier")
        self._options = merge_arguments(
            options, {"epochs": epochs, "steps": steps, "bounds": bounds}
        )
        if (self._options.epochs is None) == (self._options.steps is None):
            raise ValueError("give either epochs or steps")
        if training.ledger is not None and run_dir is not None:
            raise ValueError("give either a ledger or run_dir, which keeps its own")
        self._training = training
        own_gpu = join_torchrun()
        place = training.device or own_gpu or next(model.parameters()).device
        self.device = torch.device(place)
        self.model = model.to(self.device)
        self.criterion = criterion
        self.optimizer = _optimizer(training.optimizer, model)
        self.scheduler: LRScheduler | None = None
        self.average: WeightAverage | None = None
        self.callbacks = tuple(training.callbacks)
        self.run_dir = None if run_dir is None else Path(run_dir)
        self.engine = self._new_engine(training.ledger)
        self.step = 0
        """How many steps the run has taken."""
        self.steps = 0
        """How many steps are planned."""
        self.steps_per_epoch = 1
        self.history: list[dict[str, Any]] = []
        self.stopped: StopReason = "failed"
        self.resumed_from: int | None = None
        self._batch_size, self._target_delta = batch_size, target_delta
        self._target_epsilon, self._noise_multiplier = target_epsilon, noise_multiplier
        self._optimizer_at_first = copy.deepcopy(self.optimizer.state_dict())
        self._running = RunningMetrics()
        self._sampling = self._options.sampling

    def fit(self, train_data: Any, validation_data: Any = None) -> FitResult:
        """Train on a tuple of tensors or arrays, a `Dataset` or `DataLoader` of inputs and targets.

        Validation data of the same kinds are evaluated after every epoch, with the averaged
        weights if there are any, and at the end with both. They are not private.
        """
        loader = training_loader(train_data, self._batch_size, self._options.sampling)
        self._sampling = fixed_order(train_data, loader, self._options.sampling)
        if isinstance(train_data, tuple | list) and len(train_data) != 2:
            raise TypeError(f"fit takes (inputs, targets), got {len(train_data)} parts")
        fit = Fit(self, loader, validation_data)
        fit.run()
        seconds = fit.seconds
        measured: dict[bool, dict[str, float]] = {False: {}, True: {}}
        if validation_data is not None:
            for averaged in (False, True) if self.average is not None else (False,):
                measured[averaged] = self.evaluate(validation_data, averaged=averaged)
        return FitResult(
            epsilon=self.engine.get_epsilon(),
            delta=self.engine.plan.delta,
            steps=self.step,
            stopped=self.stopped,
            seconds=seconds,
            history=tuple(self.history),
            metrics=measured[False],
            averaged_metrics=measured[True],
            resumed_from=self.resumed_from,
        )

    def evaluate(self, data: Any, *, averaged: bool | None = None) -> dict[str, float]:
        """Return the mean loss and, for classification, the accuracy on all of `data`.

        `averaged`: with the averaged weights; by default if there are any. What is measured on
        private data is not covered by the guarantee.
        """
        if self._averaged(averaged):
            if self.average is None:
                raise not_set_error("average")
            with self.average.applied():
                return self.evaluate(data, averaged=False)
        return evaluate(self.model, self.criterion, evaluation_batches(data), self.device)

    @torch.no_grad()
    def predict(self, data: Any, *, averaged: bool | None = None) -> Tensor:
        """Return the model's outputs for a tensor, a `Dataset` or a `DataLoader`, on the CPU."""
        if self._averaged(averaged):
            if self.average is None:
                raise not_set_error("average")
            with self.average.applied():
                return self.predict(data, averaged=False)
        training = self.model.training
        self.model.eval()
        try:
            batches = evaluation_batches(data)
            outputs = [self.model(inputs_of(batch, self.device)).cpu() for batch in batches]
        finally:
            self.model.train(training)
            reshard(self.model)
        return torch.cat(outputs)

    def report(self) -> PrivacyReport:
        """Return the guarantee so far, printable: `PrivacyEngine.report`."""
        return self.engine.report()

    @property
    def epoch(self) -> int:
        """The epoch of the step taken last, from 1; 0 before the first."""
        return math.ceil(self.step / self.steps_per_epoch)

    @property
    def metrics(self) -> dict[str, float]:
        """Loss and accuracy on the training data in the present epoch; waits for the device."""
        return self._running.read()

    def _averaged(self, wanted: bool | None) -> bool:
        if wanted and self.average is None:
            raise ValueError("there are no averaged weights: the trainer has average=None, or "
                             "has not been fitted")  # fmt: skip
        return self.average is not None if wanted is None else wanted

    # --- what a run in progress needs ------------------------------------------------------------

    def _reset(self, ledger: Path | None) -> None:
        """Begin anew, with the weights as they are. A ledger in memory is kept."""
        if ledger is not None:
            self.engine = self._new_engine(ledger)
        self.step, self.history, self._running = 0, [], self._no_metrics()
        self.resumed_from = None
        self.optimizer.load_state_dict(copy.deepcopy(self._optimizer_at_first))
        make = self._training.average
        self.average = None
        if callable(make):
            self.average = make(self.model)
        elif make is not None:
            self.average = WeightAverage(self.model, decay=make)

    def _new_engine(self, ledger: Ledger | Path | None) -> PrivacyEngine:
        return PrivacyEngine(
            ledger=ledger,
            accountant=self._training.accountant,
            insecure_seed=self._training.insecure_seed,
        )

    def _make_private(
        self, data: DataLoader[Any], state: Mapping[str, Any] | None, replay: bool
    ) -> PrivateLoader:
        shared: dict[str, Any] = {
            "module": self.model, "optimizer": self.optimizer, "data_loader": data,
            "criterion": self.criterion, "target_epsilon": self._target_epsilon,
            "target_delta": self._target_delta, "resume_from": state,
            "options": replace(
                self._options, replay=replay and self._options.replay, sampling=self._sampling,
                noise=self._noise(data),
            ),
        }  # fmt: skip
        proves = (
            state is None
            and self._options.bounds != "enforced"
            and not isinstance(self._options.bounds, EnforcedBounds)
            and not isinstance(data.dataset, IterableDataset)
        )
        shape = self._options.batches.input_shape
        typical = None if not proves else typical_gradients(
            self.model, self.criterion, shape or example_shape(data.dataset)
        )  # fmt: skip
        if self._noise_multiplier is None:
            _, _, loader = self.engine.make_private_with_epsilon(**shared)
        else:
            _, _, loader = self.engine.make_private(
                noise_multiplier=self._noise_multiplier, **shared
            )
        if typical is not None:
            warn_of_little_signal(self.engine.plan, typical)
        planned = self.engine.plan.steps
        if planned is None:
            raise not_set_error("planned")
        self.steps, self.steps_per_epoch = planned, loader.steps_per_epoch
        make = self._training.scheduler
        if make == "cosine":
            self.scheduler = CosineAnnealingLR(self.optimizer, T_max=self.steps)
        elif callable(make):
            self.scheduler = make(self.optimizer, self.steps)
        return loader

    def _noise(self, data: DataLoader[Any]) -> Any:
        """The noise that was asked for; correlated noise is told of average and schedule."""
        order = epochs_of(data) if self._sampling == "epochs" else self._sampling
        rates = None
        if isinstance(order, FixedOrder) and self._training.scheduler == "cosine":
            epochs, steps = self._options.epochs, self._options.steps
            steps = round((epochs or 0) * order.steps_per_pass) if steps is None else steps
            rates = tuple(0.5 + 0.5 * math.cos(math.pi * step / steps) for step in range(steps))
        decay = None if self.average is None else self.average.decay
        average = decay if decay is not None and 0 <= decay < 1 else None
        return planned_for(self._options.noise, average=average, learning_rates=rates)

    @staticmethod
    def _no_metrics() -> RunningMetrics:
        return RunningMetrics(share=rank_and_size()[1])

    @property
    def _schedule_name(self) -> str:
        return _name(self._training.scheduler)

    @property
    def _augmentation_name(self) -> str | None:
        augment = self._options.batches.augment
        return None if augment is None else _name(augment)


def _name(given: object) -> str:
    """A name that is the same in every process."""
    return getattr(given, "__qualname__", type(given).__name__) if callable(given) else str(given)


def _optimizer(
    given: torch.optim.Optimizer | MakeOptimizer | None, model: nn.Module
) -> torch.optim.Optimizer:
    if isinstance(given, torch.optim.Optimizer):
        return given
    parameters = [each for each in model.parameters() if each.requires_grad]
    return LayerAdam(parameters) if given is None else given(parameters)
