"""`clipless certify`: what is proved of a run's decisions, and an attack on the proofs."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clipless.cli._exits import CheckFailedError
from clipless.cli._options import Debug, Json, Root, RunArgument, require_run
from clipless.cli._output import emit, note, working
from clipless.folders import RunFile, RunFolder
from clipless.runs import ConfigError

if TYPE_CHECKING:
    from clipless.runs import Run, RunData

_PIXEL_STEPS = (0, 1, 2, 4, 8, 16)
_SPREADS = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0)


class Method(StrEnum):
    """How certified radii are computed; see `clipless.robustness.certified_radius`."""

    ROWS = "rows"
    MARGIN = "margin"


def certify(
    run: RunArgument,
    radii: Annotated[
        str | None,
        typer.Option(help="Radii, such as 0,0.1,0.5; by default 0, 1, 2, 4, 8, 16 over 255."),
    ] = None,
    scale: Annotated[
        float, typer.Option(help="Multiplies the radii: the range of the inputs, 1 for pixels.")
    ] = 1.0,
    examples: Annotated[
        int | None, typer.Option(help="Use the first so many test examples only.")
    ] = None,
    method: Annotated[
        Method, typer.Option(help="rows uses those of the last layer, and is tighter.")
    ] = Method.ROWS,
    attack: Annotated[
        bool, typer.Option("--attack", help="Try to break every certificate (PGD).")
    ] = False,
    restarts: Annotated[int, typer.Option(help="Starts of the attack for each example.")] = 5,
    attack_steps: Annotated[int, typer.Option(help="Steps of the attack for each start.")] = 40,
    nearest: Annotated[
        bool,
        typer.Option("--nearest", help="Also search beyond the radii: how tight are they? Slow."),
    ] = False,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, ...")] = "cpu",
    root: Root = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Count the test examples that are right and stay right, whatever is done to them.

    Radii are Euclidean, in the units of the raw input, which the output names. The result is kept
    as robustness.json in the run folder. If a certificate breaks, the exit code is 1.

        clipless certify runs/mnist --attack
    """
    wanted = None if radii is None else _numbers(radii)
    if not scale > 0 or (examples is not None and examples < 1):
        raise ConfigError("--scale must be above 0 and --examples at least 1")
    require_run(run)
    from clipless.runs import open_run, usable_device

    opened = open_run(run)
    opened.model.to(usable_device(device))
    data = opened.data(root=root)
    chosen = [scale * each for each in wanted or _usual_radii(opened, data)]
    with working("certifying"):
        found = _certified(opened, data, chosen, examples, method)
    fields: dict[str, Any] = {"certified_accuracy": found["fields"], "attack": None}
    shown = found["shown"]
    broken: tuple[int, ...] = ()
    if attack:
        from clipless.cli._certify_attack import attack_run

        result = attack_run(
            opened, data, examples=examples, method=method, steps=attack_steps, restarts=restarts,
            nearest=nearest,
        )  # fmt: skip
        fields["attack"], broken = result.to_dict(), result.broken
        shown.append(result)
    path = RunFolder(opened.folder).write_json(RunFile.ROBUSTNESS, fields)
    emit(fields, *shown, json=json)
    note(f"kept: {path}; clipless report {run} puts it on the page")
    if broken:
        raise CheckFailedError(
            f"{len(broken)} certificates were broken. This must not happen: please report the run."
        )


def _certified(
    run: Run, data: RunData, radii: list[float], examples: int | None, method: Method
) -> dict[str, Any]:
    from clipless.cli._certify_table import certified_table
    from clipless.robustness import certified_accuracy

    if run.tabular:
        return certified_table(run, data, radii, examples)
    require_lipschitz(data)
    x, y = run.tensors(data.test)
    result = certified_accuracy(
        run.model, x[:examples], y[:examples], radii=radii, method=method.value,
        input_lipschitz=data.input_lipschitz,
    )  # fmt: skip
    unit = f"Radii are Euclidean, in units of {data.unit}."
    return {
        "fields": {**result.to_dict(), "unit": data.unit},
        "shown": [result, unit],
    }


def require_lipschitz(data: RunData) -> None:
    """Refuse preprocessing that certificates do not pass through."""
    from math import isfinite

    if not isfinite(data.input_lipschitz):
        raise ConfigError(
            "the colour space of this run has no Lipschitz constant: nothing can be certified in "
            "pixels. Train with another one (--set data.colour=yuv)."
        )


def _usual_radii(run: Run, data: RunData) -> list[float]:
    from clipless.runs import PIXELS

    if run.tabular:
        return list(_SPREADS)
    if data.unit == PIXELS:
        return [step / 255 for step in _PIXEL_STEPS]
    raise ConfigError(f"say the --radii, in units of {data.unit}")


def _numbers(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= each < float("inf") for each in found):
        raise ConfigError(f"--radii must be numbers of at least 0, such as 0,0.1,0.5: got {text!r}")
    return found
