"""Summary files of a finished sweep, public and private."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from clipless.folders import json_data
from clipless.sweeps._pareto import plot_front
from clipless.sweeps._result import SweepResult

_OWN = (
    "for the owner of the data: the runs and their scores depend on private data, and showing them "
    "costs selection.composition"
)
_SECRET = (
    "secret: the price of the selection holds only if the other runs and their number stay hidden; "
    "selected.json may be shown"
)


def write_summary(result: SweepResult, *, plot: bool = True) -> dict[str, Path]:
    """Write sweep.json, best.json and front.png; under repetitions, selected.json instead.

    `best.json` is a configuration for `clipless train --config`.
    """
    folder = result.folder
    hidden = result.sweep.repetitions is not None
    note = _SECRET if hidden else _OWN
    files = {"sweep": _write(folder / "sweep.json", {"note": note, **result.to_dict()})}
    if hidden:
        files["selected"] = _write(folder / "selected.json", selected(result))
        return files
    if result.best is not None:
        files["best"] = _write(folder / "best.json", result.best_config() or {})
    if plot:
        with contextlib.suppress(ImportError):  # matplotlib is optional
            files["plot"] = plot_front(result, folder / "front.png")
    return files


def selected(result: SweepResult) -> dict[str, Any]:
    """Return what may be shown of a sweep with repetitions: the best run, and its price."""
    best, cost = result.best, result.selection
    return {
        "selection": cost.statement,
        "epsilon": cost.epsilon,
        "delta": cost.delta,
        "repetitions": None
        if result.sweep.repetitions is None
        else result.sweep.repetitions.to_dict(),
        "metric": result.sweep.metric,
        "value": None if best is None else best.value,
        "robustness": None if best is None else best.robustness,
        "settings": {} if best is None else dict(best.settings),
        "config": result.best_config(),
    }


def _write(path: Path, data: dict[str, Any]) -> Path:
    path.write_text(json.dumps(json_data(data), indent=2) + "\n", encoding="utf-8")
    return path
