"""How a run of several processes begins: the same everywhere, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from clipless.bounds import unwrap_module
from clipless.distributed import (
    DataParallelGroup,
    Processes,
    ProcessGroup,
    ShardedGroup,
    SingleProcess,
    is_sharded,
    processes_present,
    share_weights,
)
from clipless.errors import PrivacyError
from clipless.ledger import Ledger
from clipless.losses import Loss
from clipless.privacy._plan import Plan


def agree_on_beginning(
    processes: Processes | SingleProcess,
    *,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    criterion: Loss,
    further: dict[str, object],
) -> None:
    """Refuse processes that differ, then give all the weights of process 0."""
    if isinstance(processes, SingleProcess):
        return
    model = unwrap_module(module)
    sharded = is_sharded(model)
    processes.compare(
        {
            "model": type(model).__name__,
            "parameters": {
                name: (tuple(t.shape), t.dtype, t.requires_grad)
                for name, t in [*model.named_parameters(), *model.named_buffers()]
            },
            "wrapper": type(module).__name__,
            "optimizer": type(optimizer).__name__,
            "optimizer options": _options_of(optimizer),
            "criterion": repr(criterion),
            "sharded": sharded,
            "examples": len(dataset) if hasattr(dataset, "__len__") else "a stream",
            **further,
        }
    )
    if not sharded:  # of a sharded model there is one copy, of which each process has a part
        share_weights(model)


def agree_on_plan(processes: Processes | SingleProcess, plan: Plan) -> None:
    """Refuse processes with different plans."""
    processes.compare({key: json.dumps(value) for key, value in plan.to_dict().items()})


def form_group(processes: Processes | SingleProcess, plan: Plan, module: nn.Module) -> ProcessGroup:
    """Return the group of processes that take each step together."""
    if isinstance(processes, SingleProcess):
        return ProcessGroup()
    model = unwrap_module(module)
    trainable = [model.get_parameter(p.name) for p in plan.parameters]
    if is_sharded(model):
        if plan.precision == "bfloat16":
            raise PrivacyError("sharded models are trained in float32: leave precision out")
        return ShardedGroup(processes, trainable, model)
    return DataParallelGroup(processes, trainable, module)


def ledger_together(make: Callable[[], Ledger]) -> Ledger:
    """Open a ledger in process 0; the others follow it in memory.

    What process 0 does to its ledger the others do to theirs, so that all know what is spent.
    Only the first one is kept.
    """
    processes = processes_present()
    if processes is None:
        return make()
    opened: list[Ledger] = []

    def snapshot() -> str:
        opened.append(make())
        return opened[0].snapshot()

    text = processes.from_first(snapshot)
    return opened[0] if opened else Ledger(None, snapshot=text)


def _options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, str]]:
    return [
        {key: str(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
