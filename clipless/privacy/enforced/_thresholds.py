"""The thresholds of a run with enforced bounds: what they are, what is counted, how they move."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from clipless.errors import PrivacyError
from clipless.kernels import ExceedanceCount, Threshold
from clipless.privacy._plan import ParameterPlan, Plan
from clipless.privacy.enforced._controller import FollowedThreshold
from clipless.privacy.enforced._options import EnforcedBounds
from clipless.privacy.noise._scales import NoiseStrategy

_SEARCHING_SHARE = 0.9
"""The part of a step's budget that counts get while all thresholds are searched for."""
_SMALLEST, _LARGEST = 1e-12, 1e12


@dataclass(frozen=True)
class BoundedParameter:
    """A parameter with a threshold: its size, its uses in a pass, and what the model proves."""

    name: str
    size: int
    uses: int
    proved: float = math.inf
    """The bound that is proved of one example's gradient; infinite if none is."""


class EnforcedThresholds:
    """A threshold for every parameter: takes counts, and moves once they have their noise."""

    def __init__(
        self, parameters: tuple[BoundedParameter, ...], options: EnforcedBounds,
        strategy: NoiseStrategy, divisor: float,
    ) -> None:  # fmt: skip
        self.parameters, self._options, self._strategy = parameters, options, strategy
        self._divisor = divisor
        used = [each.name for each in parameters if each.uses]
        first = options.first_thresholds(used)
        self._followed = {
            name: FollowedThreshold(value=first[name], searching=options.follows) for name in used
        }
        self._counts = {name: ExceedanceCount() for name in used} if options.follows else {}

    @property
    def follows(self) -> bool:
        """Whether thresholds move."""
        return self._options.follows

    def renewed(self, parameters: tuple[BoundedParameter, ...]) -> EnforcedThresholds:
        """Return these thresholds for a model that has changed, as far as it has them still."""
        other = EnforcedThresholds(parameters, self._options, self._strategy, self._divisor)
        other._followed |= {n: t for n, t in self._followed.items() if n in other._followed}
        return other

    # --- the plan --------------------------------------------------------------------------------

    def value(self, parameter: BoundedParameter) -> float:
        """The threshold: never more than what is proved."""
        if not parameter.uses:
            return 0.0
        followed = min(max(self._followed[parameter.name].value, _SMALLEST), _LARGEST)
        return min(followed, parameter.proved)

    def searched_for(self, parameter: BoundedParameter) -> bool:
        """Whether the threshold is searched for, so that the parameter is only counted."""
        return bool(parameter.uses) and self._followed[parameter.name].searching

    def planned(self) -> tuple[ParameterPlan, ...]:
        """What the plan says of the parameters: one that is only counted contributes nothing."""
        return tuple(
            ParameterPlan(
                name=each.name,
                size=each.size,
                gradient_bound=0.0 if self.searched_for(each) else self.value(each),
            )
            for each in self.parameters
        )

    def queries(self) -> tuple[ParameterPlan, ...]:
        """The counts that a step releases, each in a unit that gives it its part of the budget."""
        return tuple(
            ParameterPlan(
                name=f"examples above the threshold of {each.name}",
                size=1,
                gradient_bound=each.uses * unit,
            )
            for each, unit in self._units()
        )

    def applied(self, plan: Plan) -> Plan:
        """Return the plan with the thresholds as they are now."""
        return replace(plan, parameters=self.planned(), queries=self.queries())

    def _units(self) -> list[tuple[BoundedParameter, float]]:
        """What a count is multiplied by before it is released: noise is relative to it.

        A strategy shares the budget out by sensitivities, in whatever unit these are. Gradients
        have theirs; that of counts is chosen such that they get `share` of the budget.
        """
        counted = [each for each in self.parameters if each.name in self._counts]
        planned = self.planned()
        if self._strategy == "global":
            size = math.hypot(*(each.gradient_bound for each in planned))
        else:
            size = sum(each.gradient_bound * math.sqrt(each.size) for each in planned)
        if size == 0 or self._strategy == "per_layer":
            return [(each, 1.0) for each in counted]
        found = []
        for each in counted:
            share = _SEARCHING_SHARE if self.searched_for(each) else self._options.share
            part = share / (1 - share) / len(counted)
            part = math.sqrt(part) if self._strategy == "global" else part
            found.append((each, part * size / each.uses))
        return found

    def limits(self, room: float) -> dict[str, Threshold]:
        """The limit of each use of a parameter, times `room`."""
        return {
            each.name: Threshold(
                room * self.value(each) / each.uses,
                self._counts.get(each.name),
                only_counted=self.searched_for(each),
            )
            for each in self.parameters
            if each.uses
        }

    # --- a step ----------------------------------------------------------------------------------

    def expect(self, rows: int, shares: Tensor | None = None) -> None:
        """Count from here on, as often as is planned; drop what other passes have counted."""
        for each in self.parameters:
            if each.name in self._counts:
                self._counts[each.name].expect(each.uses, rows, shares)

    def add_counted(self, counts: Mapping[str, Tensor], rows: int) -> None:
        """Take what compiled code has counted in a pass over so many examples."""
        for name, counter in self._counts.items():
            counter.add_counted(counts[name], rows)

    def add_to(self, counts: dict[str, Tensor]) -> None:
        """Take what was counted since `expect`."""
        for name, counter in self._counts.items():
            count = counter.take()
            if count is not None:
                counts[name] = count + counts.get(name, 0.0)

    def fractions(self, counts: Mapping[str, Tensor], like: Tensor) -> list[Tensor]:
        """Return what is released of each count, without noise: see `queries`."""
        none = torch.zeros(1, device=like.device)
        return [
            counts.get(each.name, none).reshape(1).to(like.device) * (unit / self._divisor)
            for each, unit in self._units()
        ]

    def move(self, released: list[Tensor], plan: Plan) -> None:
        """Move the thresholds, given the counts with their noise."""
        deviations, gain = plan.noise_deviations, plan.noise_gain()
        target = 1 - self._options.quantile
        for (each, unit), noisy, query in zip(self._units(), released, plan.queries, strict=True):
            scale = 1 / (unit * each.uses)
            sampling = target * (1 - target) / plan.expected_batch_size
            known = self._followed[each.name]
            moved = known.after(
                float(noisy) * scale,
                target=target,
                deviation=math.hypot(gain * deviations[query.name] * scale, math.sqrt(sampling)),
            )
            value = min(max(moved.value, _SMALLEST), _LARGEST, each.proved)
            self._followed[each.name] = replace(moved, value=value)

    def values(self) -> dict[str, float]:
        """Return the thresholds by parameter."""
        return {each.name: self.value(each) for each in self.parameters}

    def state_dict(self) -> dict[str, Any]:
        """Return where all thresholds are, as plain data."""
        return {name: each.to_dict() for name, each in self._followed.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state` was saved."""
        if set(state) != set(self._followed):
            raise PrivacyError(
                "the saved run has thresholds for other parameters. Resume it with the model it "
                "began with, the same parameters frozen."
            )
        self._followed = {name: FollowedThreshold.from_dict(each) for name, each in state.items()}
