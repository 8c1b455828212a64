"""Callbacks of the trainer, and those that write metrics."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipless.common import not_set_error
from clipless.folders import RunFile, RunFolder, StepLog

if TYPE_CHECKING:
    from clipless.training._trainer import Trainer

_NOTE = (
    "loss and accuracy are those of the private training data and are not covered by the "
    "guarantee: keep this file as you keep the data"
)


class Callback:
    """Base class of callbacks: a trainer calls its methods; override what you need.

    The trainer is handed over as it is: `trainer.step`, `trainer.epoch`, `trainer.metrics` (loss
    and accuracy of the epoch so far, read from the device when asked for), `trainer.history`,
    `trainer.model`, `trainer.engine`. Weights after a step are private in the sense of the
    guarantee, and free to use; losses and accuracies on the training data are not covered by it.
    So a decision that rests on them (when to stop, which weights to keep) is not covered either.

    `everywhere`: whether it is called in all processes of a run, and not in process 0 alone.

    Example:
        >>> class Print(Callback):
        ...     def on_epoch_end(self, trainer):
        ...         print(trainer.epoch, trainer.history[-1]["loss"])
    """

    everywhere = False

    def on_fit_start(self, trainer: Trainer) -> None:
        """Training is about to begin, or to go on after `trainer.step` steps."""

    def on_step_end(self, trainer: Trainer) -> None:
        """A step has been taken."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        """An epoch, or the last part of one, is complete; its line in `history` is there."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """Training has ended, however it did: `trainer.stopped` says how."""


class MetricsWriter(Callback):
    """Writes metrics to a file, one JSON object a line, each on its way when it is written.

    The first line is a header with a note. Then come lines of `"kind": "step"`, one in `every`
    steps, and of `"kind": "epoch"`. A resumed run drops the lines after its checkpoint, as it
    writes them again.

    Args:
        path: the file; by default `metrics.jsonl` in the run folder.
        every: how many steps a line stands for.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, every: int = 10) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self._path, self._every = path, every
        self._log: StepLog | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        """Open the file, and go back to where the run goes on."""
        if self._path is None and trainer.run_dir is None:
            raise ValueError("MetricsWriter needs a path, or a trainer with a run_dir")
        self._log = step_log(RunFile.METRICS, trainer.run_dir, self._path)
        if self._log is not None:
            self._log.begin(note=_NOTE, step=trainer.step)

    def on_step_end(self, trainer: Trainer) -> None:
        """Write a line if it is time."""
        if trainer.step % self._every == 0:
            self._write({"kind": "step", "step": trainer.step, **trainer.metrics})

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Write what the history says of the epoch."""
        self._write({"kind": "epoch", **trainer.history[-1]})

    def _write(self, fields: dict[str, Any]) -> None:
        if self._log is None:
            raise not_set_error("log")
        self._log.append(fields)


def step_log(
    name: RunFile, run_dir: Path | None, given: str | os.PathLike[str] | None
) -> StepLog | None:
    """Return the file that a callback writes: the one it was given, or the run folder's, if any."""
    if given is not None:
        return StepLog(Path(given), kind=Path(name.value).stem)
    return None if run_dir is None else RunFolder(run_dir).log(name)


class TensorBoardWriter(Callback):
    """Writes metrics for TensorBoard, which has to be installed.

    Args:
        folder: where to; by default `tensorboard` in the run folder.
        every: how many steps a point stands for.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, *, every: int = 10) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoardWriter needs the package tensorboard: pip install "
                "'clipless[tensorboard]'. Without it, metrics are in metrics.jsonl."
            ) from error
        self._make, self._folder, self._every = SummaryWriter, folder, every
        self._writer: Any = None

    def on_fit_start(self, trainer: Trainer) -> None:
        """Open the log; what it holds of later steps is superseded."""
        folder = self._folder
        if folder is None and trainer.run_dir is None:
            raise ValueError("TensorBoardWriter needs a folder, or a trainer with a run_dir")
        place = folder or RunFolder(trainer.run_dir or "").file(RunFile.TENSORBOARD)
        if folder is None:
            Path(place).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._writer = self._make(str(place), purge_step=trainer.step + 1)

    def on_step_end(self, trainer: Trainer) -> None:
        """Add a point if it is time."""
        if trainer.step % self._every == 0:
            self._add("training", trainer.metrics, trainer.step)

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Add the numbers of the epoch."""
        numbers = {
            name: value
            for name, value in trainer.history[-1].items()
            if name not in ("step", "epoch")
        }
        self._add("epoch", numbers, trainer.step)

    def on_fit_end(self, trainer: Trainer) -> None:
        """Close the log."""
        if self._writer is not None:
            self._writer.close()

    def _add(self, group: str, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)
