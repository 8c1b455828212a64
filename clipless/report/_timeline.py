"""The ledger of a run that has ended, as a sequence of releases; it is read, never opened."""

from __future__ import annotations

from dataclasses import dataclass, replace

from clipless.accounting import Mechanism
from clipless.common import not_set_error
from clipless.ledger import EntryKind, LedgerText


@dataclass(frozen=True, kw_only=True)
class Block:
    """Releases of one kind that the ledger counts, after refunds."""

    mechanism: Mechanism
    count: int
    label: str
    is_step: bool
    """Whether these are training steps; anything else was recorded as a private statistic."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What the ledger counts, in the order in which it was written."""

    blocks: tuple[Block, ...]

    @property
    def steps(self) -> int:
        """How many training steps count, those included that were reserved and never taken."""
        return sum(block.count for block in self.blocks if block.is_step)

    @property
    def releases(self) -> int:
        """How many releases of all kinds count."""
        return sum(block.count for block in self.blocks)

    def history(self) -> list[tuple[Mechanism, int]]:
        """Everything, for the accountant."""
        return [(block.mechanism, block.count) for block in self.blocks]

    def up_to(self, steps: int) -> list[tuple[Mechanism, int]]:
        """The first `steps` training steps, and what was recorded before the next one."""
        found: list[tuple[Mechanism, int]] = []
        left = steps
        for block in self.blocks:
            if not block.is_step:
                found.append((block.mechanism, block.count))
                continue
            found.append((block.mechanism, min(block.count, left)))
            left -= block.count
            if left < 0:
                break
        return found

    def without_last(self, steps: int) -> list[tuple[Mechanism, int]]:
        """Everything but the last `steps` training steps: all statistics, wherever they stand."""
        kept: list[tuple[Mechanism, int]] = []
        left = steps
        for block in reversed(self.blocks):
            dropped = min(block.count, left) if block.is_step else 0
            left -= dropped
            kept.append((block.mechanism, block.count - dropped))
        return kept[::-1]

    def labelled(self, label: str, *, is_step: bool) -> list[tuple[Mechanism, int]]:
        """The releases of one label."""
        return [
            (block.mechanism, block.count)
            for block in self.blocks
            if (block.label, block.is_step) == (label, is_step)
        ]

    def except_labelled(self, label: str, *, is_step: bool) -> list[tuple[Mechanism, int]]:
        """All releases but those of one label."""
        return [
            (block.mechanism, block.count)
            for block in self.blocks
            if (block.label, block.is_step) != (label, is_step)
        ]


def timeline(text: LedgerText) -> Timeline:
    """Return what a ledger counts: reservations less refunds, and records.

    Example:
        >>> from clipless.privacy import FullBatch, Ledger, Mechanism, Relation
        >>> from clipless.ledger import parse_ledger
        >>> step = Mechanism(noise_multiplier=2.0, sampling=FullBatch(dataset_size=10))
        >>> ledger = Ledger.in_memory(dataset_size=10, relation=Relation.ZERO_OUT)
        >>> ledger.record(step, label="column means")
        >>> for _ in range(5):
        ...     ledger.spend(step)
        >>> found = timeline(parse_ledger(ledger.snapshot().splitlines(), name="ledger"))
        >>> found.steps, found.releases, [block.label for block in found.blocks][:2]
        (5, 6, ['column means', 'training step'])
    """
    blocks: dict[int, Block] = {}
    for entry in text.entries:
        if entry.kind is EntryKind.REFUND:
            if entry.reservation is None:
                raise not_set_error("reservation")
            reserved = blocks[entry.reservation]
            blocks[entry.reservation] = replace(reserved, count=reserved.count - entry.count)
        elif entry.mechanism is not None:
            blocks[entry.line] = Block(
                mechanism=entry.mechanism,
                count=entry.count,
                label=entry.label,
                is_step=entry.kind is EntryKind.RESERVE,
            )
    return Timeline(blocks=tuple(block for block in blocks.values() if block.count))
