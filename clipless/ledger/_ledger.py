"""`Ledger`: every private release of a run, written to disk before its result is used."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, Self

from clipless.accounting import (
    FixedOrder,
    Mechanism,
    Relation,
    RenyiFilter,
    require_supported_relation,
)
from clipless.common import publish
from clipless.errors import BudgetExhaustedError, LedgerError
from clipless.ledger import _process
from clipless.ledger._file import LedgerFile
from clipless.ledger._format import (
    INSECURE,
    EntryKind,
    LedgerEntry,
    LedgerText,
    WrittenLine,
    check_fits,
    encode,
    header_fields,
    is_insecure,
    parse_ledger,
    utc_timestamp,
)
from clipless.ledger._runs import RunSteps, releases_of_run


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

    With a `filter`, which is declared when the ledger is created and cannot be changed, a release
    that would exceed it is refused with `BudgetExhaustedError`, and nothing is written. Such a
    ledger also covers noise, rates and numbers of steps that were chosen by looking at results.

    Blocks start with one step and double up to `block_size` while the mechanism stays the same, so
    that noise that changes with every step costs one line a step and no refunds.

    Example:
        >>> from clipless.accounting._mechanism import PoissonSampling
        >>> sampling = PoissonSampling(dataset_size=1000, rate=0.1)
        >>> step = Mechanism(noise_multiplier=1.0, sampling=sampling)
        >>> ledger = Ledger.in_memory(dataset_size=1000, relation=Relation.ZERO_OUT)
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
        block_size: int = 64,
        snapshot: str | None = None,
        filter: RenyiFilter | None = None,
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
        self._runs = {"": self._steps}
        self.continued: set[str] = set()
        """The runs of this process whose noise another one has gone on with."""
        if path is not None and snapshot is not None:
            raise ValueError("a ledger in a file begins with what the file says: see absorb")
        self._file = None if path is None else LedgerFile(path)
        self._beginning = [] if snapshot is None else snapshot.splitlines()
        try:
            text = self._begin(dataset_size, relation, filter)
        except BaseException:
            if self._file is not None:
                self._file.close()
            raise
        self._written = text.written()
        self._counts = text.counts()
        self._releases = sum(self._counts.values())
        self.dataset_size = text.dataset_size
        self.relation = text.relation
        self.filter = text.filter
        """What was declared before the first release, for choices that look at results."""
        self._divergence = (
            0.0 if text.filter is None else text.filter.spent(tuple(self._counts.items()))
        )
        self._append(EntryKind.OPEN, process=self._owner)
        _process.opened(self)

    @classmethod
    def in_memory(
        cls,
        *,
        dataset_size: int,
        relation: Relation,
        block_size: int = 64,
        filter: RenyiFilter | None = None,
    ) -> Ledger:
        """Return a ledger without a file, which lives as long as the process, and no longer."""
        return cls(
            None, dataset_size=dataset_size, relation=relation, block_size=block_size, filter=filter
        )

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

    def begin_run(self, run: str, *, spent: Iterable[tuple[Mechanism, int]] | None = None) -> None:
        """Write the steps that follow under the name of a training run, new or resumed.

        A name stands for one stream of samples and noise. A run that is resumed gives `spent`:
        what `spent_in_run` said when the state was saved that it goes on from. While it repeats
        steps with the same samples and noise, and they come out as `released` says, they cost
        nothing more: call `repeat` for each. Whatever differs goes on under a new name.
        """
        with self._mutex:
            self._check_writable()
            if not run:
                raise ValueError("a run needs a name")
            unused = (self._block, self._unspent) if run == self._steps.run else (None, 0)
            steps = RunSteps(run, entries=self.entries(), spent=spent, unused=unused)
            self.settle()
            self._append(EntryKind.OPEN, process=self._owner, label=run)
            self._steps = self._runs[run] = steps

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

    def released(self, run: str) -> dict[int, str]:
        """Return the digests of all that a run has released, by step."""
        return releases_of_run(self.entries(), run)

    @property
    def insecure(self) -> bool:
        """Whether a run's noise or samples came from a seed: what is counted is not private."""
        return is_insecure(self.entries())

    def spent_in_run(self, run: str | None = None) -> tuple[tuple[Mechanism, int], ...]:
        """Return the steps that lead to the run's present state, each once: part of that state.

        By default of the run that has written last.
        """
        with self._mutex:
            steps = self._steps if run is None else self._runs[run]
            unused = (self._block, self._unspent) if steps is self._steps else (None, 0)
            return steps.spent(self.entries(), unused)

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
    def closed(self) -> bool:
        """Whether the ledger is closed and can only be read."""
        return self._closed

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
            other = parse_ledger(snapshot.splitlines(), name="the ledger in the checkpoint")
            mine, its = ((e.dataset_size, e.relation, e.filter) for e in (self, other))
            if its != mine:
                raise LedgerError(
                    f"the checkpoint's ledger is about {its[0]} examples under {its[1]} with "
                    f"{its[2] or 'no filter'}, this one about {mine[0]} under {mine[1]} with "
                    f"{mine[2] or 'no filter'}"
                )
            head = other.digests[-1]
            digests = [each.digest for each in self._written]
            taken = {entry.source for entry in self.entries()}
            if head in digests or head in taken:
                return
            if any(isinstance(each.sampling, FixedOrder) for each in other.counts()):
                raise LedgerError(
                    "the checkpoint's ledger went another way and counts passes in a fixed order, "
                    "of which both may have released a part: what they cost together is not the "
                    "sum of what they say. Go on with the ledger that its run has written"
                )
            missing = other.releases_beyond(digests)
            for position, (mechanism, count) in enumerate(missing, start=1):
                # The source is named by the last line only: if a crash comes first, all lines
                # are taken over again, and some count twice rather than not at all.
                self._append(
                    EntryKind.RECORD,
                    mechanism=mechanism,
                    count=count,
                    label=f"from a checkpoint{', ' + INSECURE if other.insecure else ''}",
                    source=head if position == len(missing) else None,
                )

    def close(self) -> None:
        """Settle the ledger and close its file. A closed ledger can be read but not written."""
        with self._mutex:
            if self._closed:
                return
            try:
                if os.getpid() == self._owner:
                    self.settle()
            finally:
                self._closed = True
                _process.closed(self)
                if self._file is not None:
                    self._file.close()

    def let_go_in_child(self) -> None:
        """Close the copy of a forked child, which would otherwise keep the lock."""
        self._mutex = threading.RLock()
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Nobody can spend any more; without this the lock would stay until the process ends.
        with contextlib.suppress(Exception):
            self.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise LedgerError("a ledger cannot be copied or pickled: two copies would spend one block")

    def _begin(
        self, dataset_size: int | None, relation: Relation | None, filter: RenyiFilter | None
    ) -> LedgerText:
        """Read the file, or write the header of a new one."""
        lines = self._beginning if self._file is None else self._file.lines
        name = "ledger" if self._file is None else str(self._file.path)
        if not lines:
            if dataset_size is None or relation is None:
                raise LedgerError(f"{name} is new: give it dataset_size and relation")
            relation = require_supported_relation(relation)
            header = header_fields(dataset_size=dataset_size, relation=relation, filter=filter)
            line, _ = encode(header, "")
            lines = [line]
            if self._file is not None:
                self._file.append(line, after=0)
                self._file.sync_directory()
        text = parse_ledger(lines, name=name)
        size, asked = dataset_size or text.dataset_size, relation or text.relation
        if size != text.dataset_size or not asked.continues(text.relation):
            raise LedgerError(
                f"{name} was kept for {text.dataset_size} examples under {text.relation}, not for "
                f"{size} under {asked}; use another ledger for another data set or relation"
            )
        if filter is not None and filter != text.filter:
            raise LedgerError(
                f"{name} was begun with {text.filter or 'no filter'}, not with {filter}: a filter "
                "is declared before the first release and stays. Use another ledger, or leave it "
                "out"
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
        line, digest = encode(entry.to_dict(), last.digest)
        end, sync = 0, certain
        if self._file is not None:
            end = self._file.append(line, after=last.end, sync=sync)
        self._written.append(WrittenLine(entry, line, digest, end))
        if kind is not EntryKind.REFUND:  # which may wait until the ledger is collected as garbage
            publish("ledger", {**entry.to_dict(), "time": None, "process": None, "source": None})
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
