"""Dates as people write them: what one text says, by rules that are fixed beforehand.

A text has one meaning (`2024-02-29`, `2024/02/29`, `29.02.2024`, `29 Feb 2024`), or it is numbers
in an order that differs between countries (`03/04/2024`): then both readings are returned, and
which one holds is a property of the column, which is declared or put to a private vote.
"""

from __future__ import annotations

import datetime
import re
from typing import NamedTuple

_TIME = (
    r"(?:[ T](?P<hour>\d{1,2}):(?P<minute>\d{2})"
    r"(?::(?P<second>\d{2})(?:\.(?P<fraction>\d{1,6})\d*)?)?"
    r"(?: ?(?P<half>[AaPp])\.?[Mm]\.?)?(?P<zone> ?Z| ?[+-]\d{2}:?\d{2})?)?"
)
_MONTHS = [
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
]
_NAME = r"(?P<name>[A-Za-z]{3,9})\.?"
_YEAR_FIRST = re.compile(r"(?P<year>\d{4})([-/.])(?P<month>\d{1,2})\2(?P<day>\d{1,2})" + _TIME)
_DOTTED = re.compile(r"(?P<day>\d{1,2})\.(?P<month>\d{1,2})\.(?P<year>\d{4})" + _TIME)
_DAY_NAMED = re.compile(r"(?P<day>\d{1,2})[ -]" + _NAME + r"[ -](?P<year>\d{4})" + _TIME)
_NAME_FIRST = re.compile(_NAME + r" (?P<day>\d{1,2}),? (?P<year>\d{4})" + _TIME)
_NUMERIC = re.compile(
    r"(?P<one>\d{1,2})([-/])(?P<two>\d{1,2})\2(?P<year>\d{4}|\d{2})" + _TIME
)  # fmt: skip
_LONGEST = 48


class NumericDate(NamedTuple):
    """What a date of three numbers is by either order; None where that is no date."""

    day_first: datetime.datetime | None
    month_first: datetime.datetime | None

    @property
    def certain(self) -> bool:
        """Whether one of the two orders is impossible."""
        return self.day_first is None or self.month_first is None

    def read(self, *, day_first: bool) -> datetime.datetime:
        """Return the date by one order, or by the other one where that is no date."""
        first, second = (self.day_first, self.month_first) if day_first else self[::-1]
        found = first or second
        if found is None:
            raise ValueError("a numeric date has at least one reading")
        return found


def parse_date(text: str) -> datetime.datetime | None:
    """Return the date of a text that has one meaning, in universal time if it names a zone.

    Example:
        >>> [str(parse_date(text)) for text in ("2024/2/9", "29.02.2024 18:30", "Feb 29, 2024")]
        ['2024-02-09 00:00:00', '2024-02-29 18:30:00', '2024-02-29 00:00:00']
        >>> print(parse_date("2024-02-29T23:00:00-02:00"), parse_date("03/04/2024"))
        2024-03-01 01:00:00 None
    """
    if len(text) > _LONGEST or not text.isascii():
        return None
    for pattern in (_YEAR_FIRST, _DOTTED, _DAY_NAMED, _NAME_FIRST):
        match = pattern.fullmatch(text)
        if match is not None:
            parts = match.groupdict()
            month = parts.get("month") or _month(parts.get("name") or "")
            return None if month is None else _date(parts, int(month), int(parts["day"]))
    return None


def parse_numeric_date(text: str) -> NumericDate | None:
    """Return both readings of a date like 03/04/2024, or None if neither is a date.

    Example:
        >>> [reading.month for reading in parse_numeric_date("03/04/2024")]
        [4, 3]
        >>> parse_numeric_date("31/12/24").certain, parse_numeric_date("31/31/2024")
        (True, None)
    """
    match = _NUMERIC.fullmatch(text) if len(text) <= _LONGEST and text.isascii() else None
    if match is None:
        return None
    parts = match.groupdict()
    one, two = int(parts["one"]), int(parts["two"])
    found = NumericDate(_date(parts, two, one), _date(parts, one, two))
    return None if found == (None, None) else found


def _month(name: str) -> int | None:
    """The number of a month by its name, whole or shortened."""
    lowered = "sep" if name.lower() == "sept" else name.lower()
    found = [number for number, full in enumerate(_MONTHS, 1) if lowered in (full, full[:3])]
    return found[0] if found else None


def _date(parts: dict[str, str | None], month: int, day: int) -> datetime.datetime | None:
    year = int(parts["year"] or 0)
    if len(parts["year"] or "") == 2:
        year += 1900 if year >= 69 else 2000
    hour = int(parts["hour"] or 0)
    half = (parts["half"] or "").lower()
    if half:
        if not 1 <= hour <= 12:
            return None
        hour = hour % 12 + (12 if half == "p" else 0)
    try:
        microseconds = int((parts["fraction"] or "").ljust(6, "0"))
        minute, second = int(parts["minute"] or 0), int(parts["second"] or 0)
        found = datetime.datetime(year, month, day, hour, minute, second, microseconds)
        zone = (parts["zone"] or "").strip().replace(":", "")
        if len(zone) > 1:
            away = datetime.timedelta(hours=int(zone[1:3]), minutes=int(zone[3:5]))
            found = found - away if zone[0] == "+" else found + away
    except (ValueError, OverflowError):
        return None
    return found
