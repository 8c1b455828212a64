"""Configuration layers made of command line flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clipless.runs import ConfigError, merge_config_layers, parse_value

_SECTIONS = ("data", "model", "loss", "privacy", "training")
_FILES = (".csv", ".tsv", ".gz", ".parquet", ".pq", ".npz")


def flag_layer(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested data from dotted keys; what was not given (None) is left out.

    Example:
        >>> flag_layer({"privacy.epsilon": 3.0, "training.steps": None})
        {'privacy': {'epsilon': 3.0}}
    """
    layer: dict[str, Any] = {}
    for key, value in flags.items():
        if value is not None:
            section, _, name = key.partition(".")
            layer.setdefault(section, {})[name] = value
    return layer


def set_layer(settings: Sequence[str] | None) -> dict[str, Any]:
    """Return nested data from `KEY=VALUE` texts; a key without a section is the model's.

    Example:
        >>> set_layer(["hidden=64", "training.average=0.9"])
        {'model': {'hidden': 64}, 'training': {'average': 0.9}}
    """
    layer: dict[str, Any] = {}
    for text in settings or ():
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {text}: write KEY=VALUE, such as hidden=64")
        section, dot, name = key.strip().partition(".")
        if not dot:
            section, name = "model", section
        if section not in _SECTIONS:
            raise ConfigError(f"--set {text}: the sections are {', '.join(_SECTIONS)}")
        layer = merge_config_layers(layer, {section: {name: parse_value(value)}})
    return layer


def data_layer(data: str | None) -> dict[str, Any]:
    """Return the data section for a name, or for a path that looks like a file."""
    if data is None:
        return {}
    is_file = data.lower().endswith(_FILES) or Path(data).is_file()
    return {"data": {"file" if is_file else "name": data}}
