"""Recorder and replayer of all that a run releases or publishes."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from clipless.accounting import Mechanism, steps_paid_together
from clipless.audit.replaying._compare import differences
from clipless.audit.replaying._result import ReplayedQuery
from clipless.common import Query
from clipless.errors import PrivacyError


@dataclass
class Release:
    """One mechanism's release: several tensors that get their noise together."""

    queries: tuple[Query, ...]
    before: list[Tensor]
    """Without noise: private."""
    after: list[Tensor]


@dataclass
class Transcript:
    """All that one run released and published, in order."""

    releases: list[Release] = field(default_factory=list)
    bits: list[tuple[int, int]] = field(default_factory=list)
    """Randomness that is no noise: how many bits, and which."""
    published: dict[str, list[Any]] = field(default_factory=dict)
    """What the library called public while it ran, by kind: plans, lines of ledgers."""

    @property
    def counted(self) -> int:
        """How many releases the ledgers have counted, or reserved: of a pass, all of its steps."""
        lines = self.published.get("ledger", ())
        return sum(line.get("count", 0) * _steps_of(line.get("mechanism")) for line in lines)


def _steps_of(mechanism: Mapping[str, Any] | None) -> int:
    """Return how many releases a line of a ledger counts as one."""
    sampling = None if mechanism is None else Mechanism.from_dict(mechanism).sampling
    return 1 if sampling is None else steps_paid_together(sampling)


class Recorder:
    """Lets a run happen as it does, and writes down what it releases."""

    def __init__(self) -> None:
        self.transcript = Transcript()

    @torch.no_grad()
    def release(
        self, values: Sequence[Tensor], queries: Sequence[Query], add_noise: Callable[[], None]
    ) -> None:
        """Add noise, and keep the values from before and after."""
        before = [value.detach().clone() for value in values]
        add_noise()
        after = [value.detach().clone() for value in values]
        self.transcript.releases.append(Release(tuple(queries), before, after))

    def bits(self, count: int) -> int:
        """Draw, and keep what was drawn."""
        drawn = secrets.randbits(count)
        self.transcript.bits.append((count, drawn))
        return drawn

    def public(self, kind: str, value: Any) -> None:
        """Keep it."""
        self.transcript.published.setdefault(kind, []).append(value)

    def empty_row(self, size: int) -> int | None:
        """All records count."""
        return None


class DivergedError(BaseException):
    """Ends a replay that asked for something that was never released.

    No `Exception`: code that survives a failed run, as sweeps do, must not survive this.
    """


class UnknownPlaceError(PrivacyError):
    """A run uses a part of the data, in which the empty record cannot be found."""


class Replayer:
    """Hands out what another run released, and compares what would have been released.

    `factor`: how many contributions of one record lie between the two data sets. `empty`: the
    record that contributes nothing, and how many records there are.
    """

    def __init__(self, recorded: Transcript, *, factor: int, empty: tuple[int, int] | None) -> None:
        self.queries: list[ReplayedQuery] = []
        self.differences: list[str] = []
        self.published: dict[str, list[Any]] = {}
        self._releases, self._bits = iter(recorded.releases), iter(recorded.bits)
        self._recorded, self._factor, self._empty = recorded, factor, empty
        self._seen = 0

    @torch.no_grad()
    def release(
        self, values: Sequence[Tensor], queries: Sequence[Query], add_noise: Callable[[], None]
    ) -> None:
        """Compare with the recorded release, and put its noisy results in place."""
        recorded = next(self._releases, None)
        place = f"release {self._seen}"
        self._seen += 1
        if recorded is None:
            names = ", ".join(query.name for query in queries)
            self._diverge(f"{place} ({names}): made on the neighbour only")
        self.differences += differences(
            [query._asdict() for query in recorded.queries],
            [query._asdict() for query in queries],
            place,
        )
        then, now = _kinds(recorded.before), _kinds(values)
        if then != now:
            self._diverge(f"{place}: tensors of {then}, on the neighbour {now}")
        for query, before, after, value in zip(
            recorded.queries, recorded.before, recorded.after, values, strict=True
        ):
            self.queries.append(
                ReplayedQuery(
                    name=query.name,
                    distance=distance(before, value),
                    sensitivity=query.sensitivity,
                    factor=self._factor,
                )
            )
            value.copy_(after)

    def bits(self, count: int) -> int:
        """Hand out what was drawn."""
        wanted, drawn = next(self._bits, (None, 0))
        if wanted != count:
            self._diverge(f"{count} random bits are drawn where there were {wanted or 'none'}")
        return drawn

    def public(self, kind: str, value: Any) -> None:
        """Keep it, to be compared at the end."""
        self.published.setdefault(kind, []).append(value)

    def empty_row(self, size: int) -> int | None:
        """Return the record that contributes nothing."""
        if self._empty is None:
            return None
        row, known = self._empty
        if size != known:
            raise UnknownPlaceError(
                f"the run uses {size} of {known} records, so that the place of the empty one is "
                "not known. Replay the part that is trained on, or a changed record: give the "
                "neighbouring data set itself instead of empty(...)."
            )
        return row

    def finish(self) -> None:
        """Note what the recorded run did and this one did not, and what was published."""
        made, counted = len(self._recorded.releases), self._recorded.counted
        if made > counted:
            self.differences.append(f"{made} releases were made, of which ledgers count {counted}")
        missing = sum(1 for _ in self._releases)
        if missing:
            self.differences.append(f"{missing} release(s) were not made on the neighbour")
        for kind in {**self._recorded.published, **self.published}:
            both = self._recorded.published.get(kind, []), self.published.get(kind, [])
            self.differences += differences(*both, kind)

    def _diverge(self, reason: str) -> NoReturn:
        self.differences.append(reason)
        raise DivergedError(reason)


def _kinds(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{tuple(each.shape)} {each.dtype}" for each in tensors)


def distance(one: Tensor, other: Tensor) -> float:
    """Return the Euclidean distance; infinite where a value is not a number on one side only."""
    one, other = one.double(), other.to(one.device).double()
    same = (one == other) | (one.isnan() & other.isnan())
    found = float(torch.linalg.vector_norm(torch.where(same, 0.0, one - other)))
    return found if math.isfinite(found) else math.inf
