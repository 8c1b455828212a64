"""The processes of one run, and checks that they have the same data and configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from clipless.distributed import Processes, processes_present
from clipless.errors import CliplessError
from clipless.runs._model_kinds import run_kind
from clipless.runs.config._errors import ConfigError
from clipless.runs.config._sections import RunConfig
from clipless.training import join_torchrun

Value = TypeVar("Value")


class RunProcesses:
    """Joins the processes of `torchrun`, if there are any. All of them call the same methods.

    Process 0 decides, reads and writes the run folder, and speaks; where one fails, all do.
    """

    def __init__(self) -> None:
        join_torchrun()
        self.processes: Processes | None = processes_present()

    @property
    def first(self) -> bool:
        """Whether this process keeps the run."""
        return self.processes is None or self.processes.first

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.processes is not None and self.processes.size > 1

    def from_first(self, produce: Callable[[], Value]) -> Value:
        """Let process 0 call `produce`, and return what it returns, or raise what it raises."""
        return produce() if self.processes is None else self.processes.from_first(produce)

    def in_turns(self, produce: Callable[[], Value]) -> Value:
        """Let all call `produce`, one process of each machine first, which may download for all."""
        if self.processes is None:
            return produce()
        early = int(os.environ.get("LOCAL_RANK", self.processes.rank)) == 0
        found: list[Value] = []
        for turn in (True, False):
            failure: Exception | None = None
            if early == turn:
                try:
                    found.append(produce())
                except Exception as found_wrong:
                    failure = found_wrong
            everybody = self.processes.gather(_sendable(failure))
            if failure is not None:
                raise failure
            for rank, error in enumerate(everybody):
                if error is not None:
                    error.args = (f"process {rank}: {error}",)
                    raise error
        return found[0]

    def require_same(self, config: RunConfig, digests: Mapping[str, Any]) -> None:
        """Refuse what several processes cannot train, or not together."""
        if self.processes is None or not self.several:
            return
        kind = run_kind(config.model.name)
        if kind != "network":
            raise ConfigError(
                f"the model {config.model.name} is trained in one process: start clipless train "
                "without torchrun, or name a network (--model)"
            )
        device = torch.device(config.training.device or "cpu")
        if device.type == "cuda" and device.index is not None:
            raise ConfigError(
                f"training.device={device} is one GPU for all processes: leave --device out, or "
                "say --device cuda, and each takes its own"
            )
        self.processes.compare(
            {
                f"{section}.{key}": value
                for section, values in config.to_dict().items()
                for key, value in values.items()
                if key not in ("file", "root")  # folders may differ between machines
            }
        )
        # Not by `compare`, which would show digests of private data.
        if len(set(map(str, self.processes.gather(dict(digests))))) > 1:
            raise ConfigError(
                "the processes have read different data. Give all of them the same files; "
                "clipless data check NAME tells which are not as published."
            )


def _sendable(error: Exception | None) -> Exception | None:
    """An error that other processes can raise as well: those raised on purpose can."""
    if error is None or isinstance(error, CliplessError):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
