"""`TrainingOptions`: how a trainer trains, saves and shows a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from clipless.accounting import AccountantName
from clipless.ledger import Ledger
from clipless.training._averaging import WeightAverage
from clipless.training._callbacks import Callback

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer, int], LRScheduler]
MakeAverage = Callable[[nn.Module], WeightAverage]


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of `Trainer`, besides those of the guarantee (`PrivacyOptions`).

    Args:
        optimizer: a function from parameters to an optimizer, or an optimizer; by default
            `LayerAdam`.
        scheduler: `"cosine"` down to zero, None, or a function of the optimizer and the number of
            steps; it is stepped after every step.
        average: decay of the averaged weights, None for no average, or a function from the model
            to a `WeightAverage`.
        accountant: `"pld"`, `"rdp"` or `"filter"`: see `PrivacyEngine`.
        ledger: goes on with this one, in which other releases from the same data are already
            counted; without `run_dir` only, which has its own.
        insecure_seed: for tests: makes sampling and noise reproducible. Such a run is not private,
            and has no epsilon. Initial weights and dropout follow `torch.manual_seed`.
        resume: go on with a run that is in `run_dir`; `False` refuses to.
        checkpoint_every: steps between checkpoints; by default one for every epoch.
        keep_checkpoints: how many are kept.
        device: where to train; by default where the model is, or under `torchrun` the GPU of
            this process.
        callbacks: see `Callback`. With several processes they are called in process 0, unless
            they say otherwise.
        progress: show a bar; by default only on a terminal.
    """

    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None
    scheduler: Literal["cosine"] | MakeScheduler | None = "cosine"
    average: float | MakeAverage | None = 0.98
    accountant: AccountantName = "pld"
    ledger: Ledger | None = None
    insecure_seed: int | None = None
    resume: bool = True
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    device: torch.device | str | None = None
    callbacks: Sequence[Callback] = ()
    progress: bool | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise ValueError(f"checkpoint_every must be at least 1, got {self.checkpoint_every}")
        if not (self.scheduler in ("cosine", None) or callable(self.scheduler)):
            raise ValueError(
                f"scheduler must be 'cosine', None or a function, got {self.scheduler!r}"
            )
