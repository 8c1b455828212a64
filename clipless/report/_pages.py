"""The sections of the public and of the private page.

The public page holds what is a function of releases and of public things alone: it would be the
same had any one row of the data been another one. Whatever was computed from data without noise is
on the private page, metrics of validation and test data included: they may be private as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clipless.folders import RunFile

PUBLIC_PARTS = {
    "run": "the name of the folder",
    "written": "the time of writing",
    "claim": "from plan and ledger, which hold sizes, noise and counts, and nothing of a row",
    "foundations": "the plan, the bounds of the architecture, certificates of released weights",
    "spending": "recomputed from the ledger",
    "columns": "computed from the released network and released statistics, on simulated rows",
    "signal": "estimated from gradients as they were released, with their noise",
    "configuration": "what was asked for, without seeds",
    "belongs_to": "shapes and settings, by the plan",
    "environment": "versions and the kind of device",
}
PRIVATE_PARTS = {
    "run": "to tell pages apart",
    "written": "to tell pages apart",
    "claim": "to be read beside it; it is public",
    "training": "losses and accuracies of training and validation data, without noise",
    "outcome": "metrics of the test data, without noise, and the time that training took",
    "tightness": "norms of the true gradients of training examples",
    "robustness": "decisions on data that were given to a command",
    "audit": "attacks on training examples; canaries among test examples",
    "configuration": "with its seeds",
}
PUBLIC_FILES = frozenset(
    (
        RunFile.PLAN,
        RunFile.LEDGER,
        RunFile.BOUNDS,
        RunFile.SIGNAL,
        RunFile.COLUMNS,
        RunFile.CONFIG,
        RunFile.ENVIRONMENT,
    )
)
"""Files whose absence and damage the public page speaks of; messages about others stay private."""

_TRAINING = "Private: computed from the training data without noise; do not publish."
_GIVEN = (
    "Private: computed from validation or test data without noise; do not publish, unless these "
    "data are public."
)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a page: a template of its own, and the files that it shows."""

    name: str
    title: str
    heading: str
    mark: str | None = None
    files: tuple[RunFile, ...] = ()


PUBLIC_SECTIONS = (
    Section(name="claim", title="Claim", heading="The claim"),
    Section(
        name="rests",
        title="What it rests on",
        heading="What it rests on",
        mark="proved or recomputed: safe to pass on",
        files=(RunFile.BOUNDS,),
    ),
    Section(
        name="epsilon",
        title="Epsilon over steps",
        heading="Epsilon over steps",
        mark="recomputed from the ledger: safe to pass on",
    ),
    Section(
        name="columns",
        title="Columns",
        heading="Columns of the table",
        mark="computed from released quantities: covered by the guarantee",
    ),
    Section(
        name="signal",
        title="Signal and noise",
        heading="Signal and noise",
        mark="computed from released quantities: covered by the guarantee",
        files=(RunFile.SIGNAL,),
    ),
    Section(
        name="configuration",
        title="Configuration",
        heading="Configuration",
        files=(RunFile.CONFIG,),
    ),
    Section(name="versions", title="Versions", heading="Versions", files=(RunFile.ENVIRONMENT,)),
    Section(name="reproduce", title="Reproduce", heading="How to reproduce"),
)
PRIVATE_SECTIONS = (
    Section(
        name="checks",
        title="Checks",
        heading="What private data say about the claim",
        mark=_TRAINING,
    ),
    Section(
        name="training",
        title="Training",
        heading="Training",
        mark=_TRAINING,
        files=(RunFile.METRICS, RunFile.RESULT),
    ),
    Section(
        name="front", title="Privacy and utility", heading="Privacy and utility", mark=_TRAINING
    ),
    Section(
        name="tightness",
        title="Tightness",
        heading="Tightness of the bounds",
        mark=_TRAINING,
        files=(RunFile.TIGHTNESS,),
    ),
    Section(
        name="robustness",
        title="Robustness",
        heading="Certified robustness",
        mark=_GIVEN,
        files=(RunFile.ROBUSTNESS,),
    ),
    Section(
        name="audit",
        title="Audits",
        heading="Audits: attacks on this claim",
        mark=_TRAINING,
        files=(RunFile.AUDIT,),
    ),
    Section(
        name="settings",
        title="Settings",
        heading="All settings",
        mark="Private: it may hold seeds; do not publish.",
    ),
)


def without_seeds(settings: Any) -> Any:
    """Return nested settings without those whose name speaks of a seed or of random states.

    Example:
        >>> without_seeds({"training": {"steps": 3, "seed": 7}, "data": [{"split_seed": 1}]})
        {'training': {'steps': 3}, 'data': [{}]}
    """
    if isinstance(settings, Mapping):
        return {
            name: without_seeds(value)
            for name, value in settings.items()
            if not any(word in str(name).lower() for word in ("seed", "random_state"))
        }
    if isinstance(settings, list | tuple):
        return [without_seeds(value) for value in settings]
    return settings
