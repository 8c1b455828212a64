"""What every room shares: checks of arguments, lazy names, damaged files, the place of releases."""

from clipless.common._arguments import missing, positive, says_where
from clipless.common._lazy import lazy
from clipless.common._lock import take_lock
from clipless.common._malformed import MALFORMED, reason
from clipless.common._release import (
    Query,
    Watcher,
    empty_row,
    fresh_bits,
    publish,
    release_,
    watched_by,
)

__all__: list[str] = [
    "MALFORMED",
    "Query",
    "Watcher",
    "empty_row",
    "fresh_bits",
    "lazy",
    "missing",
    "positive",
    "publish",
    "reason",
    "release_",
    "says_where",
    "take_lock",
    "watched_by",
]
