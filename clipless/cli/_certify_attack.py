"""The attack on a run's certificates, part by part, with a bar."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from rich.progress import track

from clipless.cli._output import error_console
from clipless.cli.commands._certify import Method, require_lipschitz
from clipless.robustness import (
    RADIUS_FACTORS,
    AttackOptions,
    CertificateAttack,
    attack_certificates,
)

if TYPE_CHECKING:
    from clipless.runs import Run, RunData

_PART = 500


def attack_run(
    run: Run,
    data: RunData,
    *,
    examples: int | None,
    method: Method,
    steps: int,
    restarts: int,
    nearest: bool,
) -> CertificateAttack:
    """Attack every test example inside its radius. For tables, the network on encoded rows.

    With `nearest`, the nearest change of decision is looked for beyond the radius, at nine times
    the cost.
    """
    if not run.tabular:
        require_lipschitz(data)
    x = run.tensors(data.test)[0][:examples]
    output = error_console()
    parts = [
        attack_certificates(
            run.model,
            part,
            method=method.value,
            input_lipschitz=1.0 if run.tabular else data.input_lipschitz,
            attack=AttackOptions(
                steps=steps,
                restarts=restarts,
                ladder=RADIUS_FACTORS if nearest else (),
                seed=number,
            ),
        )
        for number, part in track(
            list(enumerate(x.split(_PART))),
            description="attacking",
            console=output,
            disable=not output.is_terminal,
        )
    ]
    return replace(
        parts[0],
        radii=torch.cat([part.radii for part in parts]),
        distances=torch.cat([part.distances for part in parts]),
        broken=tuple(
            number * _PART + row for number, part in enumerate(parts) for row in part.broken
        ),
        attacked=sum(part.attacked for part in parts),
    )
