"""The trail of a run: a checksum of the weights after every step that somebody may have seen."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from clipless.privacy._checksum import checksum
from clipless.training._checkpoint import replace_file

_Entry = tuple[str, int, int]
"""The run, the step, and the checksum of the weights after it."""


class ReplayDivergedError(RuntimeError):
    """A repeated step ended at other weights than it did before."""


class Trail:
    """Checksums of the weights after each step, on the disk before anybody can see the weights.

    A killed run is resumed from its last checkpoint and repeats the steps after it. A repeated
    step that is on the trail may have been seen, so it must come out the same, bit for bit:
    `follow` compares, before the step is shown to anybody. One that is not on the trail was seen
    by nobody. Call `flush` before weights are shown.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._run, self.expected = "", dict[int, int]()
        self._pending: list[tuple[int, Tensor]] = []

    def begin(self, run: str, *, step: int) -> None:
        """Follow what `run` has left behind after `step`, and go on from there."""
        self._run, self._pending = run, []
        entries = self._read()
        if self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
            self._rewrite(entries)  # a line that a crash cut short: nobody acted upon it
        self.expected = {
            number: value for owner, number, value in entries if owner == run and number > step
        }

    def follow(self, model: nn.Module, *, step: int) -> None:
        """Note the weights after `step`, or compare them with what they were."""
        value = checksum(model)
        if step not in self.expected:
            self._pending.append((step, value))
        elif int(value) != self.expected[step]:
            raise ReplayDivergedError(f"step {step} did not come out as it did before")

    def flush(self) -> None:
        """Write down all steps so far, and wait until they are on the disk."""
        if not self._pending:
            return
        values = torch.stack([value for _, value in self._pending]).tolist()
        steps = [step for step, _ in self._pending]
        with self.path.open("a") as file:
            file.writelines(
                map(_line, [(self._run, *one) for one in zip(steps, values, strict=True)])
            )
            file.flush()
            os.fsync(file.fileno())
        self._pending.clear()

    def forget(self, *, before: int) -> None:
        """Drop the steps up to `before`, which no checkpoint leads back to."""
        self._rewrite([entry for entry in self._read() if entry[1] > before])

    def _rewrite(self, entries: list[_Entry]) -> None:
        replace_file(self.path, "".join(map(_line, entries)).encode())

    def _read(self) -> list[_Entry]:
        entries: list[_Entry] = []
        text = self.path.read_text(errors="replace") if self.path.exists() else ""
        for line in text.splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                fields = json.loads(line)
                entries.append((str(fields["run"]), int(fields["step"]), int(fields["weights"])))
        return entries


def _line(entry: _Entry) -> str:
    run, step, weights = entry
    return json.dumps({"run": run, "step": step, "weights": weights}) + "\n"
