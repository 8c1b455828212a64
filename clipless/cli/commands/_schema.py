"""`clipless schema`: JSON schemas of configuration files, for editors."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from clipless.cli._options import Debug
from clipless.cli._output import note
from clipless.runs import ConfigError

KINDS = ("run", "sweep")


def schema(
    kind: Annotated[
        str, typer.Argument(help="Of which file: run or sweep.", autocompletion=lambda: KINDS)
    ] = "run",
    out: Annotated[
        Path | None, typer.Option(help="Write it to this file, not to the standard output.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write the JSON schema of a configuration file, by which editors complete and check it.

    Name it in the first line of a file: `#:schema run.schema.json` in TOML,
    `# yaml-language-server: $schema=run.schema.json` in YAML, or the key "$schema" in JSON.

        clipless schema run --out run.schema.json
    """
    if kind not in KINDS:
        raise ConfigError(f"there is no schema {kind!r}: there are {', '.join(KINDS)}")
    if kind == "run":
        from clipless.runs import config_schema as make
    else:
        from clipless.sweeps import sweep_schema as make
    text = json_module.dumps(make(), indent=2)
    if out is None:
        print(text)
        return
    out.write_text(text + "\n", encoding="utf-8")
    note(f"Wrote {out}")
