"""The append-only ledger of all releases: its file, its readers, and budgets. No torch."""

from clipless.ledger._budget import Budget, BudgetMeter, accountant_of, delta_of
from clipless.ledger._file import LedgerInUseError, read_closed_ledger, read_ledger
from clipless.ledger._format import LedgerText, parse_ledger
from clipless.ledger._ledger import Ledger
from clipless.ledger._runs import nothing_released_since
from clipless.ledger._writing import INSECURE, EntryKind, utc_timestamp

__all__ = [
    "Ledger",
    "read_ledger",
    "read_closed_ledger",
    "LedgerInUseError",
    "Budget",
    "BudgetMeter",
    "accountant_of",
    "delta_of",
    "EntryKind",
    "LedgerText",
    "parse_ledger",
    "utc_timestamp",
    "INSECURE",
    "nothing_released_since",
]
