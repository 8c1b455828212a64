"""Certified accuracy of a run on a table: radii in units of the columns' private spreads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from clipless.runs import ConfigError, as_arrays

if TYPE_CHECKING:
    from clipless.runs import Run, RunData

_POINTS = 101


def certified_table(
    run: Run, data: RunData, radii: list[float], examples: int | None
) -> dict[str, Any]:
    """Return the fields of robustness.json, and a table to show."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from clipless.sklearn import same_labels

    if not hasattr(run.estimator, "classes_"):
        raise ConfigError("a regression makes no decisions: there is nothing to certify")
    features, target = (as_arrays(part)[:examples] for part in data.test)
    right = same_labels(run.estimator.predict(features), target)
    kept = np.where(right, run.estimator.certified_radius(features), -1.0)
    largest = 1.02 * max(float(kept.max()), *radii, 1e-12)
    grid = np.linspace(0.0, largest, _POINTS).tolist()
    fields: dict[str, Any] = {
        "radii": radii,
        "accuracies": [float((kept >= radius).mean()) for radius in radii],
        "clean_accuracy": float(right.mean()),
        "curve_radii": grid,
        "curve_accuracies": [float((kept >= radius).mean()) for radius in grid],
        "median_radius": float(np.median(kept[right])) if right.any() else 0.0,
        "examples": len(right),
        "method": "margin",
        "unit": data.unit,
    }
    table = Table(title="Certified accuracy", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("radius", justify="right")
    table.add_column("certified", justify="right")
    for radius, accuracy in zip(radii, fields["accuracies"], strict=True):
        table.add_row(f"{radius:g}", f"{accuracy:.2%}")
    text = (
        f"{len(right)} rows, {fields['clean_accuracy']:.2%} right. Radii are Euclidean over the "
        "numeric columns, each in units of its private spread; categories and gaps stay as they "
        "are."
    )
    return {"fields": fields, "shown": [table, text]}
