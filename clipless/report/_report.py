"""The report of a run, as frozen data: what its folder says, and what was made of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clipless.report._checks import Check
from clipless.report._claim import Claim
from clipless.report._files import Missing, Problem, plain
from clipless.report._foundations import Foundations
from clipless.report._spending import Spending
from clipless.report._training import Training
from clipless.training._checkpoint import replace_file


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What a run claims, what that rests on, and what was found out about it.

    Parts whose files are not in the run folder are None, and `missing` says what would add them.
    `problems` and failed `checks` say what is wrong; a page shows them in red.
    """

    run: str
    written: str
    claim: Claim
    foundations: Foundations
    checks: tuple[Check, ...]
    spending: Spending | None
    training: Training | None
    signal: Mapping[str, Any] | None
    tightness: Mapping[str, Any] | None
    robustness: Mapping[str, Any] | None
    audit: Mapping[str, Any] | None
    outcome: Mapping[str, Any] | None
    """How training ended, by `result.json`."""
    configuration: Mapping[str, Any] | None
    belongs_to: Mapping[str, Any]
    """What `plan.json` says about model, data and training."""
    environment: Mapping[str, Any]
    missing: tuple[Missing, ...]
    problems: tuple[Problem, ...]

    @property
    def sound(self) -> bool:
        """Whether a guarantee is stated and nothing speaks against it."""
        return self.claim.standing == "stated" and not any(each.failed for each in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, ready for JSON; what is not finite becomes null."""
        head = {"format": "clipless-report", "version": 1, "sound": self.sound}
        return {**head, **plain(asdict(self))}

    def write_json(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict` as JSON."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
        replace_file(Path(path), text.encode(errors="replace"))

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Write one page that holds all it needs: it opens from disk, without a network."""
        from clipless.report._page import render

        replace_file(Path(path), render(self.to_dict()).encode(errors="replace"))
