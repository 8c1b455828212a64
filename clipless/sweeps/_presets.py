"""The search spaces of the paper's appendix, as sweeps to start from.

What the tables there call input clipping is the norm of the input guard; alpha belongs to the
hinge-KR loss, tau to cross-entropy and K, the floor, to cosine similarity. Nearly everything there
is drawn on a logarithmic scale, and so it is here. Loss gradients are clipped automatically, at
their 90% quantile; `training.clip_quantile = "none"` leaves that out, as imbalanced classes may
want it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clipless.common import did_you_mean
from clipless.runs import ConfigError

_CLIPPED = {"clip_quantile": 0.9}
_BATCHES = {"low": 512, "high": 10_000, "integer": True}


def _images(
    *,
    models: list[str],
    losses: list[str],
    input_norm: float,
    batches: Mapping[str, Any],
    tau: tuple[float, float],
) -> dict[str, Any]:
    parts = {
        "loss.alpha": ("hinge_kr", 1e-2, 2e3),
        "loss.tau": ("cross_entropy", *tau),
        "loss.floor": ("cosine_similarity", 1e-2, 1.0),
    }
    return {
        "model.name": models,
        "model.input_norm": {"low": input_norm, "high": 1.0},
        "training.batch_size": dict(batches),
        "loss.name": losses,
        **{
            name: {"low": low, "high": high, "when": {"loss.name": loss}}
            for name, (loss, low, high) in parts.items()
            if loss in losses
        },
    }


_THREE_LOSSES = ["cross_entropy", "hinge_kr", "cosine_similarity"]
_PRESETS: dict[str, dict[str, Any]] = {
    "tabular": {
        "model": {"name": "mlp"},
        "loss": {"name": "binary_cross_entropy"},
        "training": _CLIPPED,
        "space": {
            "training.batch_size": _BATCHES,
            "loss.tau": {"low": 1e-2, "high": 100.0},
            "training.learning_rate": {"low": 1e-5, "high": 1.0},
        },
    },
    "mnist": {
        "data": {"name": "mnist"},
        "training": _CLIPPED,
        "space": _images(
            models=["mlp", "lenet"],
            losses=_THREE_LOSSES[:2],
            input_norm=0.1,
            batches=_BATCHES,
            tau=(1e-2, 18.0),
        ),
    },
    "fashion-mnist": {
        "data": {"name": "fashion-mnist"},
        "training": _CLIPPED,
        "space": _images(
            models=["vgg"],
            losses=_THREE_LOSSES,
            input_norm=0.1,
            batches={**_BATCHES, "low": 5_000},
            tau=(1e-2, 40.0),
        ),
    },
    "cifar10": {
        "data": {"name": "cifar10"},
        "training": _CLIPPED,
        "space": _images(
            models=["vgg", "resnet", "mixer"],
            losses=_THREE_LOSSES,
            input_norm=1e-2,
            batches=_BATCHES,
            tau=(1e-3, 32.0),
        ),
    },
}


def presets() -> tuple[str, ...]:
    """Return the names of the presets.

    Example:
        >>> presets()
        ('cifar10', 'fashion-mnist', 'mnist', 'tabular')
    """
    return tuple(sorted(_PRESETS))


def preset(name: str) -> dict[str, Any]:
    """Return a preset as nested data: sections of a run, and `space`.

    Example:
        >>> preset("mnist")["space"]["loss.tau"]
        {'low': 0.01, 'high': 18.0, 'when': {'loss.name': 'cross_entropy'}}
    """
    if name not in _PRESETS:
        raise ConfigError(
            f"there is no preset {name!r}.{did_you_mean(name, presets())} The presets are "
            f"{', '.join(presets())}."
        )
    return {section: dict(given) for section, given in _PRESETS[name].items()}
