"""Signal estimates of a run with several processes, each of which owns some parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clipless.distributed import Processes
from clipless.privacy import SessionHook
from clipless.report._signal import SignalCallback

if TYPE_CHECKING:
    from clipless.training import Trainer


class DistributedSignalCallback(SignalCallback):
    """`SignalCallback` for several processes: each adds up its parameters, process 0 writes."""

    everywhere = True

    def __init__(self, processes: Processes) -> None:
        super().__init__()
        self._processes = processes

    def on_fit_start(self, trainer: Trainer) -> None:
        """Watch, and in process 0 begin the file."""
        if self._processes.first:
            super().on_fit_start(trainer)
        else:
            self._forget()
            hook = SessionHook(trainer.optimizer, lambda *_: self._add(trainer))
            self._handle = trainer.optimizer.register_step_pre_hook(hook)
        named = trainer.engine.session.model.named_parameters()
        self._parameters: Any = {name: _Owned(parameter) for name, parameter in named}

    def _summary(self) -> list[dict[str, Any]]:
        self._energies = torch.tensor(
            self._processes.gather(self._energies.tolist()), dtype=torch.float64
        ).sum(dim=0)
        return super()._summary()


class _Owned:
    """A parameter whose gradient is zero in processes that do not own it."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter

    @property
    def grad(self) -> Tensor:
        gradient = self._parameter.grad
        return torch.zeros((), device=self._parameter.device) if gradient is None else gradient
