"""The report of a run, as frozen data: what its folder says, and what was made of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clipless.folders import json_data, replace_file
from clipless.report._files import Missing, Problem
from clipless.report._pages import PRIVATE_PARTS, PUBLIC_FILES, PUBLIC_PARTS, without_seeds
from clipless.report.sections._checks import Check
from clipless.report.sections._claim import Claim
from clipless.report.sections._foundations import Foundations
from clipless.report.sections._spending import Spending
from clipless.report.sections._training import Training


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What a run claims, what that rests on, and what was found out about it: both pages.

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
    columns: Mapping[str, Any] | None
    """Of a run on a table: what the model makes of each column."""
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

    def to_dict(self, *, private: bool = False) -> dict[str, Any]:
        """Return what may be published as plain data, ready for JSON; or, if `private`, the rest.

        What is not finite becomes null.
        """
        every = json_data(asdict(self))
        parts = PRIVATE_PARTS if private else PUBLIC_PARTS
        kind = "clipless-report-private" if private else "clipless-report"
        found = {"format": kind, "version": 2, "sound": self.sound}
        found |= {name: every[name] for name in parts}
        found |= {
            name: [each for each in every[name] if (each["file"] not in PUBLIC_FILES) == private]
            for name in ("missing", "problems")
        }
        checks = [each for each in self.checks if each.private == private]
        if not private:
            found["configuration"] = without_seeds(every["configuration"])
            checks += self._objection()
        return {**found, "checks": json_data([asdict(each) for each in checks])}

    def _objection(self) -> list[Check]:
        """What the public page says if private data speak against the claim: that they do.

        A page that claims something its writer knows to be wrong would be worse than one bit.
        """
        against = [each for each in self.checks if each.private and each.failed]
        detail = "The private page says what. Do not rely on the claim."
        name = "Nothing that was measured on private data speaks against the claim"
        return [Check(name=name, state="failed", detail=detail, voids=False)] if against else []

    def write_json(self, path: str | os.PathLike[str], *, private: bool = False) -> None:
        """Write `to_dict` as JSON."""
        data = self.to_dict(private=private)
        text = json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
        replace_file(Path(path), text.encode(errors="replace"))

    def write_html(self, path: str | os.PathLike[str], *, private: bool = False) -> None:
        """Write one page that holds all it needs: it opens from disk, without a network."""
        from clipless.report._page import render

        page = render(self.to_dict(private=private), private=private)
        replace_file(Path(path), page.encode(errors="replace"))
