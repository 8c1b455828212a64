"""Thresholds that follow a quantile, of a run that is resumed: planned as they were at first."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from clipless.privacy._following import following_layers


def thresholds(model: nn.Module) -> dict[str, float]:
    """Return the thresholds that follow a quantile, by the path of their layer."""
    return {path: layer.threshold() for path, layer in following_layers(model).items()}


def set_thresholds(model: nn.Module, values: Mapping[str, float]) -> None:
    """Set the thresholds that follow a quantile; layers that are not named keep theirs."""
    for path, layer in following_layers(model).items():
        if path in values:
            layer.set_threshold(values[path])
