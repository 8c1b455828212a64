"""The callbacks of a run that write what its report shows."""

from __future__ import annotations

import contextlib

from torch import Tensor

from clipless.distributed import Processes
from clipless.runs.config._sections import RunConfig
from clipless.training import Callback


def report_callbacks(
    config: RunConfig, train: tuple[Tensor, Tensor], processes: Processes | None
) -> list[Callback]:
    """Return the callbacks, for one process or for one of several."""
    found: list[Callback] = []
    with contextlib.suppress(ImportError):
        from clipless.report import BoundsCallback, DistributedSignalCallback, SignalCallback

        found.append(BoundsCallback())
        found.append(
            SignalCallback() if processes is None else DistributedSignalCallback(processes)
        )
    if config.training.check_bounds:
        from clipless.audit import TightnessCallback

        examples, every = config.training.check_bounds, config.training.checkpoint_every
        found.append(TightnessCallback(train, examples=examples, every=every))
    return found
