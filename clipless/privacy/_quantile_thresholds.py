"""Thresholds that follow a private quantile: their counts are part of each step's release."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from clipless.bounds import SensitivityReport
from clipless.common import not_set_error
from clipless.nn import AffineModule, ClipGradient
from clipless.privacy._plan import ParameterPlan

# A threshold that has fallen to this part of where it began clips nearly all that is still learnt.
_SUSPICIOUS = 0.1


def quantile_layers(model: nn.Module) -> dict[str, ClipGradient | AffineModule]:
    """The layers whose threshold follows a quantile, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, ClipGradient | AffineModule) and module.follow is not None
    }


def quantile_thresholds(model: nn.Module) -> dict[str, float]:
    """Return the thresholds that follow a quantile, by the path of their layer."""
    return {path: layer.threshold() for path, layer in quantile_layers(model).items()}


@contextmanager
def initial_quantile_thresholds(
    model: nn.Module, state: Mapping[str, Any] | None
) -> Iterator[None]:
    """Let a run that is resumed be planned as it was: with the thresholds that it began with.

    Afterwards they are where they had moved to, and the session proves its bounds anew for them.
    """
    moved = quantile_thresholds(model)
    first = {} if state is None else state.get("thresholds", {})
    set_quantile_thresholds(model, first)
    try:
        yield
    finally:
        set_quantile_thresholds(model, moved)


def set_quantile_thresholds(model: nn.Module, values: Mapping[str, float]) -> None:
    """Set the thresholds that follow a quantile; layers that are not named keep theirs."""
    for path, layer in quantile_layers(model).items():
        if path in values and layer.threshold() != values[path]:
            layer.set_threshold(values[path])


def planned_queries(model: nn.Module, report: SensitivityReport) -> tuple[ParameterPlan, ...]:
    """The counts that a step releases: each use of a layer adds at most one for each example.

    Rows are counted, and the count is divided by the views that every example has.
    """
    return tuple(
        ParameterPlan(
            name=f"examples above the threshold of {path}",
            size=1,
            gradient_bound=float(_uses(path, report)),
        )
        for path in quantile_layers(model)
    )


class QuantileThresholds:
    """Takes the counts of a step, and moves the thresholds once the counts have their noise."""

    def __init__(self, model: nn.Module, report: SensitivityReport, divisor: float) -> None:
        self._layers = quantile_layers(model)
        self._divisor = divisor
        self._warned: set[str] = set()
        self._begun = {path: layer.threshold() for path, layer in self._layers.items()}
        self._largest = {path: _largest(path, report) for path in self._layers}
        self._uses = {path: _uses(path, report) for path in self._layers}

    def expect(self, rows: int, shares: Tensor | None = None) -> None:
        """Count from here on, as often as is planned; drop what other passes have counted."""
        for path, layer in self._layers.items():
            layer.exceeded.expect(self._uses[path], rows, shares)

    def add_to(self, counts: dict[str, Tensor]) -> None:
        """Take what the layers have counted since `expect`."""
        for path, layer in self._layers.items():
            count = layer.exceeded.take()
            if count is not None:
                counts[path] = count + counts.get(path, 0.0)

    def fractions(self, counts: Mapping[str, Tensor], like: Tensor) -> list[Tensor]:
        """Return, for each layer, the fraction of examples above its threshold, without noise."""
        none = torch.zeros(1, device=like.device)
        return [
            counts.get(path, none).reshape(1).to(like.device) / self._divisor
            for path in self._layers
        ]

    def move(self, fractions: list[Tensor]) -> None:
        """Move the thresholds, given the fractions with their noise."""
        for (path, layer), fraction in zip(self._layers.items(), fractions, strict=True):
            if layer.follow is None:
                raise not_set_error("follow")
            largest = self._largest[path]
            moved = layer.follow.moved(
                layer.threshold(), fraction_above=float(fraction), largest=largest
            )
            layer.set_threshold(moved)
            begun = self._begun[path]
            if moved < _SUSPICIOUS * begun and path not in self._warned:
                self._warned.add(path)
                warnings.warn(
                    f"the threshold of {path} has followed its quantile down to {moved:.2g}, "
                    f"{moved / begun:.0%} of where it began. Where classes are imbalanced this "
                    "clips the rare ones, whose examples still have large gradients: a fixed "
                    "threshold does not.",
                    stacklevel=2,
                )


def _uses(path: str, report: SensitivityReport) -> int:
    return sum(node.name == path for node in report.nodes)


def _largest(path: str, report: SensitivityReport) -> float:
    """What reaches a layer's clipping at most: no threshold needs to be larger.

    For logits that is the arriving cotangent, for a weight the cotangent times its Jacobian.
    """
    nodes = [node for node in report.nodes if node.name == path]
    weight = f"{path}.weight" if path else "weight"
    return max(node.cotangent_bound * node.jacobians.get(weight, 1.0) for node in nodes)
