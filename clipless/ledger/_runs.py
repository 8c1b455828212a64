"""The training runs that write a ledger: what each has spent, and what it has released."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from clipless.accounting import Mechanism
from clipless.errors import LedgerError
from clipless.ledger._writing import EntryKind, LedgerEntry

Unused = tuple[LedgerEntry | None, int]
"""A run's open block, and how many of its steps have not been taken."""


class RunSteps:
    """The steps of one run in a ledger, those included that it will repeat.

    Steps that the ledger counts beyond `spent` were reserved, and perhaps taken, after the state
    was saved that the run goes on from.
    """

    def __init__(
        self,
        run: str = "",
        *,
        entries: Iterable[LedgerEntry] = (),
        spent: Iterable[tuple[Mechanism, int]] | None = None,
        unused: Unused = (None, 0),
    ) -> None:
        counted = _counts_of_run(entries, run, unused)
        if spent is None and counted:
            raise LedgerError(f"the ledger knows the run {run} already: give spent, to resume")
        for mechanism, count in spent or ():
            if counted.get(mechanism, 0) < count:
                raise LedgerError(
                    f"the saved state has spent {count} steps of the run {run}, but the ledger "
                    f"counts {counted.get(mechanism, 0)}: it is not the run's, or was replaced "
                    "by an older one. Put back the file that the run has written."
                )
            counted[mechanism] -= count
        self.run, self._ahead = run, counted

    def repeat(self, mechanism: Mechanism) -> None:
        """Advance by one step, which is counted already."""
        self._ahead[mechanism] = max(self._ahead.get(mechanism, 0) - 1, 0)

    def spent(
        self, entries: Iterable[LedgerEntry], unused: Unused
    ) -> tuple[tuple[Mechanism, int], ...]:
        """Return the steps that lead to the run's present state, each once."""
        counts = _counts_of_run(entries, self.run, unused)
        taken = ((each, count - self._ahead.get(each, 0)) for each, count in counts.items())
        return tuple((each, count) for each, count in taken if count)


def releases_of_run(entries: Iterable[LedgerEntry], run: str) -> dict[int, str]:
    """Return the digests of what a run has released, by step."""
    return {
        entry.step: entry.released
        for entry in _entries_of_run(entries, run)
        if entry.step is not None and entry.released is not None
    }


def nothing_released_since(entries: Iterable[LedgerEntry], run: str, step: int) -> bool:
    """Return whether the ledger knows of no release from `step` of a run on.

    Neither of the run itself, nor of any other since its last release before that: whatever came
    after may have gone on from the same state. It is the ledger's lines that say so, all of which
    must have been on the disk before a result was used (`Ledger.release(certain=True)`).
    """
    writer, known, since = "", False, 0
    for entry in entries:
        if entry.kind is EntryKind.OPEN:
            writer = entry.label
            known |= writer == run
        elif entry.kind is EntryKind.RELEASE and writer == run:
            if entry.step is None or entry.step >= step:
                return False
            since = 0
        elif entry.kind is EntryKind.RELEASE:
            since += known
    return known and not since


def _entries_of_run(entries: Iterable[LedgerEntry], run: str) -> Iterator[LedgerEntry]:
    writer = ""
    for entry in entries:
        if entry.kind is EntryKind.OPEN:
            writer = entry.label
        elif writer == run:
            yield entry


def _counts_of_run(
    entries: Iterable[LedgerEntry], run: str, unused: Unused
) -> dict[Mechanism, int]:
    """Add up what was reserved and not given back while `run` was the one that wrote."""
    counts: dict[Mechanism, int] = {}
    for entry in _entries_of_run(entries, run):
        if entry.mechanism is not None and entry.kind is not EntryKind.RECORD:
            sign = -1 if entry.kind is EntryKind.REFUND else 1
            counts[entry.mechanism] = counts.get(entry.mechanism, 0) + sign * entry.count
    block, unspent = unused
    if block is not None and block.mechanism in counts:
        counts[block.mechanism] -= unspent
    return {mechanism: count for mechanism, count in counts.items() if count}
