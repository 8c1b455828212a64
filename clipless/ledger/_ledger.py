"""`Ledger`: every private release of a run, written to disk before its result is used."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from typing import Any, NoReturn, Self

from clipless.accounting import (
    Mechanism,
    Relation,
    RenyiFilter,
    require_supported_relation,
    steps_paid_together,
)
from clipless.errors import LedgerError
from clipless.ledger import _process
from clipless.ledger._file import LedgerFile
from clipless.ledger._format import (
    EXAMPLES,
    LedgerText,
    header_fields,
    is_insecure,
    parse_ledger,
)
from clipless.ledger._runs import RunSteps, releases_of_run
from clipless.ledger._writing import INSECURE, EntryKind, LedgerWriter, encode


class Ledger(LedgerWriter):
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

    What counts once is an example, or with `unit` a user: `Users(...).digest`, which says whose
    each record is. It stands in the first line and stays; a release about other units is refused.

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
        unit: str | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        if path is not None and snapshot is not None:
            raise ValueError("a ledger in a file begins with what the file says: see absorb")
        file = None if path is None else LedgerFile(path)
        beginning = [] if snapshot is None else snapshot.splitlines()
        try:
            text = _begun(file, beginning, dataset_size, relation, filter, unit)
            super().__init__(text, file, block_size=block_size, runs={"": RunSteps()})
        except BaseException:
            if file is not None:
                file.close()
            raise
        _process.opened(self)

    @classmethod
    def in_memory(
        cls,
        *,
        dataset_size: int,
        relation: Relation,
        block_size: int = 64,
        filter: RenyiFilter | None = None,
        unit: str | None = None,
    ) -> Ledger:
        """Return a ledger without a file, which lives as long as the process, and no longer."""
        return cls(
            None, dataset_size=dataset_size, relation=relation, block_size=block_size,
            filter=filter, unit=unit,
        )  # fmt: skip

    def require_unit(self, unit: str | None) -> None:
        """Refuse releases about other units than the ledger's: None for examples.

        The same number of them is not enough: what is counted for one unit says nothing of another.
        """
        _require_unit(self.unit, unit or EXAMPLES, self.path or "the ledger")

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

    def has_line(self, digest: str) -> bool:
        """Whether one of the lines has this digest: then all up to it is as it was written."""
        with self._mutex:
            return any(each.digest == digest for each in self._written)

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
            _require_unit(self.unit, other.unit, self.path or "the ledger")
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
            if any(steps_paid_together(each.sampling) > 1 for each in other.counts()):
                raise LedgerError(
                    "the checkpoint's ledger went another way and counts passes in a fixed order, "
                    "or rounds of groups, of which both may have released a part: what they cost "
                    "together is not the sum of what they say. Go on with the ledger that its run "
                    "has written"
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


def _begun(
    file: LedgerFile | None,
    beginning: list[str],
    dataset_size: int | None,
    relation: Relation | None,
    filter: RenyiFilter | None,
    unit: str | None,
) -> LedgerText:
    """Read the file, or write the header of a new one."""
    lines = beginning if file is None else file.lines
    name = "ledger" if file is None else str(file.path)
    if not lines:
        if dataset_size is None or relation is None:
            raise LedgerError(f"{name} is new: give it dataset_size and relation")
        relation = require_supported_relation(relation)
        header = header_fields(
            dataset_size=dataset_size, relation=relation, filter=filter, unit=unit
        )
        line, _ = encode(header, "")
        lines = [line]
        if file is not None:
            file.append(line, after=0)
            file.sync_directory()
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
    if unit is not None:
        _require_unit(text.unit, unit, name)
    return text


def _require_unit(kept: str, asked: str, name: str) -> None:
    if kept != asked:
        raise LedgerError(
            f"{name} was begun for {_unit_text(kept)}, not for {_unit_text(asked)}: what it counts "
            "would be untrue of them, even where there are as many. Go on with the same unit, "
            "begin a ledger for this one (Ledger(..., unit=users.digest)), or use a new run folder"
        )


def _unit_text(unit: str) -> str:
    return "single examples" if unit == EXAMPLES else f"users whose records are {unit}"
