"""`EnforcedBounds`: how the thresholds of enforced bounds are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from clipless.common import require_positive
from clipless.errors import PrivacyError
from clipless.privacy._bounds_options import ProvedBounds

BoundsName = Literal["proved", "enforced", "none"]


@dataclass(frozen=True, kw_only=True)
class EnforcedBounds:
    """Thresholds for every layer of any network: `bounds="enforced"`, with these settings.

    Args:
        thresholds: how large one example's gradient may be: None lets each parameter's threshold
            follow a private quantile of its own, from 1; a number is one threshold for each
            parameter; a mapping gives them by the name of a parameter or of a module that it is
            in, the longest name counting. With `follow=True` these are where they begin.
        follow: move thresholds after every step; by default where no thresholds are given.
        quantile: the fraction of examples whose gradients stay below the threshold. A high one:
            late in training most gradients are small, and the median collapses with them.
        share: the part of the privacy budget of a step that counting takes; more of it while
            thresholds are being searched for.
        exact_norms: norms of single examples' gradients exactly (True), by an upper bound that
            costs two norms (False), or, by default, exactly: in the cheaper of two ways, which
            costs no more than the gradient of the weight itself.

    Example:
        >>> EnforcedBounds(thresholds=0.1).follows, EnforcedBounds().follows
        (False, True)
    """

    thresholds: float | Mapping[str, float] | None = None
    follow: bool | None = None
    quantile: float = 0.95
    share: float = 0.05
    exact_norms: bool | None = None

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        if isinstance(self.thresholds, Mapping):
            for name, value in self.thresholds.items():
                require_positive(f"threshold of {name}", value)
        elif self.thresholds is not None:
            require_positive("thresholds", self.thresholds)
        for name in ("quantile", "share"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {getattr(self, name)!r}")

    @property
    def follows(self) -> bool:
        """Whether thresholds move."""
        return self.thresholds is None if self.follow is None else self.follow

    def first_thresholds(self, names: list[str]) -> dict[str, float]:
        """Return where the threshold of each parameter begins."""
        given = self.thresholds
        if given is None:
            return dict.fromkeys(names, 1.0)
        if not isinstance(given, Mapping):
            return dict.fromkeys(names, float(given))
        found: dict[str, float] = {}
        for name in names:
            fitting = [each for each in given if name == each or name.startswith(f"{each}.")]
            if not fitting and "" not in given:
                raise PrivacyError(
                    f"no threshold is given for the parameter {name}: name it, or a module that it "
                    "is in ('' is the whole model), in EnforcedBounds(thresholds={...})."
                )
            found[name] = float(given[max(fitting, key=len, default="")])
        return found


def enforced_bounds(bounds: Any) -> EnforcedBounds | None:
    """Return the settings that `bounds=` stands for; None for proved bounds, or none at all."""
    if isinstance(bounds, EnforcedBounds):
        return bounds
    if isinstance(bounds, ProvedBounds):
        return None
    if bounds not in ("proved", "enforced", "none"):
        raise ValueError(
            f"bounds must be 'proved', 'enforced', 'none', ProvedBounds(...) or "
            f"EnforcedBounds(...), got {bounds!r}"
        )
    return EnforcedBounds() if bounds == "enforced" else None


BoundsChoice = BoundsName | ProvedBounds | EnforcedBounds
"""What `bounds=` may be."""
