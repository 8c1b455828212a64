"""The attack on a run's certificates, part by part, with a bar."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from rich.progress import track

from clipless.cli._output import error_console, note
from clipless.cli.commands._certify import Method, require_lipschitz
from clipless.robustness import (
    RADIUS_FACTORS,
    AttackOptions,
    CertificateAttack,
    attack_certificates,
)

if TYPE_CHECKING:
    from torch import Tensor

    from clipless.runs import Run, RunData

_PART = 500
_TRIES = 3
_SHORT = 60  # seconds


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
    _estimate(run, x, steps=steps * restarts * (1 + (len(RADIUS_FACTORS) if nearest else 0)))
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


def _estimate(run: Run, x: Tensor, *, steps: int) -> None:
    """Say how long the attack will take, from a few of its gradients; nothing if it is short."""
    model, part = run.model, x[:_PART].to(next(run.model.parameters()).device)
    begun = time.perf_counter()
    for _ in range(_TRIES):
        part = part.detach().requires_grad_()
        torch.autograd.grad(model(part).sum(), part)
    seconds = (time.perf_counter() - begun) / _TRIES * steps * -(-len(x) // _PART)
    if seconds > _SHORT:
        note(
            f"The attack on {len(x):,} examples will take about {seconds / 60:.0f} minutes here. "
            "--examples 500 attacks the first 500, --device cuda uses a GPU."
        )
