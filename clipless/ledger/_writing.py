"""What is spent, written line by line: entries, their text, and who appends them.

A line is one JSON object, with a digest of itself and all before it. The digest makes damage and
edits visible; it is no protection against somebody who recomputes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from clipless.accounting import Mechanism, Relation
from clipless.common import publish
from clipless.errors import BudgetExhaustedError, LedgerError

if TYPE_CHECKING:
    from clipless.ledger._file import LedgerFile
    from clipless.ledger._format import LedgerText
    from clipless.ledger._runs import RunSteps

DIGEST_MARK = ', "digest": "'
DIGEST_LENGTH = 16

INSECURE = "not private"
"""In the label of runs and records whose noise or samples came from a seed that somebody chose."""


class EntryKind(StrEnum):
    """The kinds of ledger entries.

    `OPEN`: a process began to write. `RESERVE`: releases that may happen from now on, and count.
    `REFUND`: some of a reservation did not happen, and never will. `RECORD`: releases that count
    at once. `RELEASE`: the digest of what a step released, by which it is known if it is repeated;
    it counts nothing.
    """

    OPEN = "open"
    RESERVE = "reserve"
    REFUND = "refund"
    RECORD = "record"
    RELEASE = "release"


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One line of a ledger after its header.

    `mechanism` and `count` are what was reserved, refunded or recorded. `reservation` is the line
    a refund belongs to, `process` the one that opened the ledger, `source` the ledger that a
    record was taken over from, `step` and `released` the number of a step and its digest.
    """

    line: int
    kind: EntryKind
    time: str
    mechanism: Mechanism | None = None
    count: int = 0
    label: str = ""
    reservation: int | None = None
    process: int | None = None
    source: str | None = None
    step: int | None = None
    released: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that say something, as plain data."""
        data: dict[str, Any] = {"line": self.line, "kind": self.kind.value, "time": self.time}
        if self.mechanism is not None and self.reservation is None:
            data["mechanism"] = self.mechanism.to_dict()
        for name in ("count", "label", "reservation", "process", "source"):
            if getattr(self, name) not in (None, 0, ""):
                data[name] = getattr(self, name)
        if self.released is not None:
            data |= {"step": self.step, "released": self.released}
        return data


class WrittenLine(NamedTuple):
    """A line of the file, and the byte where it ends; the header has no entry."""

    entry: LedgerEntry | None
    line: str
    digest: str
    end: int


def utc_timestamp() -> str:
    """Return the current UTC time, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def encode(fields: Mapping[str, Any], previous: str) -> tuple[str, str]:
    """Return the line for `fields`, without its end, and its digest."""
    text = json.dumps(fields, allow_nan=False)[:-1]
    digest = digest_of(text, previous)
    return f'{text}{DIGEST_MARK}{digest}"}}', digest


def digest_of(text: str, previous: str) -> str:
    return hashlib.sha256(f"{previous}\n{text}".encode()).hexdigest()[:DIGEST_LENGTH]


class LedgerWriter:
    """The writing side of a ledger: one process that appends, and nobody else.

    `_written` says what is valid. Steps are reserved in blocks, of which `_unspent` are left.
    """

    def __init__(
        self,
        text: LedgerText,
        file: LedgerFile | None,
        *,
        block_size: int,
        runs: dict[str, RunSteps],
    ) -> None:
        self._mutex = threading.RLock()
        self._owner = os.getpid()
        self._closed = False
        self._file, self._block_size = file, block_size
        self._block: LedgerEntry | None = None
        self._unspent = 0
        self._runs, self._steps = runs, runs[""]
        self.continued: set[str] = set()
        """The runs of this process whose noise another one has gone on with."""
        self._written = text.written()
        self._counts = text.counts()
        self._releases = sum(self._counts.values())
        self.dataset_size = text.dataset_size
        self.relation = text.relation
        self.unit = text.unit
        """Whose releases count once: "example", or the digest of whose each record is."""
        self.filter = text.filter
        """What was declared before the first release, for choices that look at results."""
        self._divergence = (
            0.0 if text.filter is None else text.filter.spent(tuple(self._counts.items()))
        )
        self._append(EntryKind.OPEN, process=self._owner)

    def entries(self) -> tuple[LedgerEntry, ...]:
        """Return all lines after the header."""
        return tuple(each.entry for each in self._written if each.entry is not None)

    def spend(
        self, mechanism: Mechanism, *, label: str = "training step", limit: int | None = None
    ) -> None:
        """Count one release. Call it before the result is used, once for every step.

        Takes from the reserved block, and reserves a new one when that is empty. `limit` keeps a
        new block from being larger: the number of steps that are still planned, or allowed.
        """
        with self._mutex:
            block = self._block
            if (
                self._unspent == 0
                or block is None
                or block.label != label
                or (block.mechanism is not mechanism and block.mechanism != mechanism)
            ):
                self._reserve_next(mechanism, label, limit)
            elif os.getpid() != self._owner:
                self._refuse_child()
            self._unspent -= 1

    def reserve(self, mechanism: Mechanism, *, count: int, label: str = "training step") -> None:
        """Reserve exactly `count` releases for the calls of `spend` that follow."""
        with self._mutex:
            self._check(mechanism, count)
            self.settle()
            self._require_room(mechanism, count)
            self._open_block(mechanism, count, label)

    def record(self, mechanism: Mechanism, *, label: str, count: int = 1) -> None:
        """Count `count` releases at once: private statistics and whatever else is not a step."""
        with self._mutex:
            self._check(mechanism, count)
            self._require_room(mechanism, count)
            self._append(EntryKind.RECORD, mechanism=mechanism, count=count, label=label)

    def settle(self) -> None:
        """Give back what is reserved and not used, so that the file counts exactly."""
        with self._mutex:
            self._check_writable()
            block, unspent = self._block, self._unspent
            # From here on nobody can use the rest, whether or not the refund reaches the disk.
            self._block, self._unspent = None, 0
            if block is not None and unspent:
                self._append(
                    EntryKind.REFUND,
                    mechanism=block.mechanism,
                    count=unspent,
                    reservation=block.line,
                )

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the ledger's lock, so that an answer of the budget stays true."""
        with self._mutex:
            yield

    @contextlib.contextmanager
    def held_by(self, run: str) -> Iterator[None]:
        """Hold the ledger's lock for one of the runs that have begun.

        Several may share a ledger, in several threads. What one of them asks of the budget is then
        still true when it spends, and its steps and digests stand under its own name.
        """
        with self._mutex:
            if run != self._steps.run:
                self._check_writable()
                self.settle()
                self._append(EntryKind.OPEN, process=self._owner, label=run)
                self._steps = self._runs[run]
            yield

    def repeat(self, mechanism: Mechanism) -> None:
        """Note that the run has repeated a step which is counted already."""
        self._steps.repeat(mechanism)

    def release(self, step: int, digest: str, *, certain: bool = False) -> None:
        """Write down what a step of the present run has released, by its digest.

        It is not waited for until it is on the disk: a digest that is lost makes a repeated step
        cost what a new one costs, and nothing worse. With `certain` it is: where several steps are
        one release, what was released must be known when the run is resumed.
        """
        with self._mutex:
            self._check_writable()
            self._append(EntryKind.RELEASE, step=step, released=digest, certain=certain)

    def _reserve_next(self, mechanism: Mechanism, label: str, limit: int | None) -> None:
        """Reserve a block: twice the last one if that was used up by the same mechanism."""
        size, block = 1, self._block
        if block is not None and self._unspent == 0 and block.mechanism == mechanism:
            size = 2 * block.count
        size = min(size, self._block_size)
        if limit is not None:
            size = min(size, max(limit, 1))
        self._check(mechanism, size)
        self.settle()
        if self.filter is not None:
            size = max(min(size, self.filter.room(self._divergence, mechanism)), 1)
            self._require_room(mechanism, size)
        self._open_block(mechanism, size, label)

    def _open_block(self, mechanism: Mechanism, count: int, label: str) -> None:
        entry = self._append(EntryKind.RESERVE, mechanism=mechanism, count=count, label=label)
        self._block, self._unspent = entry, count

    def _append(
        self,
        kind: EntryKind,
        *,
        mechanism: Mechanism | None = None,
        count: int = 0,
        label: str = "",
        reservation: int | None = None,
        process: int | None = None,
        source: str | None = None,
        step: int | None = None,
        released: str | None = None,
        certain: bool = True,
    ) -> LedgerEntry:
        """Write one entry.

        `_written` alone says what is valid, and gets the entry in one operation: an exception in
        the middle (Ctrl-C, a full disk) leaves the entry out, and the next one replaces it.
        """
        entry = LedgerEntry(
            line=len(self._written) + 1,
            kind=kind,
            time=utc_timestamp(),
            mechanism=mechanism,
            count=count,
            label=label,
            reservation=reservation,
            process=process,
            source=source,
            step=step,
            released=released,
        )
        last = self._written[-1]
        data = entry.to_dict()
        line, digest = encode(data, last.digest)
        end, sync = 0, certain
        if self._file is not None:
            end = self._file.append(line, after=last.end, sync=sync)
        self._written.append(WrittenLine(entry, line, digest, end))
        if kind is not EntryKind.REFUND:  # which may wait until the ledger is collected as garbage
            publish("ledger", {**data, "time": None, "process": None, "source": None})
        if mechanism is not None:
            change = -count if kind is EntryKind.REFUND else count
            self._counts[mechanism] = self._counts.get(mechanism, 0) + change
            if self.filter is not None:
                self._divergence += change * self.filter.cost(mechanism)
            self._releases += change
        return entry

    def _check(self, mechanism: Mechanism, count: int) -> None:
        self._check_writable()
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        try:
            check_fits(mechanism, self.dataset_size, self.relation)
        except ValueError as error:
            raise LedgerError(str(error)) from None

    def _require_room(self, mechanism: Mechanism, count: int) -> None:
        """Refuse a release that the declared filter has no room for."""
        if self.filter is None:
            return
        self.settle()  # what is reserved and not used is room
        spent = self._divergence + count * self.filter.cost(mechanism)
        if not self.filter.fits(spent):
            raise BudgetExhaustedError(
                f"the next release would exceed the declared {self.filter}: stop here. Nothing "
                "was released"
            )

    def _check_writable(self) -> None:
        if self._closed:
            raise LedgerError("the ledger is closed; open it again to go on")
        if os.getpid() != self._owner:
            self._refuse_child()

    def _refuse_child(self) -> NoReturn:
        raise LedgerError(
            f"this ledger belongs to process {self._owner}; a forked child (process "
            f"{os.getpid()}) must not write it"
        )


def check_fits(mechanism: Mechanism, dataset_size: int, relation: Relation) -> None:
    """Raise `ValueError` unless the release is about the ledger's data set and relation."""
    if mechanism.sampling.dataset_size != dataset_size:
        raise ValueError(
            f"the ledger is about a data set of {dataset_size} examples, the release about one "
            f"of {mechanism.sampling.dataset_size}"
        )
    if mechanism.relation is not relation:
        raise ValueError(f"the ledger is kept under {relation}, the release {mechanism.relation}")
