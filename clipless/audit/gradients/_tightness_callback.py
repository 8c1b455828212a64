"""A callback that checks the bounds against real gradients while a model is trained."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any, Literal

from clipless.audit.gradients._tightness import tightness
from clipless.audit.gradients._tightness_result import NOTE, Tightness
from clipless.errors import PrivacyError
from clipless.folders import RunFile, StepLog
from clipless.training import Callback, step_log

if TYPE_CHECKING:
    from clipless.training import Trainer


class TightnessCallback(Callback):
    """Measures `tightness` at the start, after every epoch or every n steps, and at the end.

    A gradient above its bound means that the guarantee does not hold; training then ends with a
    `PrivacyError`, or goes on with a warning. What is measured goes to `tightness.jsonl` in the run
    folder, one JSON object a line after a header; the first and the last are the start and the end
    of training. A resumed run goes on with it. None of it is covered by the guarantee.

    Args:
        data: the training data, as for `tightness`.
        examples: how many are drawn, the same every time.
        every: steps between measurements; by default once an epoch.
        on_violation: `"raise"` or `"warn"`.
        path: the file; by default in the run folder, and none if there is no run folder.

    Example:
        >>> model = torch.nn.Sequential(
        ...     clipless.nn.BoundedInput(1.0), clipless.nn.SpectralLinear(4, 2))
        >>> x = torch.randn(100, 4)
        >>> data = (x, (x[:, 0] > 0).long())
        >>> watch = TightnessCallback(data, examples=20)
        >>> from clipless.training import Trainer, TrainingOptions
        >>> trainer = Trainer(model, clipless.losses.CrossEntropy(), noise_multiplier=1.0,
        ...                   batch_size=50, epochs=2,
        ...                   training=TrainingOptions(callbacks=[watch]))
        >>> _ = trainer.fit(data)
        >>> [step for step, result in watch.results]
        [0, 2, 4]
    """

    def __init__(
        self,
        data: Any,
        *,
        examples: int = 128,
        every: int | None = None,
        on_violation: Literal["raise", "warn"] = "raise",
        path: str | os.PathLike[str] | None = None,
        seed: int = 0,
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        if on_violation not in ("raise", "warn"):
            raise ValueError(f'on_violation must be "raise" or "warn", got {on_violation!r}')
        self.results: list[tuple[int, Tightness]] = []
        """What this process measured: steps taken, and the result."""
        self._data, self._examples, self._seed = data, examples, seed
        self._every, self._on_violation = every, on_violation
        self._given_path = path
        self._log: StepLog | None = None
        self._measured: int | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        """Begin the file, or go back to where the run goes on; measure if nothing is there."""
        self._log = step_log(RunFile.TIGHTNESS, trainer.run_dir, self._given_path)
        self.results = [each for each in self.results if each[0] <= trainer.step and trainer.step]
        self._measured = self.results[-1][0] if self.results else None
        if self._log is not None:
            kept = self._log.begin(note=NOTE, step=trainer.step or -1)
            self._measured = int(kept[-1]["step"]) if kept else None
        if self._measured is None:
            self._measure(trainer)

    def on_step_end(self, trainer: Trainer) -> None:
        """Measure if it is time."""
        if self._every is not None and trainer.step % self._every == 0:
            self._measure(trainer)

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Measure, unless steps are counted."""
        if self._every is None:
            self._measure(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        """Measure what training ended with, if it ended well."""
        if trainer.stopped in ("finished", "budget"):
            self._measure(trainer)

    def _measure(self, trainer: Trainer) -> None:
        if self._measured == trainer.step:
            return
        result = tightness(
            trainer.model,
            self._data,
            loss=trainer.criterion,
            examples=self._examples,
            seed=self._seed,
        )
        self._measured = trainer.step
        self.results.append((trainer.step, result))
        if self._log is not None:
            line = {"kind": "tightness", "step": trainer.step, "epoch": trainer.epoch}
            self._log.append({**line, **result.to_dict()})
        if result.violations:
            self._object(result.violations, trainer.step)

    def _object(self, violations: dict[str, float], step: int) -> None:
        named = ", ".join(f"{name} ({ratio:.4g} times)" for name, ratio in violations.items())
        message = (
            f"after step {step}, gradients exceed the bounds that the noise was chosen for: "
            f"{named}. The privacy guarantee of this run does not hold. Look for a rule, a loss or "
            "a layer of your own whose constant is too small: clipless.audit.attack_bounds helps."
        )
        if self._on_violation == "raise":
            raise PrivacyError(message)
        warnings.warn(message, stacklevel=4)
