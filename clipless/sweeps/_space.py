"""Search spaces: which settings of a run are searched, and where.

[space]
"training.learning_rate" = {low = 1e-4, high = 1.0}
"training.batch_size" = {low = 512, high = 10000, integer = true}
"loss.name" = ["cross_entropy", "hinge_kr"]
"loss.alpha" = {low = 0.01, high = 2000.0, when = {"loss.name" = "hinge_kr"}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from clipless.runs import ConfigError, RunConfig, check_setting, refuse_unknown

if TYPE_CHECKING:
    import optuna

_SECTIONS = tuple(RunConfig.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers from `low` to `high`, both included; `log` draws their logarithm evenly."""

    low: float
    high: float
    log: bool = True
    integer: bool = False
    when: Mapping[str, Any] = field(default_factory=dict)
    """The parameter exists only where these settings have these values."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        numbers = (self.low, self.high)
        check_setting(
            all(_is_number(each) and math.isfinite(each) for each in numbers),
            f"a range needs finite numbers low and high, got {self.low!r} and {self.high!r}",
        )
        check_setting(
            self.low < self.high, f"low must be below high, got {self.low} and {self.high}"
        )
        check_setting(
            not self.log or self.low > 0, f"low must be above 0 on a log scale: {self.low}"
        )
        check_setting(
            not self.integer or all(float(each).is_integer() for each in numbers),
            f"low and high of a range of integers must be integers, got {self.low}, {self.high}",
        )

    def suggest(self, trial: optuna.Trial, name: str) -> Any:
        """Let a sampler choose."""
        if self.integer:
            return trial.suggest_int(name, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(name, self.low, self.high, log=self.log)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        found = {"low": self.low, "high": self.high, "log": self.log, "integer": self.integer}
        return {**found, **({"when": dict(self.when)} if self.when else {})}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """One of several values: numbers, texts, lists."""

    values: tuple[Any, ...]
    when: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        check_setting(len(self.values) > 0, "a choice needs at least one value")
        words = [json.dumps(value) for value in self.values]
        check_setting(len(set(words)) == len(words), f"values are repeated in {list(self.values)}")

    def suggest(self, trial: optuna.Trial, name: str) -> Any:
        """Let a sampler choose. Databases keep scalars only, so lists travel as JSON."""
        return json.loads(trial.suggest_categorical(name, [json.dumps(v) for v in self.values]))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"values": list(self.values), **({"when": dict(self.when)} if self.when else {})}


Parameter = Range | Choices


@dataclass(frozen=True, kw_only=True)
class Space:
    """Parameters by the setting that they decide, such as `training.learning_rate`.

    Example:
        >>> space = Space.from_dict({"loss.tau": {"low": 0.1, "high": 18.0},
        ...                          "model.name": ["mlp", "lenet"]})
        >>> space.parameters["loss.tau"].high, space.parameters["model.name"].values
        (18.0, ('mlp', 'lenet'))
        >>> Space.from_dict(space.to_dict()) == space
        True
    """

    parameters: Mapping[str, Parameter]

    def __post_init__(self) -> None:
        """Refuse names that no run has, and conditions on what is decided later."""
        check_setting(
            len(self.parameters) > 0, "the space is empty: name at least one setting to search"
        )
        before: list[str] = []
        for name, parameter in self.parameters.items():
            section, dot, key = name.partition(".")
            check_setting(
                bool(dot and key) and section in _SECTIONS,
                f"space: {name!r} is no setting of a run; write section.key, with one of the "
                f"sections {', '.join(_SECTIONS)}",
            )
            for other in parameter.when:
                check_setting(
                    other not in self.parameters or other in before,
                    f"space: {name} depends on {other}, which must come before it",
                )
            before.append(name)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read a space from plain data: a table for a range, a list for a choice."""
        return cls(parameters={name: _parameter(name, given) for name, given in data.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, which `from_dict` reads."""
        return {name: parameter.to_dict() for name, parameter in self.parameters.items()}

    def suggest(self, trial: optuna.Trial, *, decided: Mapping[str, Any]) -> dict[str, Any]:
        """Return a value for every parameter whose condition holds, given other settings."""
        found: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            known = {**decided, **found}
            if all(known.get(other) == value for other, value in parameter.when.items()):
                found[name] = parameter.suggest(trial, name)
        return found


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of nested data by dotted names.

    Example:
        >>> flat({"privacy": {"epsilon": 3.0}})
        {'privacy.epsilon': 3.0}
    """
    return {
        f"{section}.{key}": value
        for section, settings in config.items()
        for key, value in settings.items()
    }


def nested(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return nested data from dotted names: what `flat` undoes."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        found.setdefault(section, {})[key] = value
    return found


def _parameter(name: str, given: Any) -> Parameter:
    try:
        if isinstance(given, list | tuple):
            return Choices(values=tuple(given))
        check_setting(
            isinstance(given, Mapping),
            "write a list of values, or a table with low and high",
        )
        if "values" in given:
            refuse_unknown(given, ("values", "when"), where="a choice")
            return Choices(values=tuple(given["values"]), when=given.get("when", {}))
        refuse_unknown(given, tuple(Range.__dataclass_fields__), where="a range")
        check_setting("low" in given and "high" in given, "a range needs low and high")
        return Range(**given)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"space: {name}: {error}") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
