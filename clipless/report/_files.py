"""The files of a run folder, read as they are: nothing here writes, nothing is repaired."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipless.common._malformed import MALFORMED, reason
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
    "metrics.jsonl": ("loss and accuracy, epoch by epoch", "`Trainer(run_dir=...)` writes it"),
    "bounds.json": (
        "the certificates of the weights",
        f"{_NETWORKS}; or `TrainingOptions(callbacks=[clipless.report.BoundsCallback()])`",
    ),
    "signal.jsonl": (
        "signal and noise, layer by layer",
        f"{_NETWORKS}; or `TrainingOptions(callbacks=[clipless.report.SignalCallback()])`",
    ),
    "tightness.jsonl": (
        "how much of their bounds real gradients use",
        f"{_NETWORKS}; or `TrainingOptions(callbacks=[clipless.audit.TightnessCallback(data)])`",
    ),
    "robustness.json": ("certified accuracy", "run `clipless certify` on this folder"),
    "audit.json": ("attacks on the trained model", "run `clipless audit` on this folder"),
    "config.json": ("the exact configuration", _TRAIN),
    "environment.json": ("the versions of everything used", _TRAIN),
}


class RunFiles:
    """Reads a run folder, and notes what is missing and what cannot be read.

    Only `plan.json` is indispensable: without it, or if it is damaged, this raises `ReportError`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ReportError(f"{self.folder} is not a folder. Give the folder of a run.")
        self.missing: list[Missing] = []
        self.problems: list[Problem] = []
        if not (self.folder / "plan.json").exists():
            raise ReportError(
                f"{self.folder} is not the folder of a run: it has no plan.json. "
                "Trainer(run_dir=...) and `clipless train` make such folders."
            )

    def plan(self) -> dict[str, Any]:
        """Return what `plan.json` says."""
        try:
            data = json.loads((self.folder / "plan.json").read_bytes())
            if data["format"] != "clipless-run" or data["version"] != 1:
                raise ValueError(
                    f"format {data['format']!r} version {data['version']!r} is not known here; a "
                    "newer clipless may read it"
                )
            if not isinstance(data["plan"], dict):
                raise ValueError("its plan is not an object")
        except (OSError, *MALFORMED) as error:
            raise ReportError(
                f"{self.folder / 'plan.json'} cannot be read: {_describe(error)}. It says what the "
                "run is about, so restore it from a backup."
            ) from error
        return dict(data)

    def json(self, name: str) -> dict[str, Any] | None:
        """Return the object in a JSON file; None, with a note, if it is missing or damaged."""
        data = self._bytes(name)
        if data is None:
            return None
        try:
            found = json.loads(data)
            if not isinstance(found, dict):
                raise ValueError("it does not hold an object")
        except MALFORMED as error:
            self.object_to(name, error)
            return None
        return dict(plain(found))

    def lines(self, name: str, *, kind: str) -> list[dict[str, Any]] | None:
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
            except MALFORMED as error:
                if number < len(lines):
                    self.object_to(name, ValueError(f"line {number}: {reason(error)}"))
                continue
            if fields.get("kind") == kind:
                found.append(plain(fields))
        return found

    def object_to(self, name: str, error: Exception) -> None:
        """Note that a file does not say what it should."""
        self.problems.append(Problem(file=name, message=f"cannot be used: {_describe(error)}"))

    def _bytes(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            if name in _OPTIONAL:
                what, how = _OPTIONAL[name]
                self.missing.append(Missing(file=name, what=what, how=how))
        except OSError as error:
            self.object_to(name, error)
        return None


def _describe(error: Exception) -> str:
    """A message a reader can use."""
    if isinstance(error, OSError):  # without the path, which is nobody's business on a page
        return error.strerror or type(error).__name__
    return reason(error)


def plain(value: Any) -> Any:
    """Return data that JSON holds: tuples become lists, what no float holds becomes null.

    Example:
        >>> plain({"radii": (1.0, float("inf"))})
        {'radii': [1.0, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    unusable = isinstance(value, int | float) and not abs(value) <= sys.float_info.max
    return None if unusable else value
