"""Results of membership inference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clipless.audit._statistics import Estimate


@dataclass(frozen=True, kw_only=True)
class LowRate:
    """How many members are found when few non-members may be taken for members.

    `aimed_at` is the false positive rate of the half that chose the threshold; both measured rates
    are those of the other half.
    """

    aimed_at: float
    true_positive_rate: Estimate
    false_positive_rate: Estimate

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "aimed_at": self.aimed_at,
            "true_positive_rate": self.true_positive_rate.to_dict(),
            "false_positive_rate": self.false_positive_rate.to_dict(),
        }


@dataclass(frozen=True, kw_only=True)
class AttackOutcome:
    """How one attack fared. 0.5 is the AUROC of guessing, 0 its advantage."""

    name: str
    auroc: Estimate
    advantage: Estimate
    """True less false positive rate, at a threshold that other examples chose."""
    advantage_in_sample: float
    """The same at the threshold that suits these examples best: optimistic, as in papers."""
    low_rates: tuple[LowRate, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "name": self.name,
            "auroc": self.auroc.to_dict(),
            "advantage": self.advantage.to_dict(),
            "advantage_in_sample": self.advantage_in_sample,
            "low_rates": [each.to_dict() for each in self.low_rates],
        }


@dataclass(frozen=True, kw_only=True)
class MembershipResult:
    """All attacks on one model."""

    attacks: tuple[AttackOutcome, ...]
    confidence: float
    members: int
    non_members: int
    shadows: int

    @property
    def best_auroc(self) -> Estimate:
        """The largest AUROC. Its interval does not account for the choice."""
        return max((each.auroc for each in self.attacks), key=lambda found: found.value)

    @property
    def best_advantage(self) -> Estimate:
        """The largest advantage. Its interval does not account for the choice."""
        return max((each.advantage for each in self.attacks), key=lambda found: found.value)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON holds."""
        return {
            "attacks": [each.to_dict() for each in self.attacks],
            "confidence": self.confidence,
            "members": self.members,
            "non_members": self.non_members,
            "shadows": self.shadows,
        }

    def __str__(self) -> str:
        rates = self.attacks[0].low_rates
        heads = ["attack", "AUROC", "advantage", *(f"TPR at FPR {r.aimed_at:.1%}" for r in rates)]
        rows = [
            [
                each.name,
                str(each.auroc),
                str(each.advantage),
                *(str(rate.true_positive_rate) for rate in each.low_rates),
            ]
            for each in self.attacks
        ]
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (heads, *rows)
        ]
        learned = f"{self.shadows} shadow models" if self.shadows else "one half of the examples"
        lines.append(
            f"{self.members} members, {self.non_members} non-members; intervals at "
            f"{self.confidence:.0%} for one attack at a time; thresholds from one half, rates "
            f"from the other; the regression learned from {learned}"
        )
        return "\n".join(lines)
