"""`SignalCallback`: signal-to-noise ratios by layer, from released gradients alone."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import torch

from clipless.common import not_set_error
from clipless.folders import RunFile, StepLog
from clipless.privacy import SessionHook
from clipless.training import Callback, step_log

if TYPE_CHECKING:
    from clipless.privacy import Plan
    from clipless.training import Trainer

NOTE = (
    "computed from the gradients as they were released, with their noise: post-processing, "
    "covered by the guarantee of the run"
)


class SignalCallback(Callback):
    """Estimates signal and noise of every parameter's released gradient, epoch by epoch.

    A step releases `g = signal + noise` with noise of known deviation std on p entries, so that
    `||g||^2 - p std^2` estimates the energy of the signal (the average of the sampled examples'
    gradients) without a bias. The mean over the steps of an epoch, or 0 if it is negative, is
    compared with the noise energy `p std^2`. Noise alone moves that quotient by
    `sqrt(2 / (p steps))`, one standard deviation: `resolution` is twice that, and a quotient below
    it says that no signal could be seen.

    Only released quantities are read. Lines go to `signal.jsonl` in the run folder, one JSON
    object an epoch after a header; a resumed run goes on with it, and an epoch that was resumed
    in its middle says over how many `steps` it averages.

    Args:
        path: the file; by default in the run folder, and none if there is no run folder.

    Example:
        >>> model = torch.nn.Sequential(
        ...     clipless.nn.BoundedInput(1.0), clipless.nn.SpectralLinear(4, 2))
        >>> x = torch.randn(100, 4)
        >>> signal = SignalCallback()
        >>> from clipless.training import Trainer, TrainingOptions
        >>> trainer = Trainer(model, clipless.losses.CrossEntropy(), noise_multiplier=1.0,
        ...                   batch_size=50, epochs=3,
        ...                   training=TrainingOptions(callbacks=[signal]))
        >>> _ = trainer.fit((x, (x[:, 0] > 0).long()))
        >>> [(line["epoch"], line["steps"]) for line in signal.results]
        [(1, 2), (2, 2), (3, 2)]
        >>> sorted(signal.results[0]["parameters"][0])[:3]
        ['name', 'noise_energy', 'ratio']
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.results: list[dict[str, Any]] = []
        """What this process estimated, one entry an epoch."""
        self._given_path = path
        self._log: StepLog | None = None
        self._handle: Any = None
        self._plan: Plan | None = None
        self._forget()

    def on_fit_start(self, trainer: Trainer) -> None:
        """Begin the file, or go back to where the run goes on, and watch what is released."""
        self._log = step_log(RunFile.SIGNAL, trainer.run_dir, self._given_path)
        if self._log is not None:
            self._log.begin(note=NOTE, step=trainer.step or -1)
        self.results = [each for each in self.results if each["step"] <= trainer.step]
        self._forget()
        self._parameters = dict(trainer.engine.session.model.named_parameters())
        # Registered after the engine's own hook, so that it finds the gradients with their noise.
        hook = SessionHook(trainer.optimizer, lambda *_: self._add(trainer))
        self._handle = trainer.optimizer.register_step_pre_hook(hook)

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Write what the epoch's releases say."""
        if self._steps == 0:
            return
        line = {"kind": "signal", "epoch": trainer.epoch, "step": trainer.step}
        line |= {"steps": self._steps, "parameters": self._summary()}
        self._forget()
        self.results.append(line)
        if self._log is not None:
            self._log.append(line)

    def on_fit_end(self, trainer: Trainer) -> None:
        """Stop watching."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _forget(self) -> None:
        self._steps = 0
        self._energies = self._noise = torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def _add(self, trainer: Trainer) -> None:
        """Take in one step, without reading anything back from the device."""
        plan = trainer.engine.plan
        gradients = [self._parameters[each.name].grad for each in plan.parameters]
        norms = [
            torch.linalg.vector_norm(each, dtype=torch.float64)
            for each in gradients
            if each is not None  # the engine has just set them all
        ]
        energies = torch.stack([norm.to(norms[0].device) for norm in norms]).square()
        if plan is not self._plan:  # a new one when bounds or the noise change
            self._plan = plan
            deviations = plan.noise_deviations
            self._step_noise = torch.tensor(
                [each.size * deviations[each.name] ** 2 for each in plan.parameters],
                dtype=torch.float64,
            )
        noise = self._step_noise * plan.noise_gain(trainer.step) ** 2
        self._energies, self._noise = self._energies + energies, self._noise + noise
        self._steps += 1

    def _summary(self) -> list[dict[str, Any]]:
        if self._plan is None:
            raise not_set_error("plan")
        released = (self._energies / self._steps).tolist()
        noise = (self._noise / self._steps).tolist()
        return [
            _estimate(each.name, each.size, energy, expected, self._steps)
            for each, energy, expected in zip(self._plan.parameters, released, noise, strict=True)
        ]


def _estimate(name: str, size: int, released: float, noise: float, steps: int) -> dict[str, Any]:
    """What one epoch says of one parameter; what is no number becomes null."""
    finite = math.isfinite(released)
    signal = max(0.0, released - noise) if finite else None
    ratio = signal / noise if signal is not None and noise > 0 else None
    return {
        "name": name,
        "size": size,
        "released_energy": released if finite else None,
        "noise_energy": noise,
        "signal_energy": signal,
        "ratio": ratio,
        "resolution": 2 * math.sqrt(2 / (size * steps)),
    }
