"""The run folder of a fit: ledger, released answers, checkpoints, and the estimator at the end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clipless.accounting import Mechanism
from clipless.folders import RunFile, RunFolder
from clipless.statistics import KeptAnswers


class FitFolder:
    """A run folder as an estimator uses it: a fit that was broken off goes on where it was."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._files = RunFolder(path)
        if self._files.has(RunFile.WEIGHTS):
            raise ValueError(
                f"{path} holds a fitted estimator: read it by "
                f"clipless.sklearn.load({os.fspath(self._files.file(RunFile.WEIGHTS))!r}), or "
                "choose another run_dir. A new fit on the same rows costs its own budget."
            )
        self._files.create()
        self.path: Path = self._files.path
        self.ledger: Path = self._files.ledger

    def answers(self, about: Mapping[str, Any]) -> KeptAnswers:
        """Return the answers of private queries so far; of another fit, they are refused."""
        return KeptAnswers(self._files.file(RunFile.STATISTICS), about)

    @property
    def training(self) -> bool:
        """Whether training has begun, under a plan that keeps the budget."""
        return self._files.has(RunFile.PLAN)

    def history(self) -> tuple[tuple[Mechanism, int], ...]:
        """Return all that the ledger counts."""
        return tuple(self._files.read_ledger().counts().items())

    def describe(self, estimator: Any) -> None:
        """Write what a fitted estimator makes of the columns of its table, for the report."""
        if not estimator._reads_pieces:  # texts have no columns
            return
        classes = [str(each) for each in getattr(estimator, "classes_", [])]
        columns = estimator.describe_columns()
        self._files.write_json(RunFile.COLUMNS, {"classes": classes, "columns": columns})

    @property
    def estimator(self) -> Path:
        """Where the fitted estimator is kept."""
        return self._files.file(RunFile.WEIGHTS)
