"""How a threshold moves, given noisy counts of the examples above it.

Every step tells, with noise, which fraction of the examples was above the threshold. The
differences to the fraction that is wanted are added up until their sum stands out of its noise;
then the threshold moves, in proportion, up or down. As long as it moves into one direction the
moves grow, up to a factor of four, so that a start that is wrong by 1,000 costs some ten moves;
when the direction turns they shrink, to a few percent. Nothing moves without evidence: noise alone
makes neither a random walk nor a collapse.

A threshold that is far too large drowns the gradients in noise. So at first, and until a move is up
or none is called for, it is being *searched* for: most of the step's budget goes into counts, and
the parameter stays where it is. All this looks at released counts alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

_SMALLEST_MOVE, _FIRST_MOVE, _LARGEST_MOVE = 0.03, 0.35, math.log(4.0)
_EVIDENCE = 2.0
"""So many standard deviations away from nothing is a reason to move."""
_LONGEST_SEARCH, _LONGEST_SILENCE = 100, 20
_MOST_SUMMED = 200


@dataclass(frozen=True)
class FollowedThreshold:
    """A threshold that follows a quantile: where it is, and what has spoken for moving it."""

    value: float
    move: float = _FIRST_MOVE
    """How far, as a logarithm, the next move goes."""
    direction: int = 0
    """Where the last move went: up, down, or nowhere yet."""
    summed: float = 0.0
    variance: float = 0.0
    counted: int = 0
    """Steps since the last move."""
    searched: int = 0
    """Steps that the search has taken so far."""
    searching: bool = True

    def after(self, fraction: float, *, target: float, deviation: float) -> FollowedThreshold:
        """Return what it is after a step whose noisy fraction of examples above is `fraction`.

        `deviation`: of that fraction, noise and sampling together.
        """
        summed = self.summed + fraction - target
        variance = self.variance + deviation**2
        counted, searched = self.counted + 1, self.searched + self.searching
        known = replace(self, summed=summed, variance=variance, counted=counted, searched=searched)
        if abs(summed) <= _EVIDENCE * math.sqrt(variance) or not math.isfinite(summed):
            # Noise would have let a threshold far too large show by now: it is not.
            settled = _EVIDENCE * math.sqrt(variance) < 0.5 * target * counted
            hopeless = self.direction == 0 and searched >= _LONGEST_SILENCE
            ends = searched >= _LONGEST_SEARCH or settled or hopeless
            known = replace(known, searching=self.searching and not ends)
            if counted >= _MOST_SUMMED or (settled and not self.searching):
                known = replace(known, summed=0.0, variance=0.0, counted=0)
            return known
        direction = 1 if summed > 0 else -1
        if self.direction == 0:
            move = self.move
        elif direction != self.direction:
            move = max(self.move / 3.0, _SMALLEST_MOVE)
        elif self.searching or abs(summed) > 2 * _EVIDENCE * math.sqrt(variance):
            move = min(self.move * 2.0, _LARGEST_MOVE)
        else:
            move = self.move
        if not self.searching and direction != self.direction:
            move = min(move, _FIRST_MOVE)
        return FollowedThreshold(
            value=self.value * math.exp(direction * move),
            move=move,
            direction=direction,
            searched=searched,
            searching=self.searching and direction < 0 and searched < _LONGEST_SEARCH,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FollowedThreshold:
        """Restore what `to_dict` returned."""
        return cls(**data)
