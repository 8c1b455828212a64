"""Models by name: a table from names to configurations and the functions that build them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

from torch import nn

from clipless.common import did_you_mean
from clipless.models._config import ModelConfig

ConfigType = TypeVar("ConfigType", bound=ModelConfig)
Builder = Callable[[ConfigType], nn.Sequential]


@dataclass(frozen=True)
class _Entry:
    config: type[ModelConfig]
    build: Callable[[Any], nn.Sequential]


_MODELS: dict[str, _Entry] = {}


def register(
    name: str, config: type[ConfigType]
) -> Callable[[Builder[ConfigType]], Builder[ConfigType]]:
    """Register the function below it as the builder of the model `name`.

    `config` is a frozen dataclass derived from `ModelConfig`, used for this model alone.

    Example:
        >>> from dataclasses import dataclass
        >>> from clipless import models
        >>> @dataclass(frozen=True, kw_only=True)
        ... class LinearConfig(models.ModelConfig):
        ...     pass
        >>> @models.register("linear", LinearConfig)
        ... def linear(config):
        ...     return torch.nn.Sequential(
        ...         clipless.nn.BoundedInput(config.guard_norm, config.input_mode),
        ...         clipless.nn.SpectralLinear(config.input_shape[0], config.classes))
        >>> len(models.build("linear", input_shape=8, classes=2))
        2
        >>> models.unregister("linear")
    """
    if name in _MODELS:
        raise ValueError(f"there is a model {name!r} already")
    if any(entry.config is config for entry in _MODELS.values()):
        raise ValueError(f"{config.__name__} already belongs to another model: derive a new class")

    def enter(build: Builder[ConfigType]) -> Builder[ConfigType]:
        _MODELS[name] = _Entry(config, build)
        return build

    return enter


def unregister(name: str) -> None:
    """Take a model out of the table."""
    _entry(name)
    del _MODELS[name]


def names() -> tuple[str, ...]:
    """Return the names that `build` knows.

    Example:
        >>> names()
        ('head', 'lenet', 'mixer', 'mlp', 'resnet', 'vgg')
    """
    return tuple(sorted(_MODELS))


def configurations() -> dict[str, type[ModelConfig]]:
    """Return the class of each model's configuration, by the model's name."""
    return {name: _MODELS[name].config for name in names()}


def build(model: str | ModelConfig, /, **settings: Any) -> nn.Sequential:
    """Build a model from its configuration, or from its name and settings.

    The settings are the fields of the model's configuration; others are refused. Weights are drawn
    with torch's global generator, inside their constraint sets. The model takes (batch,
    *input_shape) to (batch, classes) and is 1-Lipschitz in the Euclidean norm, from what its input
    guard lets through to the logits.

    Example:
        >>> from clipless import models
        >>> model = models.build("lenet", input_shape=(1, 28, 28), classes=10)
        >>> model(torch.rand(2, 1, 28, 28)).shape
        torch.Size([2, 10])
        >>> clipless.sensitivity(model, loss=1.0, input_shape=(1, 28, 28)).lipschitz
        1.0
        >>> model = models.build(models.MLPConfig(input_shape=(20,), classes=1, hidden=(64, 64)))
    """
    if isinstance(model, str):
        config = from_dict({"name": model, **settings})
    elif settings:
        raise ValueError(f"a configuration is complete: {_listed(settings)} belong into it")
    else:
        config = model
    return _MODELS[_name_of(config)].build(config)


def to_dict(config: ModelConfig) -> dict[str, Any]:
    """Return a configuration as plain data, with its model's name: ready for JSON and TOML.

    Settings that are None are left out, since TOML cannot say them; tuples become lists.

    Example:
        >>> from clipless import models
        >>> config = models.LeNetConfig(input_shape=(1, 28, 28), classes=10)
        >>> data = to_dict(config)
        >>> data["name"], data["channels"], from_dict(data) == config
        ('lenet', [16, 32], True)
    """
    data: dict[str, Any] = {"name": _name_of(config)}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.init and value is not None:
            data[field.name] = list(value) if isinstance(value, tuple) else value
    return data


def from_dict(data: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration that plain data describe: a `name` and the settings of that model.

    Raises:
        ValueError: the name or a setting is unknown (the known ones are listed), one is missing,
            or a value is not what it should be.
    """
    if "name" not in data:
        raise ValueError(f"name is missing; the models are {_listed(names())}")
    kind = _entry(data["name"]).config
    settings = {key: value for key, value in data.items() if key != "name"}
    known = [field for field in fields(kind) if field.init]
    unknown = settings.keys() - {field.name for field in known}
    if unknown:
        hint = did_you_mean(min(unknown), (field.name for field in known))
        raise ValueError(
            f"{data['name']} has no setting {_listed(sorted(unknown))}.{hint} Its settings are "
            f"{_listed(field.name for field in known)}."
        )
    missing = [f.name for f in known if f.default is MISSING and f.name not in settings]
    if missing:
        raise ValueError(f"{data['name']} needs {_listed(missing)}")
    return kind(**settings)


def _entry(name: Any) -> _Entry:
    if not isinstance(name, str) or name not in _MODELS:
        hint = did_you_mean(name, names())
        raise ValueError(f"there is no model {name!r}.{hint} The models are {_listed(names())}.")
    return _MODELS[name]


def _name_of(config: ModelConfig) -> str:
    for name, entry in _MODELS.items():
        if entry.config is type(config):
            return name
    raise ValueError(
        f"{type(config).__name__} is the configuration of no registered model; see "
        "clipless.models.register"
    )


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)
