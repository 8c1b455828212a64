"""`StepLog`: a file of JSON lines, one for each step or epoch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clipless.common import MALFORMED_ERRORS
from clipless.folders._writing import replace_file


class StepLog:
    """A file of JSON lines after a header, which a resumed run goes back in and continues.

    Example:
        >>> import tempfile
        >>> log = StepLog(Path(tempfile.mkdtemp()) / "metrics.jsonl", kind="metrics")
        >>> log.begin(note="loss on private data", step=0)
        []
        >>> log.append({"kind": "step", "step": 10, "loss": 0.5})
        >>> log.lines_until(10)
        [{'kind': 'step', 'step': 10, 'loss': 0.5}]
    """

    def __init__(self, path: Path, *, kind: str) -> None:
        self.path, self._kind = path, kind

    def begin(self, *, note: str, step: int) -> list[dict[str, Any]]:
        """Write the header and the lines up to `step` that are there, and return those lines."""
        header = {"kind": "header", "format": f"clipless-{self._kind}", "version": 1, "note": note}
        kept = self.lines_until(step)
        text = "".join(f"{json.dumps(line)}\n" for line in (header, *kept))
        replace_file(self.path, text.encode())
        return kept

    def append(self, fields: Mapping[str, Any]) -> None:
        """Add a line; the operating system has it when this returns."""
        with self.path.open("a") as file:
            file.write(json.dumps(fields) + "\n")

    def lines_until(self, step: int) -> list[dict[str, Any]]:
        """Return the lines about steps up to `step`; damaged ones and the header are left out."""
        kept = []
        text = self.path.read_text(errors="replace") if self.path.exists() else ""
        for line in text.splitlines():
            with contextlib.suppress(*MALFORMED_ERRORS):
                fields = json.loads(line)
                if fields["kind"] != "header" and int(fields["step"]) <= step:
                    kept.append(fields)
        return kept
