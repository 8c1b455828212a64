"""`BoundsCallback`: writes all bounds and the certificates of the weights."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipless.bounds import sensitivity
from clipless.common import MALFORMED_ERRORS
from clipless.folders import RunFile, RunFolder, json_data, replace_file
from clipless.training import Callback

if TYPE_CHECKING:
    from clipless.training import Trainer

NOTE = "computed from the architecture and from released weights, not from the data"


class BoundsCallback(Callback):
    """Writes the sensitivity report of the model at the start of a run, and at its end.

    Both go to `bounds.json` in the run folder: the bounds of every operation and parameter, and
    for every constrained weight the certified norm it has, the radius it is allowed and how that
    was proved. At the end, weights are those that training released. No data are read.

    Args:
        path: the file; by default in the run folder, and none if there is no run folder.

    Example:
        >>> model = torch.nn.Sequential(
        ...     clipless.nn.BoundedInput(1.0), clipless.nn.SpectralLinear(4, 2))
        >>> x = torch.randn(100, 4)
        >>> watch = BoundsCallback()
        >>> from clipless.training import Trainer, TrainingOptions
        >>> trainer = Trainer(model, clipless.losses.CrossEntropy(), noise_multiplier=1.0,
        ...                   batch_size=50, epochs=1,
        ...                   training=TrainingOptions(callbacks=[watch]))
        >>> _ = trainer.fit((x, (x[:, 0] > 0).long()))
        >>> [each["certificate"]["bound"] <= 1.0 for each in watch.written["end"]["parameters"]]
        [True]
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.written: dict[str, Any] = {}
        """What is in the file."""
        self._given_path, self._path = path, None if path is None else Path(path)

    def on_fit_start(self, trainer: Trainer) -> None:
        """Write down what is proved before the first step; a resumed run keeps what is there."""
        if self._given_path is None:
            folder = trainer.run_dir
            self._path = None if folder is None else RunFolder(folder).file(RunFile.BOUNDS)
        if trainer.step and self._path is not None:
            with contextlib.suppress(OSError, *MALFORMED_ERRORS):  # a damaged file is written anew
                self.written = dict(json.loads(self._path.read_text()))
                return
        head = {"format": "clipless-bounds", "version": 1, "note": NOTE}
        self._write({**head, "first_step": trainer.step, "start": _report(trainer)})

    def on_fit_end(self, trainer: Trainer) -> None:
        """Add what is proved of the weights that training ended with."""
        if trainer.stopped in ("finished", "budget"):
            self._write({**self.written, "last_step": trainer.step, "end": _report(trainer)})

    def _write(self, fields: dict[str, Any]) -> None:
        self.written = fields
        if self._path is not None:
            replace_file(self._path, (json.dumps(fields, indent=1) + "\n").encode())


def _report(trainer: Trainer) -> Any:
    session = trainer.engine.session
    found = sensitivity(session.model, loss=session.criterion, input_shape=session._input_shapes)
    return json_data(found.to_dict())
