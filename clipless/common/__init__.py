"""Helpers of all rooms: argument checks, lazy names, errors of damaged files, locks, releases."""

from clipless.common._arguments import (
    did_you_mean,
    names_moved_arguments,
    not_set_error,
    require_positive,
)
from clipless.common._duration import DurationNote
from clipless.common._lazy import lazy_names
from clipless.common._lock import take_lock
from clipless.common._malformed import MALFORMED_ERRORS, error_text
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
    "MALFORMED_ERRORS",
    "DurationNote",
    "Query",
    "Watcher",
    "did_you_mean",
    "empty_row",
    "fresh_bits",
    "lazy_names",
    "not_set_error",
    "require_positive",
    "publish",
    "error_text",
    "release_",
    "names_moved_arguments",
    "take_lock",
    "watched_by",
]
