"""`clipless report`: the page of a run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from clipless.cli._exits import CheckFailedError
from clipless.cli._options import Debug, Json, RunArgument
from clipless.cli._output import emit, working
from clipless.folders import RunFile, RunFolder, RunFolderError


def report(
    run: RunArgument,
    private: Annotated[
        bool, typer.Option("--private", help="Name the private page instead of the public one.")
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Write deployment.json too: what to declare of it.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the pages of a run folder, from what the folder holds now.

    report.html and report.json hold released and public things only, and may be published;
    report-private.html and report-private.json hold what was computed from data without noise.
    With --record, deployment.json holds what to declare of the model: privacy unit, neighbours,
    epsilon, delta, accounting, post-processing, hazards, and what only you can answer.
    The exit code is 1 if something speaks against the guarantee; the pages say what.

        clipless report runs/mnist
    """
    folder = RunFolder.open(run)
    from rich.text import Text

    from clipless.report import ReportError, deployment_record, write_report

    try:
        with working("writing the report"):
            found = write_report(run)
    except ReportError as error:
        raise RunFolderError(str(error)) from error
    failed = [check.name for check in found.checks if check.state == "failed"]
    fields: dict[str, Any] = {
        "html": folder.file(RunFile.REPORT_HTML),
        "json": folder.file(RunFile.REPORT_JSON),
        "private_html": folder.file(RunFile.PRIVATE_REPORT_HTML),
        "private_json": folder.file(RunFile.PRIVATE_REPORT_JSON),
    }
    fields["sound"] = found.sound
    claim = found.claim
    fields |= {"epsilon": claim.epsilon, "delta": claim.delta, "failed_checks": failed}
    stated = "no guarantee can be stated"
    if claim.epsilon is not None:
        stated = f"({claim.epsilon:.4g}, {claim.delta:g})-differential privacy"
    where = f"Report: {fields['html']}"
    if private:
        where = f"Private report, not to be published: {fields['private_html']}"
    if record:
        fields["record"] = folder.write_json(RunFile.DEPLOYMENT, deployment_record(found))
        where = f"{where}\nDeployment record: {fields['record']}"
    emit(fields, Text(stated, "bold"), where, json=json)
    if not found.sound:
        reasons = ", ".join(failed) or "no guarantee can be stated"
        raise CheckFailedError(f"The report finds something wrong: {reasons}.")
