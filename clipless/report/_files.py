"""Read-only access to the files of a run folder, with notes on missing and damaged ones."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from clipless.common import MALFORMED_ERRORS, error_text
from clipless.folders import RunDescription, RunFile, RunFolder, RunFolderError, json_data
from clipless.report._errors import ReportError


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A file that is not there: what it would show, and what adds it."""

    file: str
    what: str
    how: str


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that is not as it should be: which file it is about, and what is wrong."""

    file: str
    message: str


_TRAIN = "`clipless train` writes it"
_NETWORKS = f"{_TRAIN}, but not for tables"
_OPTIONAL = {
    RunFile.METRICS: ("loss and accuracy, epoch by epoch", "`Trainer(run_dir=...)` writes it"),
    RunFile.BOUNDS: (
        "the certificates of the weights",
        f"{_NETWORKS}; or `TrainingOptions(callbacks=[clipless.report.BoundsCallback()])`",
    ),
    RunFile.SIGNAL: (
        "signal and noise, layer by layer",
        f"{_NETWORKS}; or `TrainingOptions(callbacks=[clipless.report.SignalCallback()])`",
    ),
    RunFile.TIGHTNESS: (
        "how much of their bounds real gradients use",
        f"{_NETWORKS}; or `TrainingOptions(callbacks=[clipless.audit.TightnessCallback(data)])`",
    ),
    RunFile.ROBUSTNESS: ("certified accuracy", "run `clipless certify` on this folder"),
    RunFile.AUDIT: ("attacks on the trained model", "run `clipless audit` on this folder"),
    RunFile.CONFIG: ("the exact configuration", _TRAIN),
    RunFile.ENVIRONMENT: ("the versions of everything used", _TRAIN),
}


class RunFiles:
    """Reads a run folder, and notes what is missing and what cannot be read.

    Only `plan.json` is indispensable: without it, or if it is damaged, this raises `ReportError`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = RunFolder(folder)
        if not self.folder.path.is_dir():
            raise ReportError(f"{self.folder.path} is not a folder. Give the folder of a run.")
        self.missing: list[Missing] = []
        self.problems: list[Problem] = []
        try:
            self.folder.require_known_version()
        except RunFolderError as error:
            raise ReportError(str(error)) from error
        if not self.folder.has(RunFile.PLAN):
            raise ReportError(
                f"{self.folder.path} is not the folder of a run: it has no plan.json. "
                "Trainer(run_dir=...) and `clipless train` make such folders."
            )

    def plan(self) -> RunDescription:
        """Return what `plan.json` says."""
        try:
            return self.folder.read_plan()
        except RunFolderError as error:
            raise ReportError(str(error)) from error

    def json(self, name: RunFile) -> dict[str, Any] | None:
        """Return the object in a JSON file; None, with a note, if it is missing or damaged."""
        data = self._bytes(name)
        if data is None:
            return None
        try:
            found = json.loads(data)
            if not isinstance(found, dict):
                raise ValueError("it does not hold an object")
        except MALFORMED_ERRORS as error:
            self.object_to(name, error)
            return None
        return dict(json_data(found))

    def lines(self, name: RunFile, *, kind: str) -> list[dict[str, Any]] | None:
        """Return the lines of one kind of a file of JSON lines; None if there is no such file.

        A last line that a crash cut short is left out. Any other that cannot be read is noted.
        """
        data = self._bytes(name)
        if data is None:
            return None
        found: list[dict[str, Any]] = []
        lines = data.decode(errors="replace").split("\n")
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
                if not isinstance(fields, dict):
                    raise ValueError("it does not hold an object")
            except MALFORMED_ERRORS as error:
                if number < len(lines):
                    self.object_to(name, ValueError(f"line {number}: {error_text(error)}"))
                continue
            if fields.get("kind") == kind:
                found.append(json_data(fields))
        return found

    def object_to(self, name: RunFile, error: Exception) -> None:
        """Note that a file does not say what it should."""
        self.problems.append(
            Problem(file=name.value, message=f"cannot be used: {_describe(error)}")
        )

    def _bytes(self, name: RunFile) -> bytes | None:
        try:
            return self.folder.file(name).read_bytes()
        except FileNotFoundError:
            if name in _OPTIONAL:
                what, how = _OPTIONAL[name]
                self.missing.append(Missing(file=name.value, what=what, how=how))
        except OSError as error:
            self.object_to(name, error)
        return None


def _describe(error: Exception) -> str:
    """A message a reader can use."""
    if isinstance(error, OSError):  # without the path, which is nobody's business on a page
        return error.strerror or type(error).__name__
    return error_text(error)
