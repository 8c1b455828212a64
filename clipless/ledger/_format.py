"""The text of a ledger, read and verified: its header, its entries, and what they count."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clipless.accounting import Mechanism, Relation, RenyiFilter
from clipless.common import MALFORMED_ERRORS, error_text, fresh_bits
from clipless.errors import LedgerError
from clipless.ledger._writing import (
    DIGEST_LENGTH,
    DIGEST_MARK,
    INSECURE,
    EntryKind,
    LedgerEntry,
    WrittenLine,
    check_fits,
    digest_of,
    utc_timestamp,
)

FORMAT = "clipless-ledger"
VERSIONS = (1, 2)
"""Version 2 has a filter in its first line, which version 1 does not know."""
HEADER_START = f'{{"format": "{FORMAT}"'
EXAMPLES = "example"
"""The unit of a ledger that does not say another one: each record by itself."""


@dataclass(frozen=True, kw_only=True)
class LedgerText:
    """A parsed and verified ledger: its header, its entries, its lines and digests."""

    dataset_size: int
    relation: Relation
    filter: RenyiFilter | None
    unit: str
    entries: tuple[LedgerEntry, ...]
    lines: tuple[str, ...]
    digests: tuple[str, ...]

    @property
    def insecure(self) -> bool:
        """Whether noise or samples came from a seed, so that what is counted is not private."""
        return is_insecure(self.entries)

    def counts(self) -> dict[Mechanism, int]:
        """Return how often each mechanism counts, reservations in full unless refunded."""
        return _count_releases(self.entries)

    def written(self) -> list[WrittenLine]:
        """Return all lines, the header first, with the places where they end in the file."""
        written: list[WrittenLine] = []
        end = 0
        every = zip((None, *self.entries), self.lines, self.digests, strict=True)
        for entry, line, digest in every:
            end += len(line.encode()) + 1
            written.append(WrittenLine(entry, line, digest, end))
        return written

    def releases_beyond(self, digests: Sequence[str]) -> list[tuple[Mechanism, int]]:
        """Return what counts after the beginning that this ledger shares with another one."""
        common = sum(its == mine for its, mine in zip(digests, self.digests, strict=False))
        shared, own = self.entries[: max(common - 1, 0)], self.entries[max(common - 1, 0) :]
        # A reservation settled after the parting is not common ground: count it as beyond.
        settled = {entry.reservation for entry in own}
        known = _count_releases(entry for entry in shared if entry.line not in settled)
        return [
            (mechanism, count - known.get(mechanism, 0))
            for mechanism, count in self.counts().items()
            if count > known.get(mechanism, 0)
        ]


def is_insecure(entries: Iterable[LedgerEntry]) -> bool:
    """Whether anything was released with noise or samples that somebody can compute again."""
    return any(INSECURE in entry.label for entry in entries)


def _count_releases(entries: Iterable[LedgerEntry]) -> dict[Mechanism, int]:
    """Add up reservations and records and subtract refunds."""
    counts: dict[Mechanism, int] = {}
    for entry in entries:
        if entry.mechanism is not None:
            sign = -1 if entry.kind is EntryKind.REFUND else 1
            counts[entry.mechanism] = counts.get(entry.mechanism, 0) + sign * entry.count
    return {mechanism: count for mechanism, count in counts.items() if count}


def header_fields(
    *,
    dataset_size: int,
    relation: Relation,
    filter: RenyiFilter | None = None,
    unit: str | None = None,
) -> dict[str, Any]:
    """Return the fields of a first line. The identifier keeps equal beginnings of ledgers apart."""
    return {
        "format": FORMAT,
        "version": VERSIONS[filter is not None],
        "dataset_size": dataset_size,
        "relation": relation.value,
        **({} if filter is None else {"filter": filter.to_dict()}),
        **({} if unit in (None, EXAMPLES) else {"unit": unit}),
        "identifier": f"{fresh_bits(64):016x}",
        "time": utc_timestamp(),
    }


def decode(line: str, previous: str) -> tuple[dict[str, Any], str]:
    """Return the fields and the digest of a line, or raise `ValueError`."""
    text, mark, end = line.rpartition(DIGEST_MARK)
    digest = end[:DIGEST_LENGTH]
    if not mark or end != f'{digest}"}}' or digest != digest_of(text, previous):
        raise ValueError(
            "the line, or one before it, was damaged or edited; what the ledger counts cannot be "
            "trusted, so restore it from a backup or a checkpoint"
        )
    fields = json.loads(text + "}")
    return fields, digest


def parse_ledger(lines: Iterable[str], *, name: str) -> LedgerText:
    """Read a whole ledger; raise `LedgerError` naming `name` and the line if anything is amiss."""
    header: dict[str, Any] | None = None
    entries: list[LedgerEntry] = []
    kept: list[str] = []
    digests: list[str] = []
    reservations: dict[int, LedgerEntry] = {}
    for number, line in enumerate(lines, start=1):
        try:
            fields, digest = decode(line, digests[-1] if digests else "")
            if header is None:
                header = _read_header(fields)
            else:
                entry = _read_entry(fields, number, header, reservations)
                entries.append(entry)
        except MALFORMED_ERRORS as error:
            raise LedgerError(f"{name}, line {number}: {error_text(error)}") from error
        kept.append(line)
        digests.append(digest)
    if header is None:
        raise LedgerError(f"{name} is empty, which no ledger is")
    return LedgerText(
        dataset_size=header["dataset_size"],
        relation=Relation(header["relation"]),
        filter=_filter_of(header),
        unit=header.get("unit", EXAMPLES),
        entries=tuple(entries),
        lines=tuple(kept),
        digests=tuple(digests),
    )


def _read_header(fields: dict[str, Any]) -> dict[str, Any]:
    if fields.get("format") != FORMAT:
        raise ValueError("this is not a ledger")
    if fields.get("version") not in VERSIONS:
        raise ValueError(
            f"version {fields.get('version')} of the format is unknown (this clipless reads "
            f"versions {VERSIONS}); a newer clipless may read it"
        )
    if not (isinstance(fields["dataset_size"], int) and fields["dataset_size"] >= 1):
        raise ValueError("the header has no valid dataset_size")
    Relation(fields["relation"])
    _filter_of(fields)
    if not (isinstance(fields.get("unit", EXAMPLES), str) and fields.get("unit", EXAMPLES)):
        raise ValueError("the header has no valid unit")
    return fields


def _filter_of(header: Mapping[str, Any]) -> RenyiFilter | None:
    if header["version"] == 1 and "filter" not in header:
        return None
    if header["version"] == 1 or not isinstance(header.get("filter"), dict):
        raise ValueError("a filter is declared in version 2 of the format, and nowhere else")
    return RenyiFilter.from_dict(header["filter"])


def _read_entry(
    fields: dict[str, Any],
    number: int,
    header: dict[str, Any],
    reservations: dict[int, LedgerEntry],
) -> LedgerEntry:
    """Check one entry against the header and the reservations that are still open."""
    fields = dict(fields)
    if fields["line"] != number:
        raise ValueError(f"the line says that it is line {fields['line']}")
    kind = EntryKind(fields.pop("kind"))
    count = fields.get("count", 0)
    if kind not in (EntryKind.OPEN, EntryKind.RELEASE) and not (type(count) is int and count >= 1):
        raise ValueError(f"count is {count!r}, not a positive whole number")
    mechanism = None
    if kind in (EntryKind.RESERVE, EntryKind.RECORD):
        mechanism = Mechanism.from_dict(fields.pop("mechanism"))
        check_fits(mechanism, header["dataset_size"], Relation(header["relation"]))
    elif kind is EntryKind.REFUND:
        reserved = reservations.pop(fields["reservation"], None)
        if reserved is None or count > reserved.count:
            raise ValueError("the refund exceeds what is reserved")
        mechanism = reserved.mechanism
    entry = LedgerEntry(kind=kind, mechanism=mechanism, **fields)
    if kind is EntryKind.RESERVE:
        reservations[number] = entry
    return entry
