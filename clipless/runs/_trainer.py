"""The trainer of a resolved configuration."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from clipless.privacy import BatchOptions, PrivacyOptions
from clipless.runs import _build as _parts
from clipless.runs.config._sections import RunConfig
from clipless.training import Callback, Trainer, TrainingOptions


def make_trainer(
    config: RunConfig,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
) -> Trainer:
    """Return a new trainer with a new model; weights are drawn from torch's global generator."""
    training, privacy = config.training, config.privacy
    device = torch.device(training.device or "cpu")
    if device.type == "cuda":
        # The slack in the sensitivities covers what is asked for: the engine refuses other TF32.
        rounded = training.precision == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = rounded
    return Trainer(
        _parts.build_model(config),
        _parts.build_loss(config.loss),
        target_epsilon=privacy.epsilon,
        target_delta=privacy.delta,
        noise_multiplier=privacy.noise_multiplier,
        batch_size=training.batch_size,
        epochs=training.epochs,
        steps=training.steps,
        run_dir=run_dir,
        options=PrivacyOptions(
            sampling=privacy.sampling,
            relation=privacy.relation,
            noise=privacy.noise,
            precision=training.precision,
            compile=training.compile,
            batches=BatchOptions(
                micro_batch_size=training.micro_batch_size,
                pad=training.pad,
                augment=_parts.make_augmentation(training),
                views=training.views,
            ),
        ),
        training=TrainingOptions(
            optimizer=_parts.make_optimizer(training),
            scheduler="cosine" if training.schedule == "cosine" else None,
            average=training.average,
            accountant=privacy.accountant,
            resume=resume,
            checkpoint_every=training.checkpoint_every,
            keep_checkpoints=training.keep_checkpoints,
            device=device,
            callbacks=callbacks,
            progress=progress,
        ),
    )
