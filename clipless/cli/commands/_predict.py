"""`clipless predict`: what a run on a table or on texts says of new rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clipless.cli._options import Debug, Json, RunArgument, require_run
from clipless.cli._output import emit
from clipless.runs import ConfigError

if TYPE_CHECKING:
    from clipless.runs import Run


def predict(
    run: RunArgument,
    data: Annotated[Path, typer.Option(help="The new rows: a .csv, .tsv or .parquet.")],
    out: Annotated[Path, typer.Option(help="The .csv to write, one line for each row.")],
    probabilities: Annotated[
        bool, typer.Option(help="Write the probability of every class too.")
    ] = True,
    contributions: Annotated[
        bool, typer.Option("--contributions", help="Write what each column adds to the output.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Predict the target of new rows, which costs no privacy of those that were trained on.

    clipless predict runs/people-1 --data new.csv --out predicted.csv
    """
    from clipless.runs import open_run

    require_run(run)
    opened = open_run(run)
    if opened.estimator is None:
        raise ConfigError(f"{opened.folder} is no run on a table or on texts")
    table = _predicted(opened, data, probabilities=probabilities, contributions=contributions)
    table.to_csv(out, index=False)
    emit({"rows": len(table), "file": str(out)}, f"{len(table)} rows: {out}", json=json)


def _predicted(run: Run, file: Path, *, probabilities: bool, contributions: bool) -> Any:
    import pandas as pd

    from clipless.data import read_rows

    config, estimator = run.config.data, run.estimator
    rows = read_rows(file, separator=config.separator)
    if config.text is not None:
        if config.text not in rows.columns:
            raise ConfigError(f"{file} has no column {config.text!r} of texts")
        rows = rows[[config.text]]
    else:
        names = list(getattr(estimator, "feature_names_in_", rows.columns))
        lacking = [name for name in names if name not in rows.columns]
        if lacking:
            raise ConfigError(f"{file} lacks the columns {', '.join(map(str, lacking))}")
        rows = rows[names]
    found = pd.DataFrame({str(config.target): estimator.predict(rows)})
    if probabilities and hasattr(estimator, "classes_"):
        for label, column in zip(estimator.classes_, estimator.predict_proba(rows).T, strict=True):
            found[f"probability of {label}"] = column
    if contributions:
        if config.text is not None:
            raise ConfigError("texts have no columns that could contribute")
        parts = estimator.contributions(rows)
        if parts.ndim == 3:
            raise ConfigError("--contributions is for two classes, or for a regression")
        for name, column in zip(rows.columns, parts.T, strict=True):
            found[f"contribution of {name}"] = column
    return found
