"""Model, loss, optimizer and augmentation of a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from clipless import losses, models
from clipless.bounds import clip_products
from clipless.common import did_you_mean, not_set_error
from clipless.data import Augmentation, Compose, RandomCrop, RandomFlip
from clipless.nn import ClipGradient, FollowQuantile
from clipless.privacy import default_delta, named_sampling, steps_of_one_pass
from clipless.runs._model_kinds import SCATTERING, TABULAR, default_model
from clipless.runs.config._errors import ConfigError
from clipless.runs.config._fields import as_type, listed, refuse_unknown
from clipless.runs.config._sections import Choice, RunConfig, TrainingConfig
from clipless.runs.data._load import RunData
from clipless.training import LayerAdam

LOSSES: dict[str, type[losses.Loss]] = {
    "cross_entropy": losses.CrossEntropy,
    "binary_cross_entropy": losses.BinaryCrossEntropy,
    "cosine_similarity": losses.CosineSimilarity,
    "multiclass_hinge": losses.MulticlassHinge,
    "kantorovich_rubinstein": losses.KantorovichRubinstein,
    "hinge_kr": losses.HingeKR,
}
_USUAL_LOSS = {"tau": 10.0}
_USUAL_STEPS = 400


def resolved_config(config: RunConfig, data: RunData) -> RunConfig:
    """Return the configuration with everything filled in that was left to defaults."""
    loss = resolved_loss(config.loss)
    model = _resolved_model(config.model, data, binary=loss.name == "binary_cross_entropy")
    training, privacy = config.training, config.privacy
    if training.epochs is None and training.steps is None:
        training = replace(training, steps=_USUAL_STEPS)
    batch_size = training.batch_size or min(data.size, max(256, data.size // 16))
    if batch_size > data.size:
        raise ConfigError(f"training.batch_size={batch_size} exceeds the {data.size} examples")
    if privacy.sampling == "full_batch":
        batch_size = data.size
    device = training.device or str(usable_device(None))
    pass_steps = steps_of_one_pass(named_sampling(privacy.sampling, data.size, batch_size))
    steps = training.steps or round((training.epochs or 0) * pass_steps)
    return replace(
        config,
        model=model,
        loss=loss,
        privacy=replace(privacy, delta=privacy.delta or default_delta(data.size)),
        training=replace(
            training,
            batch_size=batch_size,
            device=device,
            pad=training.compile if training.pad is None else training.pad,
            # An epoch may be one step, and a checkpoint waits for the disk.
            checkpoint_every=training.checkpoint_every or max(pass_steps, -(-steps // 20)),
        ),
    )


def check_names(model: Choice, loss: Choice) -> None:
    """Refuse a model or a loss that does not exist, with the nearest one that does."""
    known = (*models.names(), SCATTERING, TABULAR)
    if model.name is not None and model.name not in known:
        raise ConfigError(
            f"there is no model {model.name!r}.{did_you_mean(model.name, known)} The models are "
            f"{listed(models.names())}, {SCATTERING} for images and {TABULAR} for tables."
        )
    if loss.name is not None and loss.name not in LOSSES:
        raise ConfigError(
            f"there is no loss {loss.name!r}.{did_you_mean(loss.name, LOSSES)} The losses are "
            f"{listed(LOSSES)}."
        )


def usable_device(name: str | None) -> torch.device:
    """Return a device that tensors can be put on, by default a GPU if there is one, or refuse it.

    Example:
        >>> usable_device("cpu")
        device(type='cpu')
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        gpus = torch.cuda.device_count()
        there = f"cpu and {gpus} GPU(s), cuda:0 and so on" if gpus else "cpu alone: there is no GPU"
        said = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"the device {name!r} cannot be used ({said}). This torch can use {there}."
        ) from error
    return device


def build_model(config: RunConfig) -> nn.Module:
    """Build the model of a resolved configuration, gradients clipped as it says."""
    settings = config.model.to_dict()
    quantile, loss = config.training.clip_quantile, build_loss(config.loss)
    begin = None if quantile is None else settings.pop("clip_gradient", None)
    try:
        described = models.from_dict(settings)
        model = models.build(described)
    except ValueError as error:
        raise ConfigError(f"[model] {error}") from error
    if quantile is not None:
        norm = begin or loss.lipschitz_for((described.classes,))
        model.append(ClipGradient(norm, follow=FollowQuantile(quantile=quantile)))
    fraction = config.training.product_clip
    if fraction is not None:
        clip_products(
            model,
            fraction=fraction,
            loss=loss,
            input_shape=described.input_shape,
        )
    return model


def input_shape(config: RunConfig) -> tuple[int, ...]:
    """Return the shape of one example of a resolved configuration."""
    return models.from_dict(config.model.to_dict()).input_shape


def loss_names() -> tuple[str, ...]:
    """Return the names that a configuration may give a loss."""
    return tuple(LOSSES)


def build_loss(choice: Choice) -> losses.Loss:
    """Build the loss of a resolved configuration."""
    if choice.name is None:
        raise not_set_error("name")
    try:
        return LOSSES[choice.name](**choice.settings)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"[loss] {choice.name}: {error}") from error


def make_optimizer(
    training: TrainingConfig,
) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """Return the function from parameters to the optimizer that a configuration names."""

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        rate, decay = training.learning_rate, training.weight_decay
        if training.optimizer == "sgd":
            return torch.optim.SGD(
                parameters, lr=rate, momentum=training.momentum, weight_decay=decay
            )
        if training.optimizer == "adam":
            return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay)
        return LayerAdam(parameters, lr=rate, weight_decay=decay)

    return make


def make_augmentation(training: TrainingConfig) -> Augmentation | None:
    """Return the augmentation that a configuration lists, or None."""
    parts: list[Augmentation] = []
    for text in training.augment:
        name, _, number = text.partition(":")
        if name == "flip" and not number:
            parts.append(RandomFlip())
        elif name == "crop" and number.isdigit() and int(number) > 0:
            parts.append(RandomCrop(int(number)))
        else:
            raise ConfigError(f"training.augment knows flip and crop:N (pixels), not {text!r}")
    return Compose(*parts) if parts else None


def targets_for(choice: Choice, targets: torch.Tensor) -> torch.Tensor:
    """Return class numbers as the loss wants them."""
    return targets.float() if choice.name == "binary_cross_entropy" else targets


# --- what is left to defaults --------------------------------------------------------------------


def _resolved_model(choice: Choice, data: RunData, *, binary: bool) -> Choice:
    name = choice.name or default_model(data)
    check_names(Choice(name=name), Choice())
    if data.kind == "table":
        raise ConfigError(f"a table of your own is trained with the model {TABULAR}, not {name}")
    settings = dict(choice.settings)
    found: dict[str, Any] = {"classes": 1 if binary else data.classes}
    if name == "head":
        found["features"] = data.input_shape[0]
    else:
        found["input_shape"] = list(data.input_shape)
    for key, value in found.items():
        if settings.setdefault(key, value) != value:
            raise ConfigError(f"model.{key} is {settings[key]}, but the data have {value}")
    if binary and data.classes != 2:
        raise ConfigError(f"binary_cross_entropy is for two classes; the data have {data.classes}")
    try:
        described = models.to_dict(models.from_dict({"name": name, **settings}))
    except ValueError as error:
        raise ConfigError(f"[model] {error}") from error
    return Choice(name=name, settings={k: v for k, v in described.items() if k != "name"})


def resolved_loss(choice: Choice) -> Choice:
    """Return a loss with all of its settings, the usual one if none is named."""
    name = choice.name or "cross_entropy"
    check_names(Choice(), Choice(name=name))
    parameters = dict(inspect.signature(LOSSES[name]).parameters)
    parameters.pop("reduction")
    refuse_unknown(choice.settings, parameters, where=f"[loss] {name}")
    settings: dict[str, Any] = {}
    for key, parameter in parameters.items():
        default = _USUAL_LOSS.get(key, parameter.default)
        value = choice.settings.get(key, default)
        if value is inspect.Parameter.empty:
            raise ConfigError(f"[loss] {name} needs {key}")
        if value is not None:
            numeric = key not in ("classes", "class_reduction")
            settings[key] = as_type(value, float, where=f"loss.{key}") if numeric else value
    full = Choice(name=name, settings=settings)
    build_loss(full)
    return full
