"""`CliplessTrainer`: the Hugging Face `Trainer`, with private training."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from clipless.errors import PrivacyError
from clipless.integrations._hugging_face_checks import check_arguments, check_collator, check_model
from clipless.integrations._loop_run import LoopPrivacy, LoopRun, accumulated
from clipless.integrations._tensor_model import TensorModel, logits_of
from clipless.losses import Loss
from clipless.privacy import (
    PrivacyEngine,
    PrivateLoader,
    check_wrappable,
    named_sampling,
    steps_of_one_pass,
)
from clipless.training import from_files, to_files

_STATE = "clipless"


class CliplessTrainer(Trainer):
    """Trains as `transformers.Trainer` does, privately: `CliplessTrainer(..., criterion=...)`.

    Guarantee: that of `PrivacyEngine`, on which it sits. Batches are Poisson samples, of
    `per_device_train_batch_size * gradient_accumulation_steps` examples on average, handed out in
    micro-batches of `per_device_train_batch_size` if gradients are accumulated. The noise is found
    for the planned number of steps (`max_steps`, or `num_train_epochs`), and training ends where
    the next step would exceed the budget. What the guarantee does not cover, or the trainer would
    do to gradients, is refused when it is made; `max_grad_norm=0` has to be said, for its default
    is 1. The losses and metrics that are logged have no noise.

    The ledger is `clipless-ledger.jsonl` in `output_dir`, unless `ledger` names another file.
    Checkpoints hold the state of the run, from which its noise can be computed: publish
    what `save_model` writes. `train(resume_from_checkpoint=...)` goes on where the run was.

    Args:
        arguments: those of `transformers.Trainer`.
        criterion: a loss of `clipless.losses`, of the logits and the labels.
        privacy: the budget and the options: `target_epsilon`, `noise_multiplier`,
            `target_delta`, `ledger`, `accountant`, `insecure_seed`, `options`, and other
            arguments of `PrivacyEngine.make_private`.
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *,
        criterion: Loss,
        privacy: Mapping[str, Any],
        **arguments: Any,
    ) -> None:
        args = TrainingArguments("tmp_trainer", max_grad_norm=0) if args is None else args
        check_arguments(args, arguments)
        self._count, self._part = args.gradient_accumulation_steps, args.per_device_train_batch_size
        args = copy.copy(args)
        args.per_device_train_batch_size *= self._count  # what the trainer sees of a step
        args.gradient_accumulation_steps, args.ignore_data_skip = 1, True
        super().__init__(model, args, **arguments)
        check_collator(self.data_collator)
        self.criterion = criterion
        self.label_names: list[str] = list(self.label_names) or ["labels"]
        self._privacy = LoopPrivacy.of(privacy)
        self._run: LoopRun | None = None
        self._called: nn.Module | None = None
        self._checkpoint: Path | None = None
        self.add_callback(_PrivateSteps(self))

    @property
    def engine(self) -> PrivacyEngine:
        """The engine of the run in progress, or of the last one."""
        if self._run is None:
            raise PrivacyError("nothing is private yet: call train first")
        return self._run.engine

    # --- beginning and end -----------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, **further: Any
    ) -> Any:
        """Train privately, or go on with a run that was saved."""
        if trial is not None:
            raise PrivacyError(
                "each trial of a search is one more run on the same data, and choosing among them "
                "costs, too: use clipless.sweeps, which counts both"
            )
        place = resume_from_checkpoint or None
        if place is True:
            place = get_last_checkpoint(self.args.output_dir)
            if place is None:
                raise ValueError(f"there is no checkpoint to resume from in {self.args.output_dir}")
        self._checkpoint = None if place is None else Path(place)
        try:
            return super().train(place, **further)
        finally:
            if self._run is not None:
                self._run.end()
            self._called = None

    def begin_private(self, steps: int) -> None:
        """Make the run private: model, optimizer and their states are what they begin with."""
        batches = self.callback_handler.train_dataloader
        if not isinstance(batches, _Steps):
            raise PrivacyError(
                "get_train_dataloader was replaced: the sampler of private training is its own"
            )
        check_model(self.model, enforced=self._privacy.enforced)
        optimizer = self.optimizer
        while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            optimizer = inner  # accelerate's wrappers
        privacy, options = self._privacy, self._privacy.options
        if privacy.ledger is None:
            os.makedirs(self.args.output_dir, exist_ok=True)
            place = os.path.join(self.args.output_dir, "clipless-ledger.jsonl")
            privacy = replace(privacy, ledger=place)
        model = self.model
        if not privacy.enforced:
            names, shapes = self._inputs_of(batches.data)
            if options.batches.input_shape is None:
                shape = shapes if len(shapes) > 1 else shapes[0]
                options = replace(options, batches=replace(options.batches, input_shape=shape))
                privacy = replace(privacy, options=options)
            model = TensorModel(self.model, inputs=names)
        model.train()
        self._run = privacy.begin(
            module=model, optimizer=optimizer, data_loader=batches.data, criterion=self.criterion,
            steps=steps, saved=self._saved(),
            batches=accumulated(privacy.options.batches, size=self._part, count=self._count),
        )  # fmt: skip
        self._called, batches.loader = model, self._run.loader

    def _inputs_of(self, data: DataLoader[Any]) -> tuple[list[str], tuple[tuple[int, ...], ...]]:
        """Return the names and shapes of what an example consists of, besides its labels."""
        batch = data.collate_fn([data.dataset[0]])
        if not isinstance(batch, Mapping):
            raise PrivacyError(
                f"the data collator returned a {type(batch).__name__}: the trainer needs "
                "dictionaries of tensors, the labels among them"
            )
        found = {
            name: tuple(each.shape[1:])
            for name, each in batch.items()
            if isinstance(each, Tensor) and name not in self.label_names
        }
        return list(found), tuple(found.values())

    def _saved(self) -> Mapping[str, Any] | None:
        if self._checkpoint is None:
            return None
        files = {path.name: path.read_bytes() for path in self._checkpoint.glob(f"{_STATE}.*")}
        if f"{_STATE}.json" not in files:
            raise PrivacyError(
                f"{self._checkpoint} holds no state of a private run: what its weights have cost "
                "is unknown. Resume with a checkpoint of this trainer (save_only_model=False); to "
                "begin with public weights, load them into the model."
            )
        saved: Mapping[str, Any] = from_files(files, name=_STATE)
        return saved

    # --- data ------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return the steps of an epoch; what they sample from is the training data set."""
        if self.train_dataset is None:
            raise ValueError("training requires a train_dataset")
        data = DataLoader(
            self.train_dataset,
            batch_size=self._train_batch_size,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )
        sampling = self._privacy.options.sampling
        if isinstance(sampling, str):
            check_wrappable(data)
            size = len(data.dataset)  # type: ignore[arg-type]
            sampling = named_sampling(sampling, size, self._train_batch_size)
        return _Steps(data, count=steps_of_one_pass(sampling))

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return the next step, whose loss needs no count of its items."""
        return list(islice(epoch_iterator, num_batches)), None

    # --- a step ----------------------------------------------------------------------------------

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Take all micro-batches of a step through model, criterion and backward pass."""
        if self._called is None:
            raise PrivacyError("training_step belongs to train(), which makes the run private")
        model.train()
        self._called.train()
        total = torch.zeros((), device=self.args.device)
        for batch in inputs:
            loss = self.compute_loss(model, self._prepare_inputs(batch))
            loss.backward()
            total += loss.detach()
        return total

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the criterion's loss: the private one in training, the mean in evaluation."""
        given = {name: each for name, each in inputs.items() if name not in self.label_names}
        called, private = self._called, torch.is_grad_enabled()
        if private and isinstance(called, TensorModel) and called.training:
            logits = called(*(given[name] for name in called.inputs))
        else:
            logits = logits_of(model(**given), "logits")
        loss = self.criterion(logits, inputs[self.label_names[0]])
        return (loss, {"logits": logits}) if return_outputs else loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Log no norm: the gradient of the batch has no noise yet."""

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: a step is not one batch."""
        return 0

    # --- logs and checkpoints --------------------------------------------------------------------

    def log(self, logs: dict[str, float], *further: Any, **named: Any) -> None:
        """Log what `Trainer` logs, and what has been spent."""
        if self._called is not None and self._run is not None:
            logs["epsilon"] = self._run.epsilon
        super().log(logs, *further, **named)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        if self._run is None or self.args.save_only_model or not folder.exists():
            return
        for name, contents in to_files(self._run.state_dict(), name=_STATE).items():
            (folder / name).write_bytes(contents)


class _Steps:
    """The steps of an epoch, each an iterator over the micro-batches of its sample."""

    def __init__(self, data: DataLoader[Any], *, count: int) -> None:
        self.data, self.dataset = data, data.dataset
        self.batch_size = data.batch_size
        self.loader: PrivateLoader | None = None
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[list[Any]]:
        if self.loader is None:
            raise PrivacyError("the run is not private yet: call train")
        step: list[Any] = []
        for batch in self.loader:
            step.append(batch)
            sample = self.loader.current
            if sample is not None and sample.is_last:
                yield step
                step = []


class _PrivateSteps(TrainerCallback):
    """Makes the run private when all is ready, and ends it with the budget."""

    def __init__(self, trainer: CliplessTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin; the checkpoint, if any, is loaded."""
        self._trainer.begin_private(state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Stop where the next step would exceed the budget."""
        if not self._trainer.engine.allows_step():
            control.should_training_stop = True
