"""What a trainer keeps in its run folder: the plan, and checkpoints to go on from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError
from torch import nn

from clipless.common import MALFORMED_ERRORS, error_text
from clipless.errors import PrivacyError
from clipless.folders import CheckpointFile, RunFile, RunFolder
from clipless.training._averaging import WeightAverage
from clipless.training._state import from_files, tensors_to_bytes, to_files


class TrainerFolder:
    """A run folder as a trainer uses it: begins a run, saves states, and goes on from them."""

    def __init__(self, path: str | os.PathLike[str], *, keep: int) -> None:
        self._files = RunFolder(path)
        self._files.create()
        self.path, self.ledger = self._files.path, self._files.ledger
        self.checkpoints = self._files.checkpoints(keep=keep)

    def saved(self, description: Mapping[str, Any], *, resume: bool) -> SavedRun | None:
        """Return the state to go on from, or None for a new run; refuse what is another's."""
        begun = self._files.has(RunFile.PLAN)
        if not resume and (begun or self.checkpoints.paths()):
            raise PrivacyError(
                f"{self.path} holds a run already. Resume it (resume=True), or choose a new folder."
            )
        files = self.checkpoints.newest()
        if files is None:
            if begun and self._files.has_spent():
                raise PrivacyError(
                    f"the run in {self.path} has taken steps, but none of its checkpoints can be "
                    "read. It cannot be continued; what it has spent stays spent."
                )
            return None
        try:
            saved = SavedRun(files)
            then = dict(saved.state["description"])
        except (*MALFORMED_ERRORS, SafetensorError) as error:
            raise PrivacyError(
                f"the newest checkpoint in {self.checkpoints.folder} is whole, but not what this "
                f"clipless writes: {error_text(error)}. Resume with the clipless that wrote it; "
                "what the run has spent stays spent."
            ) from error
        _require_same(then, description, self.path)
        return saved

    def begin(self, description: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
        """Write down what the run is about."""
        versions = {"torch": str(torch.__version__), "numpy": numpy.__version__}
        self._files.write_plan(plan, belongs_to=description, **versions)

    def save(
        self,
        state: Mapping[str, Any],
        *,
        weights: Mapping[str, Any],
        optimizer: Mapping[str, Any],
        average: Mapping[str, torch.Tensor] | None,
        ledger: str,
        step: int,
    ) -> None:
        """Write a checkpoint, whole or not at all."""
        tensors = {name: each for name, each in weights.items() if isinstance(each, torch.Tensor)}
        rest = {name: each for name, each in weights.items() if name not in tensors}
        files: dict[str, bytes] = {
            CheckpointFile.WEIGHTS.value: tensors_to_bytes(tensors),
            CheckpointFile.LEDGER.value: ledger.encode(),
        }
        files |= to_files(optimizer, name="optimizer")
        files |= to_files({**state, "extra_weights": rest}, name="state")
        if average is not None:
            files[CheckpointFile.AVERAGE.value] = tensors_to_bytes(average)
        self.checkpoints.save(files, step=step)


class SavedRun:
    """A checkpoint that was read."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        import safetensors.torch

        self.state: dict[str, Any] = from_files(files, name="state")
        self.optimizer: dict[str, Any] = from_files(files, name="optimizer")
        self.weights: dict[str, Any] = {
            **safetensors.torch.load(files[CheckpointFile.WEIGHTS.value]),
            **self.state["extra_weights"],
        }

    @property
    def step(self) -> int:
        """How many steps the run had taken."""
        return int(self.state["step"])


def describe(
    model: nn.Module,
    *,
    dataset_size: int,
    optimizer: torch.optim.Optimizer,
    scheduler: str,
    average: WeightAverage | None,
    micro_batch_size: int | None,
    augmentation: str | None,
    users: str | None,
) -> dict[str, Any]:
    """Return what a run folder belongs to, besides its plan, as plain data."""
    averaging = None if average is None else f"decay {average.decay:g} from {average.start}"
    return {
        "dataset_size": dataset_size,
        **({} if users is None else {"users": users}),
        "model": {
            name: f"{tuple(tensor.shape)} of {tensor.dtype}"
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        },
        "training": {
            "optimizer": type(optimizer).__name__,
            **{f"optimizer {key}": str(value) for key, value in optimizer.defaults.items()},
            "scheduler": scheduler,
            "average": averaging,
            "micro_batch_size": micro_batch_size,
            "augmentation": augmentation,
        },
    }


def _require_same(then: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    lines = []
    for name in sorted({*then, *now}):
        before, after = then.get(name), now.get(name)
        if not isinstance(before, Mapping) or not isinstance(after, Mapping):
            before, after = {"": before}, {"": after}
        lines += [
            f"  {f'{name} {key}'.strip()}: {before.get(key)} then, {after.get(key)} now"
            for key in sorted({*before, *after})
            if before.get(key) != after.get(key)
        ]
    if lines:
        raise PrivacyError(
            f"{path} belongs to another run:\n" + "\n".join(lines) + "\nResume it with what it "
            "began with, or choose a new folder."
        )
