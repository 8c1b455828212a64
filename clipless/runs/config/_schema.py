"""JSON schema of configuration files, from the dataclasses that read them: editors complete it."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from clipless.runs.config._fields import NOTHING
from clipless.runs.config._sections import DataConfig, PrivacyConfig, TrainingConfig

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}


def config_schema() -> dict[str, Any]:
    """Return the JSON schema of the configuration of a run (draft 2020-12).

    It accepts whatever `RunConfig.from_dict` reads, and refuses unknown keys, wrong types and
    values that are not among those to choose from. What depends on several settings, such as that
    epochs exclude steps, only `RunConfig` checks. Settings of models and losses are those of all of
    them: which belong to the one that is named is not checked either.

    Example:
        >>> schema = config_schema()
        >>> schema["properties"]["privacy"]["properties"]["accountant"]["enum"]
        ['pld', 'rdp', 'filter']
    """
    return {
        "$schema": _DRAFT,
        "title": "A run of clipless",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "$schema": {"type": "string"},
            "data": section_schema(DataConfig, "Which examples."),
            "model": _choice("The model by name, and its settings.", _models()),
            "loss": _choice("The loss by name, and its settings.", _losses()),
            "privacy": section_schema(PrivacyConfig, "The budget and how it is kept."),
            "training": section_schema(TrainingConfig, "How to train."),
        },
        "required": ["data", "privacy"],
    }


def section_schema(kind: type, description: str) -> dict[str, Any]:
    """Return the schema of a section that a dataclass of options describes."""
    hints, meanings = get_type_hints(kind), _meanings(kind)
    properties = {}
    for each in fields(kind):
        found = type_schema(hints[each.name])
        if each.name in meanings:
            found["description"] = meanings[each.name]
        if each.default is not MISSING and each.default is not None:
            default = each.default
            found["default"] = list(default) if isinstance(default, tuple) else default
        properties[each.name] = found
    return {
        "type": "object",
        "description": description,
        "additionalProperties": False,
        "properties": properties,
    }


def type_schema(kind: Any) -> dict[str, Any]:
    """Return the schema of an annotated type; the word "none" stands for an absent value."""
    if kind is Any:
        return {}
    if get_origin(kind) in (Union, UnionType):
        parts = [part for part in get_args(kind) if part is not NoneType]
        found = [type_schema(part) for part in parts]
        if NoneType in get_args(kind):
            found.append({"enum": [None, NOTHING]})
        return {"anyOf": found} if len(found) > 1 else found[0]
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    if get_origin(kind) is tuple:
        inner = type_schema(get_args(kind)[0])
        return {"anyOf": [{"type": "array", "items": inner}, inner]}
    return {"type": _TYPES[kind]} if kind in _TYPES else {}


def _meanings(kind: type) -> dict[str, str]:
    """Return what the docstring of a class says of its arguments."""
    text = inspect.getdoc(kind) or ""
    _, _, arguments = text.partition("Args:\n")
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", arguments.split("\n\n")[0]):
        names, colon, words = entry.strip().partition(":")
        if colon and re.fullmatch(r"\w+(, \w+)*", names):
            found |= dict.fromkeys(names.split(", "), " ".join(words.split()))
    return found


def _choice(description: str, settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    names = sorted(settings)
    merged: dict[str, list[Any]] = {}
    for each in settings.values():
        for name, schema in each.items():
            known = merged.setdefault(name, [])
            if schema not in known:
                known.append(schema)
    properties = {}
    for name, found in sorted(merged.items()):
        kind = found[0] if len(found) == 1 else {"anyOf": found}
        properties[name] = {**kind, "description": _owners(name, settings)}
    named = {"anyOf": [{"enum": names}, {"type": "string"}]}  # others may be registered
    return {
        "type": "object",
        "description": description,
        "properties": {"name": named, **properties},
    }


def _owners(setting: str, settings: dict[str, dict[str, Any]]) -> str:
    return "Of " + ", ".join(sorted(name for name, own in settings.items() if setting in own)) + "."


def _models() -> dict[str, dict[str, Any]]:
    """Return the settings of each model, those excepted that follow from the data."""
    from clipless import models

    found = {}
    for name, kind in models.configurations().items():
        hints = get_type_hints(kind)
        found[name] = {
            each.name: type_schema(hints[each.name])
            for each in fields(kind)
            if each.init and each.name not in ("input_shape", "classes", "features")
        }
    return found | {"tabular": {}, "scattering": {}}


def _losses() -> dict[str, dict[str, Any]]:
    from clipless.runs._build import LOSSES

    return {
        name: {
            setting: {} for setting in inspect.signature(kind).parameters if setting != "reduction"
        }
        for name, kind in LOSSES.items()
    }
