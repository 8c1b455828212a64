"""The callbacks of a run that write what its report shows."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clipless.privacy._distributed import Processes
from clipless.runs._config import RunConfig
from clipless.training import Callback

if TYPE_CHECKING:
    from clipless.training import Trainer


def watchers(
    config: RunConfig, train: tuple[Tensor, Tensor], processes: Processes | None
) -> list[Callback]:
    """Return the callbacks, for one process or for one of several."""
    found: list[Callback] = []
    with contextlib.suppress(ImportError):
        from clipless.report import BoundsCallback, SignalCallback

        found.append(BoundsCallback())
        found.append(SignalCallback() if processes is None else shared_signal(processes))
    if config.training.check_bounds:
        from clipless.audit import TightnessCallback

        examples, every = config.training.check_bounds, config.training.checkpoint_every
        found.append(TightnessCallback(train, examples=examples, every=every))
    return found


def shared_signal(processes: Processes) -> Callback:
    """Return a `SignalCallback` for gradients that are released in parts, by their owners."""
    from clipless.privacy._hooks import SessionHook
    from clipless.report import SignalCallback

    class SharedSignal(SignalCallback):
        """Every process adds up what it owns; process 0 writes the sums."""

        everywhere = True

        def on_fit_start(self, trainer: Trainer) -> None:
            """Watch, and in process 0 begin the file."""
            if processes.first:
                super().on_fit_start(trainer)
            else:
                self._forget()
                hook = SessionHook(trainer.optimizer, lambda *_: self._add(trainer.engine.plan))
                self._handle = trainer.optimizer.register_step_pre_hook(hook)
            named = trainer.engine.session.model.named_parameters()
            self._parameters: Any = {name: _Owned(parameter) for name, parameter in named}

        def _summary(self) -> list[dict[str, Any]]:
            self._energies = torch.tensor(
                processes.gather(self._energies.tolist()), dtype=torch.float64
            ).sum(dim=0)
            return super()._summary()

    return SharedSignal()


class _Owned:
    """A parameter whose gradient is zero in processes that do not own it."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter

    @property
    def grad(self) -> Tensor:
        gradient = self._parameter.grad
        return torch.zeros((), device=self._parameter.device) if gradient is None else gradient
