"""A white-box audit that sees every noisy gradient: is there as much noise as was planned?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from clipless.audit._statistics import Estimate, require_confidence
from clipless.errors import PrivacyError
from clipless.privacy import PrivacyEngine


@dataclass(frozen=True, kw_only=True)
class NoiseResult:
    """How large noise can have been, over what was planned, in each parameter.

    What is released is a gradient plus noise, so that its energy over that of the planned noise is
    an upper limit: below 1, with the stated confidence for all parameters together, noise was
    smaller than planned. Where gradients are large it says nothing.
    """

    ratios: Mapping[str, Estimate]
    """Standard deviation of noise over the planned one, at most; with its interval."""
    steps: int
    confidence: float

    @property
    def smallest(self) -> tuple[str, Estimate]:
        """The parameter that leaves least room for noise."""
        return min(self.ratios.items(), key=lambda item: item[1].high)

    @property
    def exposed(self) -> bool:
        """Whether noise was smaller than planned."""
        return self.smallest[1].high < 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "exposed": self.exposed}

    def __str__(self) -> str:
        name, ratio = self.smallest
        verdict = "TOO SMALL" if self.exposed else "not contradicted"
        return f"{self.steps} noisy gradients: noise of {name} at most {ratio} of plan: {verdict}"


class ReleasedNoise:
    """Watches the noisy gradients of a run, and compares their energy with the planned noise.

    Call it after `make_private`. For noise that is independent between steps and entries.

    Example:
        >>> model = torch.nn.Sequential(
        ...     clipless.nn.BoundedInput(1.0), clipless.nn.SpectralLinear(40, 10))
        >>> data = torch.zeros(64, 40), torch.zeros(64).long()
        >>> criterion, engine = clipless.losses.CrossEntropy(), PrivacyEngine()
        >>> model, optimizer, loader = engine.make_private(
        ...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ...     data_loader=torch.utils.data.DataLoader(
        ...         torch.utils.data.TensorDataset(*data), batch_size=8),
        ...     criterion=criterion, noise_multiplier=1.0)
        >>> with ReleasedNoise(engine) as watch:
        ...     for x, y in loader:
        ...         optimizer.zero_grad()
        ...         criterion(model(x), y).backward()
        ...         optimizer.step()
        >>> watch.result(confidence=0.999).exposed
        False
    """

    def __init__(self, engine: PrivacyEngine) -> None:
        session = engine.session
        if engine.plan.strategy is not None:
            raise PrivacyError(
                "the noise of this run is correlated over its steps: the energy of single steps "
                "has another distribution than the one that is compared with. Watch a run with "
                "independent noise"
            )
        self._engine = engine
        self._parameters = dict(session.model.named_parameters())
        self._energy = dict.fromkeys(engine.plan.noise_deviations, 0.0)
        self._entries = dict.fromkeys(self._energy, 0)
        self._steps = 0
        # Registered after the engine's own hook, so that it finds the gradients with their noise.
        self._handle = session.optimizer.register_step_pre_hook(self._watch)

    def close(self) -> None:
        """Stop watching."""
        self._handle.remove()

    def __enter__(self) -> ReleasedNoise:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def result(self, *, confidence: float = 0.95) -> NoiseResult:
        """Return what the gradients so far say; the energy of noise is chi-squared."""
        from scipy import stats

        watched = {name: count for name, count in self._entries.items() if count}
        if not watched:
            raise ValueError("no noisy gradient was seen: attach this before training")
        # The upper ends are what a verdict rests on: they hold for all parameters together.
        tail = (1.0 - require_confidence(confidence)) / len(watched)
        ratios = {}
        for name, count in watched.items():
            low, high = (
                (self._energy[name] / float(stats.chi2.ppf(end, count))) ** 0.5
                for end in (1.0 - tail, tail)
            )
            ratios[name] = Estimate((self._energy[name] / count) ** 0.5, low, high)
        return NoiseResult(ratios=ratios, steps=self._steps, confidence=confidence)

    @torch.no_grad()
    def _watch(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._steps += 1
        for name, deviation in self._engine.plan.noise_deviations.items():
            parameter = self._parameters.get(name)
            if parameter is None or parameter.grad is None or deviation == 0:
                continue  # a count that is released beside the gradients
            self._energy[name] += float((parameter.grad.double() / deviation).square().sum())
            self._entries[name] += parameter.grad.numel()
