"""From the folder of a run to its report."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from clipless.common import MALFORMED_ERRORS
from clipless.errors import PrivacyError
from clipless.folders import CheckpointFacts, RunFile, RunFolder, json_data
from clipless.ledger import LedgerInUseError, LedgerText, read_closed_ledger, utc_timestamp
from clipless.privacy import Plan
from clipless.report._files import Problem, RunFiles
from clipless.report._report import RunReport
from clipless.report._timeline import Timeline, timeline
from clipless.report.sections import _evidence
from clipless.report.sections._checks import (
    Check,
    as_said,
    checks,
    nothing_lost,
    same_ledger,
)
from clipless.report.sections._claim import claim
from clipless.report.sections._foundations import certificates_hold, foundations
from clipless.report.sections._spending import Cost, Spending, spending
from clipless.report.sections._training import training
from clipless.report.sections._verdicts import bounds_hold, not_contradicted

_T = TypeVar("_T")


def build(run_dir: str | os.PathLike[str]) -> RunReport:
    """Read the folder of a run that has ended, and return its report. Nothing is written.

    Epsilon is recomputed from the ledger. Raises `ReportError` if the folder is not that of a run
    or its plan is damaged, and `LedgerError` if the run is still going on. A ledger that is damaged
    or does not fit the plan does not stop the report: it says so, and states no epsilon that
    cannot be trusted.

    Example:
        >>> import tempfile
        >>> from clipless.training import Trainer
        >>> folder = tempfile.mkdtemp()
        >>> model = torch.nn.Sequential(
        ...     clipless.nn.BoundedInput(1.0), clipless.nn.SpectralLinear(4, 2))
        >>> x = torch.randn(100, 4)
        >>> trainer = Trainer(model, clipless.losses.CrossEntropy(), target_epsilon=3.0,
        ...                   batch_size=50, epochs=2, run_dir=folder)
        >>> _ = trainer.fit((x, (x[:, 0] > 0).long()))
        >>> report = build(folder)
        >>> report.sound, report.claim.epsilon <= 3.0, report.training.epochs[-1].step
        (True, True, 4)
        >>> [each.file for each in report.missing][-1]
        'environment.json'
    """
    files = RunFiles(run_dir)
    described = files.plan()
    plan = described.plan
    facts = _checkpoint(files)
    text, ledger = _ledger(files)
    found = None if text is None else timeline(text)
    done = [ledger]
    metrics = files.lines(RunFile.METRICS, kind="epoch")
    spent: Spending | None = None
    if text is not None and found is not None:
        spent = _spent(found, plan, done, text)
        done += _traces(text, found, plan, facts, metrics)
    outcome = _without_format(files.json(RunFile.RESULT))
    configuration = _without_format(files.json(RunFile.CONFIG))
    if spent is not None and outcome is not None:
        done += as_said(spent, outcome.get("epsilon"))
    cost = Cost(plan)
    counted = found if spent is not None and not _voided(done) else None
    epochs = _take(files, RunFile.METRICS, lambda: training(metrics or (), counted, cost))
    bounds = files.json(RunFile.BOUNDS)
    rests = _take(files, RunFile.BOUNDS, lambda: foundations(plan, bounds))
    rests = rests or foundations(plan, None)
    parts = _measured(files)
    further = certificates_hold(rests), bounds_hold(parts["tightness"])
    done += [check for check in (*further, not_contradicted(parts["audit"])) if check is not None]
    trusted = spent is not None and not _voided(done)
    return RunReport(
        run=files.folder.path.resolve().name,
        written=utc_timestamp(),
        claim=claim(
            plan,
            epsilon=spent.epsilon if spent is not None and trusted else None,
            insecure=text is not None and text.insecure,
            history=() if found is None else found.history(),
            releases=None if found is None else found.releases,
        ),
        foundations=rests,
        checks=tuple(done),
        spending=spent,
        training=epochs,
        outcome=outcome,
        configuration=configuration,
        belongs_to=json_data(described.belongs_to),
        environment=_without_format(files.json(RunFile.ENVIRONMENT))
        or json_data(described.written_by),
        missing=tuple(files.missing),
        problems=tuple(files.problems),
        **parts,
    )


def write_report(run_dir: str | os.PathLike[str]) -> RunReport:
    """Write the pages of a run into its folder, and return the report.

    `report.html` and `report.json` hold released and public things only. `report-private.html` and
    `report-private.json` hold what was computed from data without noise; only their owner may read
    them.
    """
    report = build(run_dir)
    folder = RunFolder(run_dir)
    report.write_json(folder.file(RunFile.REPORT_JSON))
    report.write_html(folder.file(RunFile.REPORT_HTML))
    private = folder.file(RunFile.PRIVATE_REPORT_JSON), folder.file(RunFile.PRIVATE_REPORT_HTML)
    report.write_json(private[0], private=True)
    report.write_html(private[1], private=True)
    return report


def _voided(done: Sequence[Check]) -> bool:
    return any(check.failed and check.voids for check in done)


def _checkpoint(files: RunFiles) -> CheckpointFacts | None:
    try:
        return files.folder.newest_checkpoint()
    except (OSError, *MALFORMED_ERRORS) as error:
        files.object_to(RunFile.CHECKPOINTS, error)
        return None


def _ledger(files: RunFiles) -> tuple[LedgerText | None, Check]:
    name = "The ledger is whole"
    try:
        text = read_closed_ledger(files.folder.ledger)
    except LedgerInUseError:
        raise
    except PrivacyError as error:
        message = str(error).replace(str(files.folder.ledger), RunFile.LEDGER)
        files.problems.append(Problem(file=RunFile.LEDGER.value, message=message))
        return None, Check(name=name, state="failed", detail=message)
    detail = f"The digests of all {len(text.lines)} lines fit."
    return text, Check(name=name, state="passed", detail=detail)


def _spent(found: Timeline, plan: Plan, done: list[Check], text: LedgerText) -> Spending | None:
    """Ask the accountant, and add what a comparison with the plan says."""
    try:
        spent = spending(found, plan)
    except (PrivacyError, ValueError) as error:
        done.append(Check(name="An epsilon can be stated", state="failed", detail=str(error)))
        return None
    declared = None if text.filter is None else str(text.filter)
    if declared != (plan.accountant if plan.accountant.startswith("filter(") else None):
        detail = f"The ledger declares {declared or 'no filter'}; the plan is by {plan.accountant}."
        done.append(Check(name="The filter is the ledger's", state="failed", detail=detail))
    size, relation = text.dataset_size, text.relation.value
    done += checks(found, spent, plan, dataset_size=size, relation=relation)
    return spent


def _traces(
    text: LedgerText,
    found: Timeline,
    plan: Plan,
    facts: CheckpointFacts | None,
    metrics: list[dict[str, Any]] | None,
) -> list[Check]:
    """Compare the ledger with what else the run has left behind."""
    seen = {"the last checkpoint": 0 if facts is None else facts.step}
    steps = [line.get("step") for line in metrics or ()]
    seen[RunFile.METRICS] = max((step for step in steps if isinstance(step, int)), default=0)
    where = max(seen, key=lambda name: seen[name])
    done = [nothing_lost(found, plan, seen[where], where)] if seen[where] else []
    return done if facts is None else [*done, same_ledger(text, facts)]


def _measured(files: RunFiles) -> dict[str, Any]:
    """What other callbacks and commands have written, in the form that the page shows."""
    signal = files.lines(RunFile.SIGNAL, kind="signal")
    tightness = files.lines(RunFile.TIGHTNESS, kind="tightness")
    robustness, audit = files.json(RunFile.ROBUSTNESS), files.json(RunFile.AUDIT)
    columns = files.json(RunFile.COLUMNS) if files.folder.has(RunFile.COLUMNS) else None
    return {
        "columns": _take(
            files,
            RunFile.COLUMNS,
            lambda: None if columns is None else _evidence.columns(columns),
        ),
        "signal": _take(files, RunFile.SIGNAL, lambda: _evidence.signal(signal or ())),
        "tightness": _take(files, RunFile.TIGHTNESS, lambda: _evidence.tightness(tightness or ())),
        "robustness": _take(
            files,
            RunFile.ROBUSTNESS,
            lambda: None if robustness is None else _evidence.robustness(robustness),
        ),
        "audit": _take(
            files, RunFile.AUDIT, lambda: None if audit is None else _evidence.audit(audit)
        ),
    }


def _take(files: RunFiles, name: RunFile, read: Callable[[], _T]) -> _T | None:
    """Return what a file says, or note that its contents are not what they should be."""
    try:
        return read()
    except MALFORMED_ERRORS as error:
        files.object_to(name, error)
        return None


def _without_format(fields: dict[str, Any] | None) -> dict[str, Any] | None:
    """What a file says, but for the name of its own format."""
    if fields is None:
        return None
    return {key: value for key, value in fields.items() if key not in ("format", "version")}
