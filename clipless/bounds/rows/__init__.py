"""The proof that examples stay apart: the batch axis is followed through every aten operator."""

from clipless.bounds.rows._calls import TracedCall, compare_passes
from clipless.bounds.rows._layout import Rows
from clipless.bounds.rows._libraries import without_shortcuts
from clipless.bounds.rows._rule import RowCall, register_rows, unregister_rows
from clipless.bounds.rows._trace import RowTrace, trace_rows
from clipless.bounds.rows.rules import RULE_FILES as RULE_FILES

__all__ = [
    "Rows",
    "RowCall",
    "RowTrace",
    "TracedCall",
    "compare_passes",
    "register_rows",
    "unregister_rows",
    "trace_rows",
    "without_shortcuts",
]
