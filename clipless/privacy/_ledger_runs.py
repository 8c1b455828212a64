"""The training run that writes a ledger: which of its steps are counted already."""

from __future__ import annotations

from collections.abc import Iterable

from clipless.errors import LedgerError
from clipless.privacy._ledger_format import EntryKind, LedgerEntry
from clipless.privacy._mechanism import Mechanism


class RunSteps:
    """The steps of one run in a ledger, those included that it will repeat.

    Steps that the ledger counts beyond `spent` were reserved, and perhaps taken, after the state
    was saved that the run goes on from. They are prepaid: repeating them costs nothing more.
    """

    def __init__(
        self,
        run: str = "",
        *,
        entries: Iterable[LedgerEntry] = (),
        spent: Iterable[tuple[Mechanism, int]] | None = None,
    ) -> None:
        counted = _counts_of_run(entries, run)
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
        self._run = run
        self._prepaid = {mechanism: count for mechanism, count in counted.items() if count}

    def prepaid(self, mechanism: Mechanism) -> int:
        """Return how many steps to come are counted already."""
        return self._prepaid.get(mechanism, 0)

    @property
    def any_prepaid(self) -> bool:
        """Whether there are such steps at all."""
        return bool(self._prepaid)

    def take_prepaid(self, mechanism: Mechanism) -> bool:
        """Use up one of them; return whether there was one."""
        left = self._prepaid.get(mechanism, 0)
        if left > 1:
            self._prepaid[mechanism] = left - 1
        elif left:
            del self._prepaid[mechanism]
        return left > 0

    def spent(
        self, entries: Iterable[LedgerEntry], block: LedgerEntry | None, unspent: int
    ) -> tuple[tuple[Mechanism, int], ...]:
        """Return the steps that lead to the run's present state, each once.

        The last `unspent` steps of the open block `block` have not been taken.
        """
        counts = _counts_of_run(entries, self._run)
        if block is not None and block.mechanism in counts:
            counts[block.mechanism] -= unspent
        taken = ((each, count - self.prepaid(each)) for each, count in counts.items())
        return tuple((each, count) for each, count in taken if count)


def _counts_of_run(entries: Iterable[LedgerEntry], run: str) -> dict[Mechanism, int]:
    """Add up what was reserved and not given back while `run` was the one that wrote."""
    counts: dict[Mechanism, int] = {}
    writer = ""
    for entry in entries:
        if entry.kind is EntryKind.OPEN:
            writer = entry.label
        elif writer == run and entry.mechanism is not None and entry.kind is not EntryKind.RECORD:
            sign = -1 if entry.kind is EntryKind.REFUND else 1
            counts[entry.mechanism] = counts.get(entry.mechanism, 0) + sign * entry.count
    return {mechanism: count for mechanism, count in counts.items() if count}
