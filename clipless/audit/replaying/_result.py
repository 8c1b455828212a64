"""Results of replays."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

Relation = Literal["zero_out", "replace_one"]


@dataclass(frozen=True, kw_only=True)
class ReplayedQuery:
    """One tensor that was released: how far it is from that of the neighbour, before noise.

    `sensitivity` is what was declared for one record. Two records differ, an old and a new one,
    where a record is replaced by another: `factor` is 2 then, and 1 if it is emptied.
    """

    name: str
    distance: float
    sensitivity: float
    factor: int

    @property
    def ratio(self) -> float:
        """The distance over what is allowed; at most one if the declaration is right."""
        allowed = self.factor * self.sensitivity
        if allowed == 0:
            return 0.0 if self.distance == 0 else math.inf
        return self.distance / allowed

    @property
    def holds(self) -> bool:
        """Whether the query moved by no more than was declared."""
        return self.ratio <= 1.0


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """Every release of a run on two neighbouring data sets, and what else was not the same.

    It describes private records: it is not covered by any guarantee.
    """

    queries: tuple[ReplayedQuery, ...]
    """Every released tensor, in order."""
    differences: tuple[str, ...]
    """Whatever is public and depends on the record, by its place."""
    relation: Relation

    @property
    def passed(self) -> bool:
        """Whether all queries kept their sensitivity and nothing else differs."""
        return not self.differences and not self.violations

    @property
    def violations(self) -> tuple[ReplayedQuery, ...]:
        """The queries that moved by more than was declared."""
        return tuple(query for query in self.queries if not query.holds)

    @property
    def unmoved(self) -> bool:
        """Whether no query depended on the record: it was not sampled, or changes nothing."""
        return all(query.distance == 0 for query in self.queries)

    @property
    def largest(self) -> dict[str, float]:
        """For each name, the largest distance over what is allowed."""
        found: dict[str, float] = {}
        for query in self.queries:
            found[query.name] = max(found.get(query.name, 0.0), query.ratio)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON holds; a ratio that is infinite becomes None."""
        return {
            "relation": self.relation,
            "passed": self.passed,
            "releases": len(self.queries),
            "ratios": {k: v if math.isfinite(v) else None for k, v in self.largest.items()},
            "violations": [
                {**asdict(query), "distance": min(query.distance, 1e300)}
                for query in self.violations
            ],
            "differences": list(self.differences),
        }

    def __str__(self) -> str:
        lines = [
            f"replayed on a neighbour ({self.relation.replace('_', '-')}): "
            f"{len(self.queries)} released tensors, {'passed' if self.passed else 'FAILED'}",
            *(["  no query moved: was the record ever sampled?"] if self.unmoved else []),
            *(f"  {name}: {ratio:.4g} of what is allowed" for name, ratio in self.largest.items()),
            *(f"  differs: {each}" for each in self.differences),
        ]
        return "\n".join(lines)
