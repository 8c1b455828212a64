"""Recipes for images: configurations by name, run from the data to the figure."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import Any, get_type_hints

import torch

from clipless.common import not_set_error
from clipless.images._rule import ImageRule
from clipless.images._train import TrainedImages, train_images
from clipless.runs import (
    ConfigError,
    RunConfig,
    RunData,
    as_type,
    load_data,
    recipe,
    recipes,
    refuse_unknown,
)

SCATTERING = "scattering"
"""The name of these classifiers among the models of a configuration."""
# Settings of `ImageRule.choose`, beside those of the rule itself.
_CHOICES = ("mirror", "certified")


@dataclass(frozen=True, kw_only=True)
class RecipeResult:
    """The result of a recipe, with all that is needed to repeat it."""

    dataset: str
    recipe: str
    epsilon: float
    """What was spent, statistics and training together."""
    delta: float
    seed: int
    accuracy: float
    """On the test set, from 0 to 1."""
    seconds: float
    """Features, statistics and training, without reading the data."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def image_recipes() -> tuple[str, ...]:
    """Return the names of the recipes that this package runs.

    Example:
        >>> "cifar10-epsilon3" in image_recipes()
        True
    """
    return tuple(name for name in recipes() if image_config(name) is not None)


def image_config(name: str) -> RunConfig | None:
    """Return the configuration of a recipe, or None if it is one of another kind."""
    config = RunConfig.from_dict(recipe(name))
    return config if config.model.name == SCATTERING else None


def rule_of(config: RunConfig, *, examples: int) -> ImageRule:
    """Return the rule's choices for a configuration, its settings in place of some of them."""
    if config.privacy.epsilon is None:
        raise ConfigError("images by scattering need privacy.epsilon: the rule starts from it")
    given = dict(config.model.settings)
    choices = {
        key: as_type(given.pop(key), bool, where=f"model.{key}") for key in _CHOICES if key in given
    }
    rule = ImageRule.choose(examples=examples, epsilon=config.privacy.epsilon, **choices)
    kinds = get_type_hints(ImageRule)
    refuse_unknown(given, kinds, where=f"[model] {SCATTERING}")
    changes: dict[str, Any] = {
        key: as_type(value, kinds[key], where=f"model.{key}") for key, value in given.items()
    }
    return replace(rule, **changes)


def run_recipe(
    name: str,
    *,
    root: str | os.PathLike[str] | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    data: RunData | None = None,
    features: torch.Tensor | None = None,
    progress: bool = False,
) -> tuple[RecipeResult, TrainedImages]:
    """Train by a recipe and measure on the test set.

    Args:
        name: one of `image_recipes()`.
        root: the folder of the data; see `clipless.data.load`.
        seed: names the result among repetitions; what differs between them is their noise.
        device: by default a GPU if there is one.
        data, features: the recipe's data, and the features of its training images, if they are
            there already.
    """
    config = image_config(name)
    if config is None:
        raise ConfigError(f"{name} is no recipe for images; they are {', '.join(image_recipes())}")
    place = None if root is None else str(root)
    found = data or load_data(replace(config.data, root=place))
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    images, labels = (part.to(target) for part in found.train)
    if config.privacy.epsilon is None:
        raise not_set_error("epsilon")
    trained = train_images(
        images,
        labels,
        classes=found.classes,
        epsilon=config.privacy.epsilon,
        delta=config.privacy.delta,
        rule=rule_of(config, examples=len(images)),
        features=features,
        progress=progress,
    )
    test, expected = (part.to(target) for part in found.test)
    result = RecipeResult(
        dataset=str(config.data.name),
        recipe=name,
        epsilon=trained.privacy.epsilon,
        delta=trained.privacy.delta,
        seed=seed,
        accuracy=trained.accuracy(test, expected),
        seconds=trained.seconds,
    )
    return result, trained
