"""Configuration files, and layers of them: a recipe, a file, flags; later ones override."""

from __future__ import annotations

import importlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clipless.common import MALFORMED_ERRORS, error_text
from clipless.runs.config._errors import ConfigError

# Of each group one key may be given; a later layer's choice replaces an earlier one's.
_ALTERNATIVES = {"data": (("name", "file"),), "training": (("epochs", "steps"),)}
# A model's or loss's settings mean nothing to another one.
_NAMED = ("model", "loss")


def read_config_file(path: Any) -> dict[str, Any]:
    """Return the nested data of a TOML, YAML or JSON file, known by its ending."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {path} cannot be read: {error}") from error
    return parse_config(text, name=str(path))


def parse_config(text: str, *, name: str) -> dict[str, Any]:
    """Return the nested data of a configuration; `name` says by its ending what it is written in.

    Example:
        >>> parse_config('[privacy]\\nepsilon = 3.0', name="run.toml")
        {'privacy': {'epsilon': 3.0}}
    """
    ending = Path(name).suffix.lower()
    try:
        if ending == ".toml":
            data: Any = tomllib.loads(text)
        elif ending in (".yaml", ".yml"):
            data = _yaml(text)
        elif ending == ".json":
            data = json.loads(text)
        else:
            raise ConfigError(f"{name}: a configuration ends in .toml, .yaml or .json")
    except ConfigError:
        raise
    except MALFORMED_ERRORS as error:
        raise ConfigError(f"{name} is not valid: {error_text(error)}") from error
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{name} must hold the sections of a configuration, [data] and so on")
    return {key: value for key, value in data.items() if key != "$schema"}  # that is for editors


def _yaml(text: str) -> Any:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError("YAML needs PyYAML: pip install 'clipless[cli]', or use TOML") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def merge_config_layers(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested data in which later layers override earlier ones, key by key.

    A layer that names another model or loss drops the settings of the one before, and one of two
    alternatives (epochs or steps, a data set or a file) replaces the other.

    Example:
        >>> base = {"training": {"epochs": 3, "pad": True}}
        >>> merge_config_layers(base, {"training": {"steps": 10}})
        {'training': {'pad': True, 'steps': 10}}
    """
    result: dict[str, Any] = {}
    for layer in layers:
        for section, given in layer.items():
            before = result.get(section, {})
            if not isinstance(given, Mapping) or not isinstance(before, Mapping):
                result[section] = given
                continue
            kept = dict(before)
            if section in _NAMED and given.get("name", kept.get("name")) != kept.get("name"):
                kept = {}
            for group in _ALTERNATIVES.get(section, ()):
                if any(given.get(key) is not None for key in group):
                    kept = {key: value for key, value in kept.items() if key not in group}
            result[section] = {**kept, **given}
    return result
