"""Columns that number the rows: told by their names, which are public, and by nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBERING = re.compile(
    r"(row|record|line|entry|sample|case|unique)[ _.-]?(id|no|nr|num|number)|_?id|idx|uuid|guid"
    r"|index|unnamed: ?0|__index_level_0__",
    re.IGNORECASE,
)
_PERHAPS = re.compile(r".+[ _.-](id|uuid|guid|key)|.+[a-z]I[dD]")


class ColumnWarning(UserWarning):
    """A column is not used, or is not worth using; the message says why and what to do."""


def identifiers(names: Sequence[str]) -> set[int]:
    """Return the positions of the columns that number rows, by their names.

    Example:
        >>> sorted(identifiers(["id", "age", "Unnamed: 0", "row_id", "paid", "country_id"]))
        [0, 2, 3]
    """
    return {place for place, name in enumerate(names) if _NUMBERING.fullmatch(name.strip())}


def perhaps_identifiers(names: Sequence[str]) -> set[int]:
    """Return the positions of columns that may name people, and may as well be categories.

    Example:
        >>> sorted(perhaps_identifiers(["id", "country_id", "customerId", "paid"]))
        [1, 2]
    """
    found = {place for place, name in enumerate(names) if _PERHAPS.fullmatch(name.strip())}
    return found - identifiers(names)
