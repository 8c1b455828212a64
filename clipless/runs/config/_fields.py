"""Plain data from TOML, YAML, JSON or flags, checked against the types of a dataclass."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from clipless.common import did_you_mean
from clipless.runs.config._errors import ConfigError

Section = TypeVar("Section")

NOTHING = "none"
"""What stands for an absent value where a format, such as TOML, has none."""


def read_section(kind: type[Section], data: Any, *, where: str) -> Section:
    """Return a dataclass from a mapping; unknown keys and wrong types are refused by name."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"[{where}] must be a table of settings, got {data!r}")
    hints = get_type_hints(kind)
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    refuse_unknown(data, known, where=f"[{where}]")
    return kind(**{key: as_type(data[key], hints[key], where=f"{where}.{key}") for key in data})


def refuse_unknown(names: Iterable[str], known: Iterable[str], *, where: str) -> None:
    """Refuse names that are not known, with the nearest one that is."""
    known = list(known)
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"{where} has no setting {name!r}.{hint} It has {', '.join(known)}.")


def as_type(value: Any, kind: Any, *, where: str) -> Any:
    """Return a value as the annotated type, or refuse it.

    Example:
        >>> as_type(3, float, where="privacy.epsilon")
        3.0
        >>> as_type(["flip"], tuple[str, ...], where="training.augment")
        ('flip',)
    """
    if get_origin(kind) in (Union, UnionType):  # an optional value
        if value is None or value == NOTHING:
            return None
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
    if kind is Any:
        return value
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            hint = did_you_mean(value, map(str, get_args(kind)))
            raise ConfigError(
                f"{where} must be one of {listed(get_args(kind))}, got {value!r}.{hint}"
            )
        return value
    if get_origin(kind) is tuple:
        parts = value if isinstance(value, list | tuple) else [value]
        return tuple(as_type(part, get_args(kind)[0], where=where) for part in parts)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) <= sys.float_info.max:
            raise ConfigError(f"{where} must be finite, got {value!r:.40}")
        return float(value)
    right = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
    if not right:
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise ConfigError(f"{where} must be {names[kind]}, got {value!r}")
    return value


def parse_value(text: str) -> Any:
    """Return the value that a text on the command line stands for, as TOML would read it.

    Several values may be separated by commas; what is no TOML is text.

    Example:
        >>> parse_value("64"), parse_value("1e-5"), parse_value("16,32"), parse_value("sphere")
        (64, 1e-05, [16, 32], 'sphere')
    """
    for candidate in (text, f"[{text}]") if "," in text else (text,):
        try:
            return tomllib.loads(f"value = {candidate}")["value"]
        except tomllib.TOMLDecodeError:
            continue
    return text.split(",") if "," in text else text


def check_setting(condition: bool, message: str) -> None:
    """Raise a `ConfigError` unless a condition holds."""
    if not condition:
        raise ConfigError(message)


def listed(words: Iterable[Any]) -> str:
    """Return words separated by commas."""
    return ", ".join(map(str, words))
