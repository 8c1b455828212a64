"""Runs on images as folders: what `clipless.runs` needs to train, keep and rebuild them."""

from __future__ import annotations

from dataclasses import asdict, replace

import torch
from torch import Tensor, nn

from clipless.common import not_set_error
from clipless.folders import RunFolder
from clipless.images._model import build_network
from clipless.images._recipes import SCATTERING, rule_of
from clipless.images._train import train_images
from clipless.privacy import default_delta
from clipless.runs import Choice, ConfigError, RunConfig, RunData, TrainedRun


def resolved_images(config: RunConfig, data: RunData) -> RunConfig:
    """Return the configuration with the rule's choices as the settings of the model."""
    if data.kind != "images":
        raise ConfigError(f"the model {SCATTERING} is for images; name another one")
    if config.loss.to_dict():
        raise ConfigError(f"the model {SCATTERING} has its own loss: leave [loss] out")
    rule = rule_of(config, examples=data.size)
    device = config.training.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return replace(
        config,
        model=Choice(name=SCATTERING, settings=asdict(rule)),
        privacy=replace(config.privacy, delta=config.privacy.delta or default_delta(data.size)),
        training=replace(config.training, device=device),
    )


def train_images_run(
    config: RunConfig, data: RunData, folder: RunFolder, *, resume: bool, progress: bool | None
) -> TrainedRun:
    """Train by a resolved configuration and keep ledger, plan and weights in the folder."""
    if resume:
        raise ConfigError(
            f"images by {SCATTERING} are trained in one go and keep no checkpoints: the run in "
            f"{folder.path} cannot go on. Train anew in another folder; what its ledger counts is "
            "spent."
        )
    if config.privacy.epsilon is None:
        raise not_set_error("epsilon")
    device = torch.device(config.training.device or "cpu")
    images, labels = (part.to(device) for part in data.train)
    trained = train_images(
        images,
        labels,
        classes=data.classes,
        epsilon=config.privacy.epsilon,
        delta=config.privacy.delta,
        rule=rule_of(config, examples=data.size),
        ledger=folder.ledger,
        progress=progress,
    )
    digest = folder.write_weights(_weights(trained.model))
    plan = trained.privacy.plan
    if plan is None:
        raise not_set_error("plan")
    folder.write_plan(plan.to_dict(), belongs_to={"dataset_size": plan.sampling.dataset_size})
    test, expected = (part.to(device) for part in data.test)
    return TrainedRun(
        folder=folder.path,
        epsilon=trained.privacy.epsilon,
        delta=trained.privacy.delta,
        steps=trained.steps,
        stopped="finished",
        seconds=trained.seconds,
        metrics={"accuracy": trained.accuracy(test, expected)},
        averaged=True,
        weights_sha256=digest,
        resumed_from=None,
        report=None,
    )


def open_images(
    folder: RunFolder, config: RunConfig, *, input_shape: tuple[int, int, int], classes: int
) -> nn.Sequential:
    """Rebuild the network of a finished run from its resolved configuration and weights."""
    import safetensors.torch

    rule = rule_of(config, examples=1)  # a resolved configuration leaves nothing to the rule
    network = build_network(rule, input_shape=input_shape, classes=classes)
    weights = safetensors.torch.load(folder.read_weights())
    extra = {k: v for k, v in network.state_dict().items() if not isinstance(v, Tensor)}
    network.load_state_dict({**extra, **weights})
    return network.eval()


def _weights(network: nn.Sequential) -> bytes:
    import safetensors.torch

    state = {k: v.cpu() for k, v in network.state_dict().items() if isinstance(v, Tensor)}
    return safetensors.torch.save(state)
