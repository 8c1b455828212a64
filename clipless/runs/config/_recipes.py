"""Recipes: configurations that come with the package, by name."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from clipless.common import did_you_mean
from clipless.runs.config._errors import ConfigError
from clipless.runs.config._files import parse_config


def recipes() -> tuple[str, ...]:
    """Return the names of the recipes.

    Example:
        >>> "mnist-epsilon3" in recipes()
        True
    """
    found = (item.name for item in files("clipless").joinpath("recipes").iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml")))


def recipe(name: str) -> dict[str, Any]:
    """Return a recipe as nested data, for `RunConfig.from_dict` or to be overridden first."""
    if name not in recipes():
        raise ConfigError(
            f"there is no recipe {name!r}.{did_you_mean(name, recipes())} The recipes are "
            f"{', '.join(recipes())}."
        )
    source = files("clipless").joinpath("recipes", f"{name}.toml")
    return parse_config(source.read_text(encoding="utf-8"), name=f"{name}.toml")
