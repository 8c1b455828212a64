"""Every private release of a run, written down before its result is used."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any, NoReturn, Self

from clipless.errors import LedgerError
from clipless.privacy import _ledger_process
from clipless.privacy._ledger_file import LedgerFile
from clipless.privacy._ledger_format import (
    EntryKind,
    LedgerEntry,
    LedgerText,
    WrittenLine,
    check_fits,
    encode,
    header_fields,
    parse,
    timestamp,
)
from clipless.privacy._ledger_runs import RunSteps
from clipless.privacy._mechanism import Mechanism, Relation


class Ledger:
    """An append-only record of what has been spent, in a file or in memory.

    Guarantee: when `spend` or `record` returns, the release is on the disk. Whatever happens
    afterwards, `kill -9` included, a ledger opened again on the same file counts it. It may count
    at most one block too many, because steps are reserved in blocks; a clean end (`close`, leaving
    the `with` block, or the end of the program) gives back what was reserved and not used.

    A file is created if `path` does not exist, for which `dataset_size` and `relation` are needed;
    otherwise it is continued, never reset. A `path` of None keeps the ledger in memory. One ledger
    has one writer: a second one, in this or another process, is refused, and a forked child cannot
    write. In memory it may begin with a `snapshot` of another, for processes that follow that one.

    Blocks start with one step and double up to `block_size` while the mechanism stays the same, so
    that noise that changes with every step costs one line a step and no refunds.

    Example:
        >>> from clipless.privacy._mechanism import PoissonSampling
        >>> sampling = PoissonSampling(dataset_size=1000, rate=0.1)
        >>> step = Mechanism(noise_multiplier=1.0, sampling=sampling)
        >>> ledger = Ledger.in_memory(dataset_size=1000, relation=Relation.ADD_REMOVE)
        >>> for _ in range(5):
        ...     ledger.spend(step)
        >>> [count for mechanism, count in ledger.history()]
        [5]
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        dataset_size: int | None = None,
        relation: Relation | None = None,
        block_size: int = 256,
        snapshot: str | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self._mutex = threading.RLock()
        self._owner = os.getpid()
        self._closed = False
        self._block_size = block_size
        self._block: LedgerEntry | None = None
        self._unspent = 0
        self._steps = RunSteps()
        if path is not None and snapshot is not None:
            raise ValueError("a ledger in a file begins with what the file says: see absorb")
        self._file = None if path is None else LedgerFile(path)
        self._beginning = [] if snapshot is None else snapshot.splitlines()
        try:
            text = self._begin(dataset_size, relation)
        except BaseException:
            if self._file is not None:
                self._file.close()
            raise
        self._written = text.written()
        self._counts = text.counts()
        self._releases = sum(self._counts.values())
        self.dataset_size = text.dataset_size
        self.relation = text.relation
        self._append(EntryKind.OPEN, process=self._owner)
        _ledger_process.opened(self)

    @classmethod
    def in_memory(cls, *, dataset_size: int, relation: Relation, block_size: int = 256) -> Ledger:
        """Return a ledger without a file, which lives as long as the process, and no longer."""
        return cls(None, dataset_size=dataset_size, relation=relation, block_size=block_size)

    def spend(
        self, mechanism: Mechanism, *, label: str = "training step", limit: int | None = None
    ) -> None:
        """Count one release. Call it before the result is used, once for every step.

        Takes from the reserved block, and reserves a new one when that is empty. `limit` keeps a
        new block from being larger: the number of steps that are still planned, or allowed.
        A step that a resumed run repeats is counted already: see `begin_run`.
        """
        with self._mutex:
            if self._steps.any_prepaid:
                self._check_writable()
                if self._steps.take_prepaid(mechanism):
                    return
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
            self._open_block(mechanism, count, label)

    def record(self, mechanism: Mechanism, *, label: str, count: int = 1) -> None:
        """Count `count` releases at once: private statistics and whatever else is not a step."""
        with self._mutex:
            self._check(mechanism, count)
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

    def begin_run(self, run: str, *, spent: Iterable[tuple[Mechanism, int]] | None = None) -> None:
        """Write the steps that follow under the name of a training run, new or resumed.

        A run that is resumed gives `spent`: what `spent_in_run` said when the state was saved that
        it goes on from. Steps that the file counts for the run beyond that were reserved, and
        perhaps taken, after the state was saved; the next calls of `spend` use them up before
        anything new is counted. All the while `history` counts everything that was ever reserved.

        This is sound if each repeated step gives what it gave before (same weights, sample and
        noise), or if nobody has seen what it gave before. The caller vouches for that. Otherwise
        go on under a new name, with fresh samples and noise.
        """
        with self._mutex:
            self._check_writable()
            if not run:
                raise ValueError("a run needs a name")
            self.settle()
            steps = RunSteps(run, entries=self.entries(), spent=spent)
            self._append(EntryKind.OPEN, process=self._owner, label=run)
            self._steps = steps

    def spent_in_run(self) -> tuple[tuple[Mechanism, int], ...]:
        """Return the steps that lead to the run's present state, each once: part of that state."""
        with self._mutex:
            return self._steps.spent(self.entries(), self._block, self._unspent)

    def prepaid(self, mechanism: Mechanism) -> int:
        """Return how many calls of `spend` will repeat steps that are counted already."""
        return self._steps.prepaid(mechanism)

    def history(self) -> tuple[tuple[Mechanism, int], ...]:
        """Return what counts so far, for the accountant: pairs of mechanism and count.

        The part of the present block that was not used does not count; the blocks of processes
        that ended without giving back count in full.
        """
        with self._mutex:
            return tuple((each, self.count(each)) for each in self._counts if self.count(each))

    def count(self, mechanism: Mechanism) -> int:
        """Return how often `mechanism` counts so far."""
        with self._mutex:
            reserved = self._block is not None and self._block.mechanism == mechanism
            return self._counts.get(mechanism, 0) - (self._unspent if reserved else 0)

    @property
    def releases(self) -> int:
        """How many releases count so far, of all mechanisms together."""
        return self._releases - self._unspent

    @property
    def path(self) -> str | None:
        """Where the ledger is, or None for one in memory."""
        return None if self._file is None else str(self._file.path)

    @property
    def head(self) -> str:
        """The digest of the last line: it stands for everything the ledger says."""
        return self._written[-1].digest

    def entries(self) -> tuple[LedgerEntry, ...]:
        """Return all lines after the header."""
        return tuple(each.entry for each in self._written if each.entry is not None)

    def snapshot(self) -> str:
        """Return the whole ledger as text, settled, to be kept with a checkpoint."""
        with self._mutex:
            self.settle()
            return "".join(f"{each.line}\n" for each in self._written)

    def absorb(self, snapshot: str) -> None:
        """Count everything that `snapshot` counts and this ledger does not, once.

        Nothing is ever subtracted. A snapshot of this very ledger changes nothing; of one that
        went another way after a common beginning, what came after that beginning is added.
        """
        with self._mutex:
            self._check_writable()
            other = parse(snapshot.splitlines(), name="the ledger in the checkpoint")
            if (other.dataset_size, other.relation) != (self.dataset_size, self.relation):
                raise LedgerError(
                    f"the checkpoint's ledger is about {other.dataset_size} examples under "
                    f"{other.relation}, this one about {self.dataset_size} under {self.relation}"
                )
            head = other.digests[-1]
            digests = [each.digest for each in self._written]
            taken = {entry.source for entry in self.entries()}
            if head in digests or head in taken:
                return
            missing = other.releases_beyond(digests)
            for position, (mechanism, count) in enumerate(missing, start=1):
                # The source is named by the last line only: if a crash comes first, all lines
                # are taken over again, and some count twice rather than not at all.
                self._append(
                    EntryKind.RECORD,
                    mechanism=mechanism,
                    count=count,
                    label="from a checkpoint",
                    source=head if position == len(missing) else None,
                )

    def close(self) -> None:
        """Settle and let go of the file. A closed ledger can be read but not written."""
        with self._mutex:
            if self._closed:
                return
            try:
                if os.getpid() == self._owner:
                    self.settle()
            finally:
                self._closed = True
                _ledger_process.closed(self)
                if self._file is not None:
                    self._file.close()

    def let_go_in_child(self) -> None:
        """Close the copy of a forked child, or the lock would outlive the parent there."""
        self._mutex = threading.RLock()
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Nobody can spend any more; without this the lock would stay until the process ends.
        with contextlib.suppress(Exception):
            self.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise LedgerError("a ledger cannot be copied or pickled: two copies would spend one block")

    def _begin(self, dataset_size: int | None, relation: Relation | None) -> LedgerText:
        """Read the file, or write the header of a new one."""
        lines = self._beginning if self._file is None else self._file.lines
        name = "ledger" if self._file is None else str(self._file.path)
        if not lines:
            if dataset_size is None or relation is None:
                raise LedgerError(f"{name} is new: give it dataset_size and relation")
            line, _ = encode(header_fields(dataset_size=dataset_size, relation=relation), "")
            lines = [line]
            if self._file is not None:
                self._file.append(line, after=0)
                self._file.sync_directory()
        text = parse(lines, name=name)
        for given, found in ((dataset_size, text.dataset_size), (relation, text.relation)):
            if given is not None and given != found:
                raise LedgerError(
                    f"{name} was kept for {text.dataset_size} examples under {text.relation}, "
                    f"not for {given}; use another ledger for another data set or relation"
                )
        return text

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
    ) -> LedgerEntry:
        """Write one entry.

        `_written` alone says what is valid, and gets the entry in one operation: an exception in
        the middle (Ctrl-C, a full disk) leaves the entry out, and the next one replaces it.
        """
        entry = LedgerEntry(
            line=len(self._written) + 1,
            kind=kind,
            time=timestamp(),
            mechanism=mechanism,
            count=count,
            label=label,
            reservation=reservation,
            process=process,
            source=source,
        )
        last = self._written[-1]
        line, digest = encode(entry.to_dict(), last.digest)
        end = 0 if self._file is None else self._file.append(line, after=last.end)
        self._written.append(WrittenLine(entry, line, digest, end))
        if mechanism is not None:
            change = -count if kind is EntryKind.REFUND else count
            self._counts[mechanism] = self._counts.get(mechanism, 0) + change
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
