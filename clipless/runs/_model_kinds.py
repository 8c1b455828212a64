"""Kinds of runs: networks by name, and those whose training follows a rule."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal

from clipless.runs.config._errors import ConfigError
from clipless.runs.config._sections import PrivacyConfig, RunConfig, TrainingConfig
from clipless.runs.data._load import RunData

Kind = Literal["network", "tabular", "scattering"]

TABULAR, SCATTERING = "tabular", "scattering"
"""Models that are trained by a rule: the estimators for tables, and images by scattering."""

_OWN_TRAINING = ("seed", "device")
_OWN_PRIVACY = ("epsilon", "delta")


def default_model(data: RunData) -> str:
    """Return the model that data are trained with unless another is named."""
    if data.kind != "images":
        return TABULAR
    return "lenet" if min(data.input_shape[1:]) >= 16 else "mlp"


def run_kind(model: str | None) -> Kind:
    """Return the kind of run that a model's name stands for."""
    if model == TABULAR:
        return "tabular"
    return "scattering" if model == SCATTERING else "network"


def refuse_unused_settings(config: RunConfig, kind: Kind) -> None:
    """Refuse settings that a rule would ignore."""
    what = "tables" if kind == "tabular" else "images by scattering"
    sections: tuple[tuple[str, Any, Any, tuple[str, ...]], ...] = (
        ("training", config.training, TrainingConfig(), _OWN_TRAINING),
        ("privacy", config.privacy, PrivacyConfig(epsilon=1.0), _OWN_PRIVACY),
    )
    for section, given, default, own in sections:
        for each in fields(given):
            name = each.name
            if name not in own and getattr(given, name) != getattr(default, name):
                raise ConfigError(
                    f"{section}.{name} does not apply to {what}, whose training follows a rule. "
                    "Its choices can be set as those of the model: --set steps=300."
                )
    if config.privacy.epsilon is None:
        raise ConfigError(f"{what} need privacy.epsilon (--epsilon): the rule starts from it")
    if config.loss.to_dict():
        raise ConfigError(f"{what} have their own loss: leave [loss] out")
