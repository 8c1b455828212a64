"""`clipless report`: the page of a run."""

from __future__ import annotations

from clipless.cli._exits import CheckFailedError
from clipless.cli._options import Debug, Json, RunArgument
from clipless.cli._output import emit, working
from clipless.runs._errors import RunFolderError


def report(run: RunArgument, json: Json = False, debug: Debug = False) -> None:
    """Write report.html and report.json into a run folder, from what the folder holds now.

    The exit code is 1 if something speaks against the guarantee; the page says what.

        clipless report runs/mnist
    """
    if not run.is_dir():
        raise RunFolderError(f"there is no folder {run}")
    from clipless.report import ReportError, write_report

    try:
        with working("writing the report"):
            found = write_report(run)
    except ReportError as error:
        raise RunFolderError(str(error)) from error
    failed = [check.name for check in found.checks if check.state == "failed"]
    fields = {"html": run / "report.html", "json": run / "report.json", "sound": found.sound}
    claim = found.claim
    fields |= {"epsilon": claim.epsilon, "delta": claim.delta, "failed_checks": failed}
    stated = "no guarantee can be stated"
    if claim.epsilon is not None:
        stated = f"({claim.epsilon:.4g}, {claim.delta:g})-differential privacy"
    emit(fields, f"[bold]{stated}[/bold]", f"Report: {run / 'report.html'}", json=json)
    if not found.sound:
        reasons = ", ".join(failed) or "no guarantee can be stated"
        raise CheckFailedError(f"The report finds something wrong: {reasons}.")
