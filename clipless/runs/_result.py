"""`TrainedRun`, which `train_run` returns and `result.json` holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clipless.training import StopReason


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A finished run: where it is, what it cost, and what it reaches on the test set."""

    folder: Path
    epsilon: float
    delta: float
    steps: int
    stopped: StopReason
    """`budget` if the next step would have exceeded it."""
    seconds: float
    metrics: Mapping[str, float]
    """Of the final weights on the test data, without noise."""
    averaged: bool
    """Whether the final weights are averages along the run."""
    weights_sha256: str
    resumed_from: int | None
    report: Path | None
    """The report page, or None if none was written."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        data = asdict(self)
        data["folder"] = str(self.folder)
        data["report"] = None if self.report is None else str(self.report)
        return data

    def record(self) -> dict[str, Any]:
        """Return what is kept in the folder: no place, since folders are moved."""
        places = ("folder", "report")
        return {name: value for name, value in self.to_dict().items() if name not in places}
