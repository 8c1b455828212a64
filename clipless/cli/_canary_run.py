"""Training anew with canaries: a lower bound on epsilon beside the claimed one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from clipless import models
from clipless.audit import (
    CurveResult,
    audit_training_curve,
    hardest_labels,
    orthogonal_canaries,
)
from clipless.cli.commands._audit import draw_rows
from clipless.privacy import FixedSizeSampling
from clipless.runs import ConfigError, make_trainer, targets_for
from clipless.training import Trainer

if TYPE_CHECKING:
    from clipless.runs import Run, RunData


def canary_audit(
    run: Run, data: RunData, count: int, steps: int | None, confidence: float
) -> CurveResult:
    """Train once more with the model, noise strategy, sampling rate and budget of a run.

    The base are as many test examples as there are canaries: they are public, so that the audit
    costs nobody anything, and few, so that they hide little. The batch size follows their number,
    the rate stays.
    """
    described = models.from_dict(run.config.model.to_dict())
    fixed = isinstance(run.plan.sampling, FixedSizeSampling)
    shape, classes = described.input_shape, data.classes
    canaries = _canaries(run, count, shape, classes, described.guard_norm, seed=0)
    stand_ins = _canaries(run, count, shape, classes, described.guard_norm, seed=1)
    rate = run.plan.expected_batch_size / run.plan.sampling.dataset_size
    training = replace(run.config.training, epochs=None, steps=steps or run.result["steps"],
                       seed=None, device="cpu", check_bounds=0)  # fmt: skip

    def trainer_for(size: int) -> Trainer:
        batch_size = max(1, min(size, round(rate * size)))
        config = replace(run.config, training=replace(training, batch_size=batch_size))
        return make_trainer(config)

    with torch.random.fork_rng(devices=[]):
        torch.seed()
        try:
            base = draw_rows(run.tensors(data.test), count, seed=2)
            return audit_training_curve(
                trainer_for,
                base,
                canaries=_hardest(trainer_for(len(base[0])), canaries, classes),
                stand_ins=stand_ins if fixed else None,
                delta=run.plan.delta,
                confidence=confidence,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _hardest(
    trainer: Trainer, canaries: tuple[torch.Tensor, torch.Tensor], classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give canaries the labels that a model before training finds hardest, where labels are so."""
    inputs, targets = canaries
    if targets.is_floating_point() or targets.ndim != 1:
        return canaries
    return inputs, hardest_labels(
        inputs, model=trainer.model, criterion=trainer.criterion, classes=classes
    )


def _canaries(
    run: Run, count: int, shape: tuple[int, ...], classes: int, norm: float, *, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = orthogonal_canaries(count, input_shape=shape, classes=classes, norm=norm, seed=seed)
    return x, targets_for(run.config.loss, y)
